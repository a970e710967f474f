from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import fields, replace

from tests.cluster.fake_worker import FakeWorker
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.worker_process import lease_keeper as lease
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper, LeaseRefused, WorkerLease
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import REGISTER, WATCH
from twinpool.contracts.messages.cluster_view import WatchRequest
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.leases import LeaseGrant, Renewal
from twinpool.contracts.messages.pool_changes import DrainWorkers, UndrainWorkers
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.wire.controller_turns import TURN_S
from twinpool.contracts.wire.grpc_calls import CallChannel, channel_options
from twinpool.router.links.controller_directory import ControllerDirectory

NAME = WorkerName("decode-0")
MARK = Fingerprint(41, "a layout", "fast:avx2 and more", "a checkpoint")
WAIT_S = 60.0


def keep_renewing(keeper: LeaseKeeper) -> None:
    """Renew the lease until it is over."""
    asyncio.run(keeper._renew())


def test_a_lease_ends_at_the_worker_before_it_ends_at_the_controller() -> None:
    clock = ManualClock(100.0)
    lease = WorkerLease(clock)
    assert not lease.held
    lease.granted(sent_at=100.0, lease_s=10.0)
    clock.advance(8.9)
    assert lease.held
    clock.advance(0.2)
    assert not lease.held


def test_a_late_answer_counts_from_when_its_question_was_sent() -> None:
    clock = ManualClock()
    lease = WorkerLease(clock)
    clock.advance(8.0)
    lease.granted(sent_at=0.0, lease_s=10.0)
    clock.advance(1.5)
    assert not lease.held


def test_an_answer_that_overtakes_does_not_shorten_the_lease() -> None:
    clock = ManualClock()
    lease = WorkerLease(clock)
    lease.granted(sent_at=5.0, lease_s=10.0)
    lease.granted(sent_at=0.0, lease_s=10.0)
    clock.advance(12.0)
    assert lease.held


def test_a_fenced_lease_never_holds_again() -> None:
    lease = WorkerLease(ManualClock())
    lease.granted(0.0, 10.0)
    lease.fence()
    lease.granted(5.0, 10.0)
    assert not lease.held


class Wired:
    """A controller behind real gRPC with a clock moved by hand."""

    def __init__(self, secret: str = "") -> None:
        self.clock = ManualClock()
        self.secret = secret
        self.core = Controller(self.clock, ClusterConfig(lease_s=10.0), MemoryLedger())
        self.server = ControllerServer(self.core, secret=secret)
        self.server.call(lambda core: core.pools.add(NAME, Role.DECODE))
        assert [a for a in self.server.call(Controller.tick) if isinstance(a, StartWorker)]

    def keeper(
        self, incarnation: int, on_lost: Callable[[str], None] = lambda reason: None, endpoint: str = ""
    ) -> LeaseKeeper:
        fits = WorkerLimits(1024, 2048)
        record = WorkerRecord(
            NAME, Role.DECODE, Incarnation(incarnation), 7, "n", "127.0.0.1:1", "tcp://x", fits, "a node", MARK
        )
        worker = FakeWorker(incarnation=incarnation)
        where = endpoint or self.server.endpoint
        return LeaseKeeper(record, where, self.clock, 0.01, worker.status, LeaseHandlers(on_lost), self.secret)

    def state(self) -> str:
        return self.server.call(lambda core: core.views()[0].status.state)


@pytest.fixture
def wired() -> Iterator[Wired]:
    wired = Wired()
    yield wired
    wired.server.close()


def test_register_renew_and_leave_over_the_wire(wired: Wired) -> None:
    async def life() -> None:
        keeper = wired.keeper(1)
        await keeper.start(WAIT_S)
        assert keeper.lease.held
        while wired.server.call(lambda core: core.views()[0].status.pages_total) == 0:
            await asyncio.sleep(0)
        await keeper.leave()

    asyncio.run(asyncio.wait_for(life(), WAIT_S))
    assert wired.state() == "left"


def test_where_there_is_a_secret_every_word_of_a_worker_carries_its_token() -> None:
    wired = Wired("5e" * 32)

    async def life() -> None:
        keeper = wired.keeper(1)
        await keeper.start(WAIT_S)
        while wired.server.call(lambda core: core.views()[0].status.pages_total) == 0:
            await asyncio.sleep(0)
        await keeper.leave()
        assert keeper.failures == 0

    try:
        asyncio.run(asyncio.wait_for(life(), WAIT_S))
        assert wired.state() == "left"
    finally:
        wired.server.close()


