"""Leadership by itself, with a clock moved by hand and a ledger that can go away; and what a leader that isn't one any
more answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.fake_worker import FakeWorker
from tests.support.free_ports import free_port
from twinpool.cluster.controller import supervisor
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import Leadership, LedgerLeader, LedgerLost, MemoryLedger
from twinpool.cluster.controller.supervisor import ControllerAway, ControllerClient
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper, LeaseRefused
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import CHANGE_POOLS, LEASE_QUOTA, REGISTER, RENEW, Call
from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.contracts.messages.leases import QuotaClaims
from twinpool.contracts.messages.pool_changes import AddWorkers, UndrainWorkers
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord
from twinpool.contracts.wire import controller_turns
from twinpool.contracts.wire.controller_turns import NOT_LEADING, ControllerTurns, call_leader
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed
from twinpool.router.links.controller_directory import ControllerDirectory

LEASE_S = 8.0
NAME = WorkerName("decode-0")
WAIT_S = 60.0


class SharedTable:
    """What the ledgers of several controllers share: a plain model of a leased ledger."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.writer: object = None
        self.term = 0
        self.leader, self.until = "", 0.0
        self.waiting: dict[str, float] = {}
        """Who stands by, each with its end."""

    def led_by(self) -> str:
        return self.leader if self.clock.now() < self.until else ""


class ModelLedger(MemoryLedger):
    """One controller's view of a `SharedTable`, which it can't reach while `away`."""

    def __init__(self, table: SharedTable) -> None:
        super().__init__()
        self.table = table
        self.away, self.asked = False, 0
        self.question_s = self.answer_s = 0.0
        """How long a question and its answer are on their way."""

    def reach(self) -> None:
        self.asked += 1
        if self.away:
            raise OSError("the ledger is away")
        self.table.clock.advance(self.question_s)

    def check(self) -> list[str]:
        return []

    def take(self, endpoint: str, host: str, lease_s: float, *, first: bool) -> bool:
        self.reach()
        if self.table.led_by() not in ("", endpoint) or not (self.table.term or first):
            return False
        self.table.writer, self.table.leader = self, endpoint
        self.table.term += 1
        self.table.until = self.table.clock.now() + lease_s
        self.table.clock.advance(self.answer_s)
        return True

    def renew(self, lease_s: float) -> None:
        self.reach()
        if self.table.writer is not self:
            raise LedgerLost("another controller has begun")
        self.table.until = self.table.clock.now() + lease_s
        self.table.clock.advance(self.answer_s)

    def resign(self) -> None:
        self.reach()
        if self.table.writer is self:
            self.table.until = 0.0

    def leader(self) -> LedgerLeader | None:
        self.reach()
        led_by = self.table.led_by()
        return LedgerLeader(led_by, "h", self.table.term, self.table.until - self.table.clock.now()) if led_by else None

    def stand_by(self, endpoint: str, for_s: float) -> None:
        self.reach()
        self.table.waiting[endpoint] = self.table.clock.now() + for_s

    def standbys(self) -> tuple[str, ...]:
        self.reach()
        now = self.table.clock.now()
        return tuple(sorted(endpoint for endpoint, until in self.table.waiting.items() if now < until))

    def forget(self) -> None:
        self.reach()

    def close(self) -> None: ...


class Rivals:
    """Controllers of one table."""

    def __init__(self, count: int = 2) -> None:
        self.clock = ManualClock(100.0)
        self.table = SharedTable(self.clock)
        self.ledgers = [ModelLedger(self.table) for _ in range(count)]
        self.sides = [
            Leadership(ledger, self.clock, f"h:{number}", "h", LEASE_S, first=not number)
            for number, ledger in enumerate(self.ledgers)
        ]

    def holders(self) -> list[int]:
        return [number for number, side in enumerate(self.sides) if side.held]


def test_a_leader_that_cant_renew_stops_before_another_can_begin() -> None:
    scene = Rivals()
    first, second = scene.sides
    assert not second.take()
    assert first.take()
    scene.clock.advance(LEASE_S / 4)
    scene.ledgers[0].away = True
    first.renew()
    assert first.held
    assert not second.take()
    scene.clock.advance(0.66 * LEASE_S)
    first.renew()
    assert not first.held, "a margin before its end by the ledger's clock"
    assert not second.take()
    scene.clock.advance(0.1 * LEASE_S)
    assert second.take()
    scene.ledgers[0].away = False
    with pytest.raises(LedgerLost):
        first.renew(now=True)
    assert scene.holders() == [1]


