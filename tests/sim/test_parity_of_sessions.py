"""What lies between the router core and a worker, real and simulated: one script for both.

Real are `router.links.worker_links`, `router.links.worker_links`, gRPC over loopback,
`cluster.worker_process.grpc_service` and `cluster.worker_process.worker_thread`; their stand-ins are
`sim.nodes.sim_link.SimLink` and `sim.nodes.sim_worker.SimHost`. A scene sees what router core and worker see: links
that open and end, events, commands, sessions that are dropped, the worker's end. How long things take, and the words of
a reason, are not compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.cluster.fake_worker import FakeWorker, submit
from tests.support.fault_proxy import proxying
from tests.support.room_ends import SimWaiter
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.worker_process import serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.leases import DepartureAnswer, LeaseGrant
from twinpool.contracts.messages.pool_changes import ChangedWorkers, OperatorChange, SettingsAnswer, SettingsChange
from twinpool.contracts.messages.router_commands import Cancel, Command
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.wire.message_codec import FRAME_COMMANDS
from twinpool.router.links.controller_port import WorkerClient
from twinpool.router.links.worker_links import GrpcWorkerClient, WorkerLinks
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.fabric.plane_faults import StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimNetwork, SimSwitch
from twinpool.sim.fabric.sim_storage import SimArenas
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualTime
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_link import SimLink
from twinpool.sim.nodes.sim_worker import SimHost
from twinpool.sim.scenario.scenario import ClusterShape

KEY: WorkerKey = (WorkerName("decode-0"), Incarnation(1))
ENOUGH_S = 60.0


class Scripted(FakeWorker):
    """A worker that notes what it is told. `sleep`: how it waits, where that is simulated."""

    def __init__(self, sleep: Any = None, incarnation: int = 1) -> None:
        super().__init__(incarnation=incarnation)
        self.seen: list[str] = []
        self.ends: list[str] = []
        self._sleep = sleep

    def handle(self, session: SessionId, command: Command) -> None:
        super().handle(session, command)
        self.seen.append(f"{type(command).__name__} {command.request_id}")

    def step(self) -> list[tuple[SessionId, Event]]:
        """Tokens are their positions."""
        return [(session, _plain(event)) for session, event in super().step()]

    def wait(self, timeout_s: float) -> None:
        if self._sleep is None:
            super().wait(timeout_s)
        elif not self.running or self.hold:
            self._sleep.wait(timeout_s)

    def wake(self) -> None:
        super().wake() if self._sleep is None else self._sleep.wake()

    def fence(self) -> None:
        super().fence()
        self.ends.append("fenced")

    def close(self) -> None:
        super().close()
        self.ends.append("closed")


def _plain(event: Event) -> Event:
    return replace(event, tokens=(event.position,)) if isinstance(event, Tokens) else event


@dataclass
class Scene:
    """A router's side and a worker."""

    worker: Scripted
    pause: Callable[[], None]
    open: Callable[[WorkerKey], None]
    """The controller's table shows this worker: the router keeps a link to it from now on."""
    close: Callable[[str], None]
    """The table shows it in this state, in which it can't be reached; empty: not any more."""
    send: Callable[[Sequence[Command]], None]
    cut: Callable[[], None]
    """The connection is cut, with all that is under way in it."""
    lose_lease: Callable[[], None]
    call: Callable[[Callable[[Any], None]], None]
    """Has the worker's own thread call something."""
    ended: Callable[[], bool]
    links: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def until(self, come: Callable[[], object], what: str) -> None:
        end = time.monotonic() + ENOUGH_S
        while not come():
            assert time.monotonic() < end, f"waited for {what}; links {self.links}, worker {self.worker.seen}"
            self.pause()

    def linked(self) -> None:
        self.open(KEY)
        self.until(lambda: self.links == ["linked"], "the link")

    def a_while(self) -> None:
        for _ in range(10):
            self.pause()

    def tokens(self, rid: str) -> list[int]:
        """Of a request, in the order of their arrival; their positions must follow each other."""
        mine = [e for e in self.events if isinstance(e, Tokens) and e.request_id == rid]
        assert [e.position for e in mine] == list(range(3, 3 + len(mine)))
        return [token for event in mine for token in event.tokens]

    def done(self, rid: str) -> bool:
        return any(isinstance(e, Done) and e.request_id == rid for e in self.events)