def test_who_has_left_renews_no_more(wired: Wired) -> None:
    async def life() -> None:
        lost: list[str] = []
        keeper = wired.keeper(1, lost.append)
        await keeper.start(WAIT_S)
        (renewing,) = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_renew"]
        await keeper.leave()
        await asyncio.wait([renewing])
        assert renewing.cancelled()
        assert lost == [], "a lease that was given back is not lost"

    asyncio.run(asyncio.wait_for(life(), WAIT_S))


ONE = Incarnation(1)
FENCED = LeaseGrant(ONE, 0.0, fenced=True)


def answer_calls(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Awaitable[LeaseGrant]]) -> None:
    """Have the keeper's calls answered by `answer`, which gets the call, the request and the timeout."""

    class Channel:
        async def call(self, call: object, request: object, timeout_s: float, *, wait: bool = False) -> LeaseGrant:
            return await answer(call, request, timeout_s)

        async def close(self) -> None: ...

    monkeypatch.setattr(lease, "CallChannel", lambda *endpoint: Channel())


@pytest.mark.parametrize(("heartbeat_s", "timeout_s"), [(0.01, lease.RENEWAL_TIMEOUT_S), (3.0, 6.0)])
def test_a_renewal_may_take_two_heartbeats_and_no_less_than_a_second(
    heartbeat_s: float, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    async def renew(call: object, renewal: Renewal, timeout_s: float) -> LeaseGrant:
        given.append(timeout_s)
        return FENCED

    record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", "e", "c", WorkerLimits(1, 1))
    keeper = LeaseKeeper(
        record, "nowhere", ManualClock(), heartbeat_s, FakeWorker(incarnation=1).status, LeaseHandlers(lambda _: None)
    )
    answer_calls(monkeypatch, renew)
    keep_renewing(keeper)
    assert given == [timeout_s]


@pytest.mark.parametrize("undrained", [False, True])
def test_an_order_to_leave_that_an_undrain_has_overtaken_is_not_obeyed(
    undrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    undrains, obeyed, answers = [0], list[str](), iter([LeaseGrant(ONE, 0.0, drain=True), FENCED])

    async def renew(*asked: object) -> LeaseGrant:
        undrains[0] += undrained  # while the answer is under way
        return next(answers)

    record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", "e", "c", WorkerLimits(1, 1))
    status = FakeWorker(incarnation=1).status
    keeper = LeaseKeeper(
        record,
        "nowhere",
        ManualClock(),
        0.0,
        status,
        LeaseHandlers(lambda _: None, on_drain=lambda: obeyed.append("leaves"), undrains=lambda: undrains[0]),
    )
    answer_calls(monkeypatch, renew)
    keep_renewing(keeper)
    assert obeyed == ([] if undrained else ["leaves"])


def test_an_order_to_leave_after_an_undrain_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undrain overtakes the one answer that is under way, and no later one."""
    undrains, obeyed = [0], list[int]()
    answers = iter([LeaseGrant(ONE, 0.0, drain=True), LeaseGrant(ONE, 0.0, drain=True), FENCED])
    asked: list[int] = []

    async def renew(*_: object) -> LeaseGrant:
        asked.append(len(asked) + 1)
        undrains[0] = 1  # while the first answer is under way
        return next(answers)

    record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", "e", "c", WorkerLimits(1, 1))
    status = FakeWorker(incarnation=1).status
    keeper = LeaseKeeper(
        record,
        "nowhere",
        ManualClock(),
        0.0,
        status,
        LeaseHandlers(lambda _: None, on_drain=lambda: obeyed.append(asked[-1]), undrains=lambda: undrains[0]),
    )
    answer_calls(monkeypatch, renew)
    keep_renewing(keeper)
    assert obeyed == [2]


class Script:
    """A keeper whose renewals are answered as the test says, over calls; pauses are kept and pass at once."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *answers: LeaseGrant | Exception,
        late_s: float = 0.0,
        controllers: str = "127.0.0.1:1",
    ) -> None:
        self.clock = ManualClock(100.0)
        self.heard: list[Renewal] = []
        self.pauses: list[float] = []
        self.lost: list[str] = []
        self.ended: list[tuple[EndedWorker, ...]] = []
        self.counters = {"steps": 1.0}
        script = iter([*answers, FENCED])

        async def renew(call: object, renewal: Renewal, timeout_s: float) -> LeaseGrant:
            self.heard.append(renewal)
            answer = next(script)
            self.clock.advance(late_s)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)
            self.clock.advance(seconds)

        self.on_ended: Callable[[tuple[EndedWorker, ...]], object] = self.ended.append
        answer_calls(monkeypatch, renew)
        monkeypatch.setattr("twinpool.cluster.worker_process.lease_keeper.asyncio.sleep", sleep)
        record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", "e", "c", WorkerLimits(1, 1))
        self.keeper = LeaseKeeper(
            record,
            controllers,
            self.clock,
            1.0,
            self.status,
            LeaseHandlers(self.lost.append, on_ended=self.hear),
        )

    def hear(self, ended: tuple[EndedWorker, ...]) -> None:
        self.on_ended(ended)

    def status(self) -> WorkerStatus:
        return replace(FakeWorker(incarnation=1).status(), counters=dict(self.counters))

    def run(self) -> None:
        keep_renewing(self.keeper)

    @property
    def counters_at(self) -> list[bool]:
        """Of each renewal whether it had the counters."""
        assert all(bool(one.status.counters) is not one.status.counters_left_out for one in self.heard)
        return [bool(one.status.counters) for one in self.heard]