def test_who_stands_by_is_known_between_its_looks_and_not_for_long_when_it_is_gone() -> None:
    scene = Rivals()
    first, second = scene.sides
    assert first.take()
    for _ in range(8):
        assert not second.take()
        scene.clock.advance(1.5 * second.pause_s)  # A ledger that answers slowly, or a busy machine.
        first.renew(now=True)
        assert first.standbys == ("h:1",)
    scene.clock.advance(LEASE_S)
    assert scene.ledgers[1].standbys() == ()


def test_a_ledger_that_is_back_in_time_costs_nothing_and_later_it_is_taken_again() -> None:
    scene = Rivals(1)
    (side,) = scene.sides
    assert side.take()
    scene.ledgers[0].away = True
    scene.clock.advance(0.8 * LEASE_S)
    side.renew()
    assert side.held
    scene.ledgers[0].away = False
    scene.clock.advance(side.pause_s / 2)
    side.renew(now=True)
    scene.clock.advance(0.8 * LEASE_S)
    assert side.held
    scene.ledgers[0].away = True
    scene.clock.advance(LEASE_S)
    assert not side.take()
    assert not side.held
    scene.ledgers[0].away = False
    assert side.take()
    assert side.held


def test_a_ledger_that_is_away_is_asked_once_a_pause_and_not_at_every_tick() -> None:
    scene = Rivals(1)
    (side,), (ledger,) = scene.sides, scene.ledgers
    assert side.take()
    scene.clock.advance(LEASE_S / 4)
    ledger.away, ledger.asked = True, 0
    for _ in range(20):
        side.renew()
        scene.clock.advance(side.pause_s / 10)
    assert ledger.asked == 2


@pytest.mark.parametrize("how", ["take", "renew"])
def test_a_lease_counts_from_before_the_ledger_was_asked(how: str) -> None:
    """However slow its answer is: by the ledger's clock the lease began when the question was there, or later."""
    scene = Rivals()
    first, second = scene.sides
    if how == "renew":
        assert first.take()
    scene.ledgers[0].question_s, scene.ledgers[0].answer_s = 0.0, LEASE_S / 2
    if how == "renew":
        scene.clock.advance(LEASE_S / 4)
        first.renew()
    else:
        assert first.take()
    assert first.held
    scene.clock.advance(LEASE_S / 2)
    assert not first.held, "a whole lease has passed since the question"
    assert first.lapsed_s == pytest.approx(0.1 * LEASE_S)
    assert second.take()
    assert scene.holders() == [1]


def test_an_answer_that_takes_longer_than_the_lease_leaves_nobody_leading() -> None:
    scene = Rivals()
    scene.ledgers[0].answer_s = LEASE_S
    scene.sides[0].take()
    assert scene.holders() == []
    scene.ledgers[0].answer_s = 0.0
    scene.sides[0].renew()
    assert scene.holders() == [0], "a renewal was due, as it is counted from before the question, too"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pass", "take", "renew", "away", "back", "resign", "slow"]),
            st.integers(0, 2),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_never_do_two_hold_the_lease_whatever_happens(steps: list[tuple[str, int, float]]) -> None:
    scene = Rivals(3)
    for what, number, later in steps:
        side, ledger = scene.sides[number], scene.ledgers[number]
        match what:
            case "pass":
                scene.clock.advance(later)
            case "take" if not side.held:
                side.take()
            case "renew" if side.held:
                try:
                    side.renew(now=True)
                except LedgerLost:
                    assert not side.held
            case "away" | "back":
                ledger.away = what == "away"
            case "slow":
                ledger.question_s, ledger.answer_s = later / 2, later
            case "resign":
                side.resign()
        assert len(scene.holders()) <= 1
        if holders := scene.holders():
            assert scene.table.writer is scene.ledgers[holders[0]]


# ---------------------------------------------------------------- a controller that leads no more, and the next one