@contextmanager
def real(incarnation: int = 1) -> Iterator[Scene]:
    serving, routing = AsyncioThread("worker"), AsyncioThread("router")
    worker, lease = Scripted(incarnation=incarnation), [True]
    host = WorkerThread(worker, may_send=lambda: lease[0], idle_s=0.02)
    host.start()
    server = serve_worker(serving, host, incarnation, "127.0.0.1")
    with proxying() as proxy:
        relay = proxy.relay("serve", "decode-0", server.stream)
        table = _Table(server.endpoint, relay.endpoint)
        scene = Scene(
            worker, lambda: time.sleep(0.01), cast(Any, None), cast(Any, None), cast(Any, None),
            lambda: proxy.cut(relay), lambda: lease.__setitem__(0, False), lambda run: cast(None, host.call(run)),
            lambda: host.ended is not None and "closed" in worker.ends,
        )  # fmt: skip

        async def start() -> WorkerLinks:
            worker_links = WorkerLinks(
                table,
                on_view=lambda views: None,
                on_linked=lambda key: scene.links.append("linked"),
                on_unlinked=lambda key, end: scene.links.append("left" if end.left else "unlinked"),
                on_events=lambda key, events: scene.events.extend(events),
            )
            worker_links.start()
            return worker_links

        worker_links = routing.run(start(), 5.0)

        async def on_loop(run: Callable[[], object]) -> None:
            run()

        scene.open = lambda key: routing.run(on_loop(lambda: table.show(key)), 5.0)
        scene.close = lambda state: routing.run(on_loop(lambda: table.show(KEY if state else None, state)), 5.0)
        scene.send = lambda commands: routing.run(on_loop(lambda: worker_links.send(KEY, commands)), 5.0)
        try:
            yield scene
        finally:
            routing.run(worker_links.close(), 10.0)
            host.stop(5.0)
            server.stop(0.0)
            routing.stop()
            serving.stop()


class _Table:
    """Implements `router.links.controller_port.WorkerDirectory` with at most one worker."""

    adapters = ()
    serving = ServedWeights()

    def __init__(self, endpoint: str, stream: str) -> None:
        self._addresses = endpoint, stream
        self._listener: Callable[[tuple[WorkerView, ...]], None] = lambda views: None

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        self._listener = on_change
        return lambda: None

    def show(self, key: WorkerKey | None, state: str = "ready") -> None:
        self._listener(() if key is None else (WorkerView(_record(key, *self._addresses), _status(key, state)),))

    def port(self, record: WorkerRecord) -> WorkerClient:
        return GrpcWorkerClient(record)

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        return ChangedWorkers()

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        return SettingsAnswer(0)


def _record(key: WorkerKey, endpoint: str, stream: str) -> WorkerRecord:
    return WorkerRecord(
        key[0], Role.DECODE, key[1], 1, "node", endpoint, "", FakeWorker.fits, stream=stream,
        stream_protocol=STREAM_PROTOCOL,
    )  # fmt: skip


def _status(key: WorkerKey, state: str = "ready") -> WorkerStatus:
    return WorkerStatus(key[0], Role.DECODE, state, 1, "node", key[1], 0, 0, 64, 64)


@contextmanager
def simulated(incarnation: int = 1) -> Iterator[Scene]:
    agenda, rng, wrong = VirtualTime(), random.Random(7), list[str]()
    network = SimNetwork(agenda, rng, 0.002, 3.0)
    shape = ClusterShape(1, 1, "full", 4, "shm", adversarial=False, delay_s=0.002, step_s=0.01, nodes=1)
    world = SimWorld(
        agenda, rng, shape, config_from_dict({}), SimSwitch(network), {}, WireDamage(),
        StoreFaults(random.Random(7), 0.0), SimArenas(), None, lambda who, what: None, wrong.append,
    )  # fmt: skip
    home, made = _Controller(agenda), list[Scripted]()

    def make(world: Any, process: Any, start: StartWorker, sleep: Any, home: Any) -> Any:
        made.append(Scripted(sleep, start.incarnation))
        manager = SimpleNamespace(busy=False, pools=SimpleNamespace(allocators={}))
        return SimpleNamespace(worker=made[0], manager=manager, followers=None, receiver=None, storage=None)

    process = home.new_process("decode-0#1", "node-0")
    host = SimHost(world, process, StartWorker(KEY[0], Role.DECODE, Incarnation(incarnation)), home, make)
    waiter, router = SimWaiter(agenda), _LinkOwner(world, home.new_process("router-0#1", "node-head"))
    links: list[SimLink] = []

    def close(state: str) -> None:
        for link in links:
            link.close(left=state == "left")

    scene = Scene(
        made[0], lambda: waiter.wait(0.05), lambda key: links.append(SimLink(router, key, host)),
        close, lambda commands: links[-1].send(list(commands)),
        lambda: cast(None, network.reset("router-0", "decode-0")), host.lease.fence, host.call,
        lambda: host.ended is not None and "closed" in made[0].ends,
    )  # fmt: skip
    router.scene = scene
    waiter.wait(0.1)
    yield scene
    # What the simulator would call a violation, the real host logs: a worker that raises.
    assert all("the step failed" in line for line in wrong), wrong