def test_a_renewal_counts_from_before_it_was_sent_however_late_its_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, LeaseGrant(ONE, 10.0), late_s=4.0)
    held: list[tuple[float, bool]] = []

    def look(ended: tuple[EndedWorker, ...]) -> None:
        for later in (4.0, 1.0, 1.5):
            script.clock.advance(later)
            held.append((script.clock.now(), script.keeper.lease.held))

    script.on_ended = look
    script.keeper._ended = (EndedWorker(NAME, Incarnation(9)),)  # So that what comes is told.
    script.run()
    assert held == [(108.0, True), (109.0, False), (110.5, False)], "10 s from 100.0 on, less a margin of a second"


def test_a_registration_counts_from_before_it_was_sent_however_late_its_answer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(monkeypatch)

    async def answer(call: object, request: object, timeout_s: float) -> LeaseGrant:
        if call is not REGISTER:
            await asyncio.Event().wait()
        script.clock.advance(4.0)
        return LeaseGrant(ONE, 10.0)

    async def life() -> list[bool]:
        await script.keeper.start(WAIT_S)
        held = []
        for later in (4.9, 0.1):
            script.clock.advance(later)
            held.append(script.keeper.lease.held)
        await script.keeper.close()
        return held

    answer_calls(monkeypatch, answer)
    assert asyncio.run(life()) == [True, False], "10 s from before the registration on, less a margin of a second"


def test_counters_are_said_at_first_and_then_as_often_as_the_controller_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, *[LeaseGrant(ONE, 60.0)] * 7)
    script.run()
    assert script.counters_at == [True, False, False, False, False, True, False, False]
    quick = LeaseGrant(ONE, 60.0, counters_s=1.0)
    script = Script(monkeypatch, LeaseGrant(ONE, 60.0), quick, quick, quick, *[LeaseGrant(ONE, 60.0)] * 4)
    script.run()
    assert script.counters_at == [True, False, True, True, True, True, False, False, False]