class TwoControllers:
    """A controller that has lost its lease and still listens, and one that leads, over real gRPC."""

    def __init__(self) -> None:
        self.leads = [True, True]
        self.clock = ManualClock()
        self.cores = [Controller(self.clock, ClusterConfig(), MemoryLedger()) for _ in range(2)]
        self.servers = [
            ControllerServer(core, leads=partial(self.leads.__getitem__, number))
            for number, core in enumerate(self.cores)
        ]
        for server in self.servers:
            server.call(lambda core: core.pools.add(NAME, Role.DECODE))
            assert [a for a in server.call(Controller.tick) if isinstance(a, StartWorker)]
        self.nobody = f"127.0.0.1:{free_port()}"

    @property
    def endpoints(self) -> str:
        """Of a controller that is gone, then of the one that leads no more, then of the leader."""
        return ",".join([self.nobody, *(server.endpoint for server in self.servers)])

    def keeper(self, lost: list[str]) -> LeaseKeeper:
        record = WorkerRecord(
            NAME, Role.DECODE, Incarnation(1), 7, "n", "127.0.0.1:1", "tcp://x", WorkerLimits(8, 8), stream="s"
        )
        worker = FakeWorker(incarnation=1)
        return LeaseKeeper(record, self.endpoints, ManualClock(), 0.01, worker.status, LeaseHandlers(lost.append))

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def two() -> Iterator[TwoControllers]:
    two = TwoControllers()
    yield two
    two.close()


def test_who_doesnt_lead_grants_nothing_and_says_so(two: TwoControllers) -> None:
    two.leads[0] = False
    keeper = two.keeper([])

    record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", "e", "c", WorkerLimits(1, 1))
    calls: list[tuple[Call[Any, Any], Any]] = [
        (REGISTER, record),
        (RENEW, keeper._renewal()),
        (LEASE_QUOTA, QuotaClaims("r", ())),
        (CHANGE_POOLS, AddWorkers(Role.DECODE)),
    ]

    async def ask() -> set[tuple[grpc.StatusCode, str]]:
        refusals = set()
        async with CallChannel(two.servers[0].endpoint) as channel:
            for call, request in calls:
                with pytest.raises(CallFailed) as refused:
                    await channel.call(call, request, WAIT_S)
                refusals.add((refused.value.code, refused.value.reason))
        return refusals

    assert asyncio.run(ask()) == {(grpc.StatusCode.UNAVAILABLE, NOT_LEADING)}
    two.clock.advance(ClusterConfig().start_timeout_s)
    before = two.cores[0].table.version
    assert two.servers[0].tick() == ""
    assert two.cores[0].table.version == before, "a start that is overdue is the leader's to end"
    two.leads[0] = True
    two.servers[0].tick()
    assert two.cores[0].table.version > before


def test_a_worker_finds_the_leader_and_follows_it_when_it_changes(two: TwoControllers) -> None:
    two.leads[0] = False

    async def life() -> None:
        lost: list[str] = []
        keeper = two.keeper(lost)
        await keeper.start(WAIT_S)
        while not two.servers[1].call(lambda core: core.views()[0].status.pages_total):
            await asyncio.sleep(0.01)
        while keeper._stream is None:  # Renewals go as frames soon, and these end with the leader.
            await asyncio.sleep(0.01)
        two.leads[:] = [True, False]
        two.servers[0].call(lambda core: core.register(keeper._record))
        while not two.servers[0].call(lambda core: core.views()[0].status.pages_total):
            await asyncio.sleep(0.01)
        assert not lost
        await keeper.leave()

    asyncio.run(asyncio.wait_for(life(), WAIT_S))
    states = [server.call(lambda core: core.views()[0].status.state) for server in two.servers]
    assert states == ["left", "ready"]


def test_where_nobody_leads_a_worker_gives_up_in_time(two: TwoControllers) -> None:
    two.leads[:] = [False, False]
    with pytest.raises(LeaseRefused, match="can't be reached"):
        asyncio.run(asyncio.wait_for(two.keeper([]).start(1.0), WAIT_S))