class _Controller:
    """Implements `sim.nodes.build_sim_worker.LeaseHome`: every lease is granted at once."""

    def __init__(self, agenda: VirtualTime) -> None:
        self._agenda, self._pids = agenda, iter(range(1, 100))

    def register(self, record: WorkerRecord, answer: Callable[[LeaseGrant], None]) -> None:
        answer(LeaseGrant(record.incarnation, 10.0))

    def renew(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        status: WorkerStatus,
        answer: Callable[[LeaseGrant], None],
    ) -> None:
        answer(LeaseGrant(incarnation, 10.0))

    def leave(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        closed: bool,
        answer: Callable[[DepartureAnswer], None],
    ) -> None:
        answer(DepartureAnswer())

    def new_process(self, label: str, node: str) -> SimProcess:
        return SimProcess(self._agenda, label, node, next(self._pids))


class _LinkOwner:
    """Implements `sim.nodes.sim_link.LinkOwner`."""

    scene: Scene

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self.world, self.process = world, process

    def linked(self, key: WorkerKey) -> None:
        self.scene.links.append("linked")

    def unlinked(self, key: WorkerKey, end: StreamEnd) -> None:
        self.scene.links.append("left" if end.left else "unlinked")

    def events(self, key: WorkerKey, events: Sequence[Event]) -> None:
        self.scene.events.extend(events)


MADE = {"simulated": simulated, "real": real}