def test_a_controller_that_was_away_hears_the_counters_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another one, which has none of them, and its autoscaler would wait for them."""
    good = LeaseGrant(ONE, 60.0)
    script = Script(monkeypatch, good, good, ConnectionError("cut"), good, good)
    script.run()
    assert script.counters_at == [True, False, False, True, False, False]
    assert script.keeper.failures == 1
    assert script.lost == ["the controller has ended the lease"]


def test_a_lease_that_ran_out_while_nobody_answered_is_lost_and_one_that_holds_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = ConnectionError("cut")
    script = Script(monkeypatch, LeaseGrant(ONE, 4.0), cut, cut, LeaseGrant(ONE, 4.0), *[cut] * 9)
    script.run()
    assert script.lost == ["the controller could not be reached in time: cut"]
    assert len(script.heard) == 8, "it held for 3.6 s after the second grant, and a renewal is made each second"
    assert script.keeper.failures == 5


def test_ended_incarnations_are_taken_in_where_they_change_also_of_a_controller_that_marks_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (EndedWorker(WorkerName("decode-9"), Incarnation(number)) for number in (1, 2))

    def grant(*ended: EndedWorker, mark: int = 0) -> LeaseGrant:
        return LeaseGrant(ONE, 60.0, ended=ended, ended_mark=mark)

    unmarked = Script(monkeypatch, grant(), grant(one), grant(one), grant(two))
    unmarked.run()
    assert [[one.incarnation for one in ended] for ended in unmarked.ended] == [[1], [2]]
    marked = Script(
        monkeypatch,
        grant(one, mark=5),
        grant(mark=5),
        grant(two, mark=6),
        grant(mark=6),
        grant(two),
        grant(one, mark=5),
    )
    marked.run()
    assert [[one.incarnation for one in ended] for ended in marked.ended][:3] == [[1], [2], [1]]
    assert [renewal.ended_mark for renewal in marked.heard] == [0, 5, 5, 6, 6, 0, 5]


def test_pauses_are_the_controllers_and_where_it_says_none_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    good = LeaseGrant(ONE, 60.0)
    script = Script(monkeypatch, good, LeaseGrant(ONE, 60.0, renew_s=2.5), good, ConnectionError("cut"), good)
    script.run()
    assert script.pauses == [1.0, 2.5, 1.0, 1.0, 1.0]
    several = Script(monkeypatch, good, ConnectionError("cut"), good, controllers="127.0.0.1:1,127.0.0.1:2")
    several.run()
    assert several.pauses == [1.0, TURN_S, 1.0], "the next one is asked soon"


def test_a_lease_carries_the_fingerprint_over_the_wire(wired: Wired) -> None:
    """Every field, none of them a default, as the worker has it and as routers see it."""
    assert all(replace(MARK, **{f.name: type(getattr(MARK, f.name))()}) != MARK for f in fields(MARK))

    async def life() -> None:
        keeper = wired.keeper(1)
        await keeper.start(WAIT_S)
        assert wired.server.call(lambda core: core.views()[0].record.fingerprint) == MARK
        seen: list[Fingerprint | None] = []
        directory = ControllerDirectory(wired.server.endpoint)
        stop = directory.watch(lambda views: seen.extend(view.record.fingerprint for view in views))
        while not seen:
            await asyncio.sleep(0)
        stop()
        assert set(seen) == {MARK}
        await keeper.close()

    asyncio.run(asyncio.wait_for(life(), WAIT_S))


def test_an_unwanted_incarnation_is_refused(wired: Wired) -> None:
    with pytest.raises(LeaseRefused, match="incarnation 2 is no longer wanted"):
        asyncio.run(wired.keeper(2).start(WAIT_S))


def test_a_worker_is_told_when_its_lease_is_ended(wired: Wired) -> None:
    async def life() -> tuple[str, bool]:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        keeper = wired.keeper(1, lost.set_result)
        await keeper.start(WAIT_S)
        wired.server.call(lambda core: core.died(NAME, Incarnation(1), "operator"))
        reason = await asyncio.wait_for(lost, WAIT_S)
        held = keeper.lease.held
        await keeper.close()
        return reason, held

    assert asyncio.run(life()) == ("the controller has ended the lease", False)


def test_a_controller_that_is_gone_ends_the_lease_in_time(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_TIMEOUT_S", 0.05)

    async def life() -> str:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        keeper = wired.keeper(1, lost.set_result)
        await keeper.start(WAIT_S)
        await asyncio.to_thread(wired.server.close)
        assert keeper.lease.held
        wired.clock.advance(9.5)
        assert not keeper.lease.held
        reason = await asyncio.wait_for(lost, WAIT_S)
        await keeper.close()
        return reason

    assert "could not be reached" in asyncio.run(life())


class Line:
    """The only way between a worker and the controller, which can be cut: then whoever connects is hung up on."""

    def __init__(self, endpoint: str) -> None:
        self.host, _, port = endpoint.partition(":")
        self.port = int(port)
        self.cut = False
        self.attempts = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts += 1
        if self.cut:
            return writer.close()
        there, back = await asyncio.open_connection(self.host, self.port)
        self._writers |= {writer, back}
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()

    def sever(self) -> None:
        self.cut = True
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def close(self) -> None:
        self.sever()
        self._server.close()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


async def until_so(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not is_so():
            await asyncio.sleep(0.001)


@pytest.mark.slow
def test_a_lost_connection_is_tried_again_with_every_renewal(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own back-off would wait longer than any lease: of twelve attempts its last comes after two minutes."""

    monkeypatch.setattr(lease, "RENEWAL_TIMEOUT_S", 0.05)

    async def life() -> None:
        line = Line(wired.server.endpoint)
        endpoint = await line.open()
        lost: list[str] = []
        keeper = wired.keeper(1, lost.append, endpoint)
        await keeper.start(WAIT_S)
        line.sever()
        before = line.attempts
        await until_so(lambda: line.attempts >= before + 12)
        assert keeper.failures > 0
        wired.clock.advance(8.5)
        assert keeper.lease.held
        line.cut = False
        # What is asked from now on counts from now on.
        renewed = 8.5 + 9.0
        await until_so(lambda: (keeper.lease._until or 0.0) >= renewed)
        assert lost == []
        await keeper.close()
        await line.close()

    asyncio.run(life())