class InStep:
    """Channels to a controller that is gone, or has lost its lease, and to one that leads, and what was asked of them.
    As many calls as there are `callers` fail there at the same moment."""

    def __init__(self, callers: int, *, away: bool) -> None:
        self.away = away
        self.fail = asyncio.Barrier(callers)
        self.asked: list[str] = []

    def channel_to(self, endpoint: str) -> StepChannel:
        self.asked.append(endpoint)
        return StepChannel(self, endpoint)

    async def call(self, channel: object) -> str:
        assert isinstance(channel, StepChannel)
        if channel.endpoint == "lost:1":
            await self.fail.wait()
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, NOT_LEADING)
        return channel.endpoint


class StepChannel:
    """One of the channels of `InStep`."""

    def __init__(self, scene: InStep, endpoint: str) -> None:
        self.scene = scene
        self.endpoint = endpoint

    async def __aenter__(self) -> StepChannel:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def connected(self, timeout_s: float) -> bool:
        assert len(self.scene.asked) <= 20, "the calls step over the leader together"
        if self.scene.away and self.endpoint == "lost:1":
            await self.scene.fail.wait()
            return False
        return True


@pytest.mark.parametrize("callers", [2, 4])
@pytest.mark.parametrize("away", [True, False], ids=["gone", "leads no more"])
def test_calls_that_fail_at_the_same_moment_move_on_once(
    callers: int, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_turns, "TURN_S", 0.0)

    async def life() -> None:
        scene, turns = InStep(callers, away=away), ControllerTurns("lost:1,leader:1")
        calls = [call_leader(turns, cast(Any, scene.channel_to), scene.call, WAIT_S) for _ in range(callers)]
        assert await asyncio.gather(*calls) == ["leader:1"] * callers
        assert scene.asked == ["lost:1"] * callers + ["leader:1"] * callers
        assert turns.current == "leader:1"

    asyncio.run(life())


def test_a_call_of_the_only_controller_waits_until_it_leads_again() -> None:
    """Its lease has run out for a moment, or it is about to be replaced."""
    answers = iter([False, False])
    core = Controller(ManualClock(), ClusterConfig(), MemoryLedger())
    server = ControllerServer(core, leads=lambda: next(answers, True))
    client = ControllerClient(server.endpoint, 2.0)
    try:
        assert client.add(Role.DECODE, 1) == (NAME,)
        assert next(answers, None) is None
    finally:
        client.close()
        server.close()


def test_the_supervisors_calls_and_a_routers_find_the_leader(
    two: TwoControllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.leads[0] = False
    client = ControllerClient(two.endpoints, 5.0)
    try:
        client.supervise(list)
        assert [view.record.name for view in client.views()] == [NAME]
        assert client.add(Role.PREFILL, 1) == (WorkerName("prefill-0"),)
        assert len(two.cores[0].views()) == 1
        two.leads[1] = False
        monkeypatch.setattr(supervisor, "CALL_S", 0.5)
        with pytest.raises(ControllerAway, match=two.nobody):
            client.add(Role.PREFILL, 1)
    finally:
        client.close()
    two.leads[1] = True
    two.servers[1].tell(two.servers[1].endpoint, 4, ("h:1",))

    async def route() -> None:
        directory = ControllerDirectory(two.endpoints)
        seen = asyncio.Event()
        unwatch = directory.watch(lambda views: seen.set())
        await seen.wait()
        assert directory.control_plane() == ControlPlane(two.servers[1].endpoint, 4, ("h:1",))
        with pytest.raises(RequestError, match="not draining"):
            await directory.change_pools(UndrainWorkers(NAME))
        unwatch()

    asyncio.run(asyncio.wait_for(route(), WAIT_S))


class EndingClock(ManualClock):
    """A clock of which one reading lets another thread's work happen: the end of a leadership."""

    def __init__(self, start: float) -> None:
        super().__init__(start)
        self.meanwhile: list[Callable[[], object]] = []

    def now(self) -> float:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().now()


def test_whether_it_leads_is_said_of_one_moment_while_another_thread_ends_it() -> None:
    clock = EndingClock(100.0)
    side = Leadership(ModelLedger(SharedTable(clock)), clock, "h:0", "h", LEASE_S, first=True)
    for asks in (lambda: side.held, lambda: side.lapsed_s):
        assert side.take()
        clock.meanwhile.append(side.resign)
        asks()
        assert not side.held