@pytest.fixture(params=list(MADE))
def made(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MADE[request.param]


@pytest.fixture
def scene(made: Callable[..., Any]) -> Iterator[Scene]:
    with made() as scene:
        yield scene


def test_commands_arrive_in_order_each_once_however_many_frames_they_take(scene: Scene) -> None:
    scene.worker.hold = True
    scene.linked()
    commands: list[Command] = [Cancel(RequestId(f"r{n}"), 0) for n in range(3 * FRAME_COMMANDS + 5)]
    scene.send(commands[:7])
    scene.send(commands[7:])
    scene.until(lambda: len(scene.worker.seen) >= len(commands), "all commands")
    scene.a_while()
    assert scene.worker.seen == [f"Cancel {command.request_id}" for command in commands]


def test_events_arrive_in_order_each_once(scene: Scene) -> None:
    scene.linked()
    scene.send([submit("a", 12), submit("b", 5)])
    scene.until(lambda: scene.done("a") and scene.done("b"), "both answers")
    scene.a_while()
    assert scene.tokens("a") == list(range(3, 15))
    assert scene.tokens("b") == list(range(3, 8))
    assert scene.links == ["linked"]


def test_a_link_that_the_router_closes_drops_the_session_once_and_carries_nothing_more(scene: Scene) -> None:
    scene.worker.hold = True
    scene.linked()
    scene.send([submit("a")])
    scene.until(lambda: scene.worker.running, "the request")
    scene.close("")
    scene.send([submit("late")])
    scene.until(lambda: scene.worker.dropped, "the session to be dropped")
    scene.a_while()
    assert scene.links == ["linked", "unlinked"]
    assert len(scene.worker.dropped) == 1
    assert scene.worker.seen == ["Submit a"]
    assert not scene.worker.running


def test_a_cut_connection_ends_the_session_at_both_ends_and_another_one_opens(scene: Scene) -> None:
    scene.worker.hold = True
    scene.linked()
    scene.send([submit("a")])
    scene.until(lambda: scene.worker.running, "the request")
    scene.cut()
    scene.until(lambda: scene.links == ["linked", "unlinked", "linked"], "the link to come back")
    scene.until(lambda: scene.worker.dropped, "the session to be dropped")
    scene.a_while()
    assert len(scene.worker.dropped) == 1
    assert scene.events == []
    assert not scene.worker.running
    scene.worker.hold = False
    scene.send([submit("b", 3)])
    scene.until(lambda: scene.done("b"), "an answer over the new link")
    assert scene.worker.seen == ["Submit a", "Submit b"]


def test_what_is_sent_while_there_is_no_link_is_lost(scene: Scene) -> None:
    scene.linked()
    scene.cut()
    scene.until(lambda: "unlinked" in scene.links, "the end of the link")
    scene.until(lambda: scene.links[-1] == "linked", "the link to come back")
    scene.close("")
    scene.send([submit("lost")])
    scene.a_while()
    assert scene.worker.seen == []


def test_a_worker_that_raises_is_fenced_closed_once_and_not_linked_again(scene: Scene) -> None:
    scene.linked()
    scene.worker.fail = RuntimeError("the step failed")
    scene.send([submit("a")])
    scene.until(scene.ended, "the worker's end")
    scene.until(lambda: "unlinked" in scene.links, "the router to be told")
    scene.a_while()
    assert scene.links == ["linked", "unlinked"]
    assert scene.worker.ends == ["fenced", "closed"]
    assert scene.events == []


def test_what_a_step_made_after_the_lease_ended_is_not_delivered(scene: Scene) -> None:
    scene.linked()
    scene.send([submit("a", 1_000_000)])
    scene.until(lambda: scene.events, "the first token")
    lost: list[int] = []

    def in_the_step() -> None:
        if not lost:
            scene.lose_lease()
            lost.append(scene.worker.steps)

    scene.worker.on_step = in_the_step
    scene.until(scene.ended, "the worker's end")
    scene.until(lambda: "unlinked" in scene.links, "the router to be told")
    scene.a_while()
    assert scene.worker.ends == ["fenced", "closed"]
    assert len(scene.tokens("a")) == lost[0], "the step that ran when the lease ended made one more"
    assert scene.worker.steps == lost[0] + 1


def test_a_drained_worker_leaves_unfenced_and_an_undrain_that_is_in_time_keeps_it(scene: Scene) -> None:
    scene.linked()
    scene.worker.hold = True
    scene.send([submit("a", 2)])
    scene.until(lambda: scene.worker.running, "the request")
    scene.call(lambda worker: worker.drain())
    scene.call(lambda worker: worker.undrain())
    scene.worker.hold = False
    scene.send([])
    scene.call(lambda worker: None)
    scene.until(lambda: scene.done("a"), "the answer")
    scene.a_while()
    assert not scene.ended()
    scene.call(lambda worker: worker.drain())
    scene.until(scene.ended, "the worker to leave")
    scene.until(lambda: "left" in scene.links, "the router to be told")
    assert scene.worker.ends == ["closed"]
    assert scene.links == ["linked", "left"]


@pytest.mark.parametrize(("shown_as", "heard"), [("left", "left"), ("dead", "unlinked"), ("", "unlinked")])
def test_the_table_says_whether_a_worker_has_left_where_the_stream_has_not_ended_yet(
    scene: Scene, shown_as: str, heard: str
) -> None:
    scene.linked()
    scene.close(shown_as)
    scene.until(lambda: len(scene.links) == 2, "the link's end")
    assert scene.links == ["linked", heard]


def test_a_link_that_is_meant_for_another_incarnation_never_opens(made: Callable[..., Any]) -> None:
    with made(incarnation=2) as scene:
        scene.open(KEY)
        scene.a_while()
        scene.send([submit("a")])
        scene.a_while()
        assert scene.links == []
        assert scene.worker.seen == []


def test_an_event_that_cannot_be_sent_ends_the_stream_and_is_not_lost_in_silence() -> None:
    """Of the real one alone: in the simulator nothing is sent that can't be."""
    with real() as scene:
        scene.worker.hold = True
        scene.linked()
        scene.send([submit("a")])  # The link is open before the worker knows of its session.
        scene.until(lambda: scene.worker.seen, "the session")
        scene.call(lambda worker: worker.out.append((1, Tokens(RequestId("a"), 0, -1, (-1,)))))
        scene.until(lambda: scene.links == ["linked", "unlinked", "linked"], "the stream to end, and another")
        scene.until(lambda: scene.worker.dropped, "the session to be dropped")
        assert scene.events == []