def test_a_worker_registers_though_the_environment_names_a_proxy(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at port 9: whoever asks the proxy has lost."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def life() -> None:
        keeper = wired.keeper(1)
        await keeper.start(WAIT_S)
        assert keeper.lease.held
        directory = ControllerDirectory(wired.server.endpoint)
        assert (await directory.change_pools(DrainWorkers(NAME))).names == (NAME,)
        await keeper.leave()

    asyncio.run(asyncio.wait_for(life(), 2 * WAIT_S))
    assert wired.state() == "left"


def test_no_channel_within_the_cluster_asks_a_proxy() -> None:
    """Every channel is opened with options of `contracts.wire.grpc_calls`, which turn that off."""
    assert dict(channel_options())["grpc.enable_http_proxy"] == 0
    root = Path(__file__).parents[3]
    opened = [
        call
        for folder in (
            "cluster",
            "router",
            "transfer",
            "worker",
            "prefill",
            "decode",
            "colocate",
            "cache",
            "engine",
            "sim",
            "contracts/wire",
        )
        for path in (root / folder).rglob("*.py")
        if "ecure_channel" in path.read_text()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("insecure_channel", "secure_channel"))
    ]
    assert len(opened) == 2  # All go through `contracts.wire.grpc_calls`, with its caller's options.
    for call in opened:
        assert [k.arg for k in call.keywords] == ["options"], ast.unparse(call)


def test_drain_and_undrain_of_a_node_over_the_wire(wired: Wired) -> None:
    async def life() -> None:
        keeper = wired.keeper(1)
        await keeper.start(WAIT_S)
        directory = ControllerDirectory(wired.server.endpoint)
        views: list[tuple[WorkerView, ...]] = []
        unwatch = directory.watch(views.append)
        with pytest.raises(RequestError, match="no worker or node is named 'elsewhere'; nodes: n"):
            await directory.change_pools(DrainWorkers("elsewhere"))
        with pytest.raises(RequestError, match=r"n has the last [a-z]+ worker that stays"):
            await directory.change_pools(DrainWorkers("n", (Role.PREFILL, Role.DECODE)))
        assert (await directory.change_pools(DrainWorkers("n"))).names == (NAME,)
        await until_so(lambda: bool(views) and views[-1][0].cordoned)
        await keeper.leave()
        assert (await directory.change_pools(UndrainWorkers("n"))).names == (NAME,)
        await until_so(lambda: not views[-1][0].cordoned)
        unwatch()

    asyncio.run(asyncio.wait_for(life(), 60.0))


def test_a_watcher_gets_the_table_now_and_at_each_change(wired: Wired) -> None:
    async def watch() -> list[str]:
        states = []
        async with CallChannel(wired.server.endpoint) as channel:
            views = channel.subscribe(WATCH, WatchRequest())
            keeper = wired.keeper(1)
            states.append((await asyncio.wait_for(anext(views), WAIT_S)).workers[0].status.state)
            await keeper.start(WAIT_S)
            states.append((await asyncio.wait_for(anext(views), WAIT_S)).workers[0].status.state)
            await keeper.leave()
            while states[-1] != "left":
                states.append((await asyncio.wait_for(anext(views), WAIT_S)).workers[0].status.state)
            await views.aclose()
        return states

    states = asyncio.run(watch())
    assert states[:2] == ["starting", "ready"]
