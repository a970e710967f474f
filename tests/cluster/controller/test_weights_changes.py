"""Changes of weights by the controller: two phases, deaths in each of them, order, sleep and pauses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import KillWorker, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.pool_changes import (
    FlushCaches,
    PauseCluster,
    ServingChange,
    SleepCluster,
    UpdateWeights,
)
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, WEIGHTS_SINCE
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.sampling_params import WeightsVersion

NEW = UpdateWeights("/weights/new", "new", wait_s=5.0)
DIGEST = "d" * 64


@dataclass
class Process:
    """One process of a worker, as the controller's orders have made it."""

    start: StartWorker
    state: str = "ready"
    registered: bool = False
    prepared: WeightsVersion | None = None
    told: LeaseGrant | None = None
    requests: int = 0
    steps: int = 0
    waits: bool = False
    """Whether its worker has left, and it waits for a plan."""


class Pools:
    """Workers of two pools and their controller, driven by hand; the ledger outlives controllers."""

    def __init__(
        self, prefill: int = 2, decode: int = 2, config: ClusterConfig | None = None, together: int = 1
    ) -> None:
        """`together`: so many decode workers share their experts, and leave once all of them have drained."""
        self.together = together
        self.clock, self.ledger, self.wall = ManualClock(), MemoryLedger(), 5000.0
        self.config = config or ClusterConfig()
        self.slow: set[WorkerName] = set()
        """Workers that never get through with reading."""
        self.digest: Callable[[WorkerName], str] = lambda name: DIGEST
        self.unfit: dict[WorkerName, str] = {}
        self.processes: dict[WorkerName, Process] = {}
        self.protocol = STREAM_PROTOCOL
        self.began: list[StartWorker] = []
        self.restart()
        if together > 1:
            roles: dict[str, RoleRoom] = {Role.PREFILL: RoleRoom(1), Role.DECODE: RoleRoom(1, together=together)}
            self.core.set_room(ClusterRoom((NodeRoom(NodePlace("", "n"), 100, starts=100, roles=roles),)))
        self.core.pools.add_some(Role.PREFILL, prefill)
        self.core.pools.add_some(Role.DECODE, decode)
        self.settle()

    def restart(self) -> None:
        """The controller is killed, and another one goes on from the ledger."""
        self.core = Controller(self.clock, self.config, self.ledger, wall=lambda: self.wall)
        self.core.attach([(name, one.start.incarnation) for name, one in self.processes.items()])

    def act(self) -> None:
        """Carry out what the controller orders."""
        for action in self.core.tick():
            match action:
                case StartWorker():
                    self.began.append(action)
                    self.processes[action.name] = Process(action)
                case KillWorker():
                    there = self.processes.get(action.name)
                    if there is not None and there.start.incarnation == action.incarnation:
                        del self.processes[action.name]

    def beat(self, name: WorkerName) -> None:
        """One heartbeat of a worker, or its registration, and what it does by the grant."""
        one = self.processes.get(name)
        if one is None or one.waits:
            return
        incarnation = one.start.incarnation
        if not one.registered:
            limits = WorkerLimits(1, 1)
            record = WorkerRecord(
                name, one.start.role, incarnation, 7, "n", "e", "c", limits, stream="s", stream_protocol=self.protocol,
                weights=one.start.weights,
            )  # fmt: skip
            one.told, one.registered = self.core.register(record), True
        else:
            status = WorkerStatus(
                name, one.start.role, one.state, 7, "n", incarnation, one.requests, 0, 1, 1, steps=one.steps
            )
            if one.prepared is not None and name not in self.slow:
                words, digest = self.unfit.get(name, ""), self.digest(name)
                number = one.prepared.number
                status = replace(status, prepared=number, prepared_digest=digest, unprepared=words)
            one.told = self.core.renew(name, incarnation, status)
        if one.told.fenced:
            del self.processes[name]
            return
        one.prepared = one.told.prepare
        one.state = "draining" if one.told.drain else one.state
        one.requests = 0 if one.told.hurry else one.requests
        if one.state == "draining" and all(self.drained(other) for other in self.group(name)):
            one.waits = self.core.leave(name, incarnation, closed=len(self.group(name)) == 1)
            if not one.waits:
                del self.processes[name]

    def group(self, name: WorkerName) -> tuple[WorkerName, ...]:
        """The workers that share their experts with this one, itself among them."""
        kind, _, number = name.rpartition("-")
        size = self.together if kind == Role.DECODE else 1
        first = int(number) // size * size
        return tuple(WorkerName(f"{kind}-{rank}") for rank in range(first, first + size))

    def drained(self, name: WorkerName) -> bool:
        """Whether a worker drains and has no request, or has left."""
        one = self.processes.get(name)
        return one is None or (one.state == "draining" and not one.requests)

    def round(self) -> None:
        self.clock.advance(0.5)
        for name in list(self.processes):
            self.beat(name)
        self.act()

    def settle(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            self.round()

    def die(self, name: WorkerName) -> None:
        one = self.processes.pop(name, None)
        if one is not None:
            self.core.died(name, one.start.incarnation, "killed, signal 9")

    @property
    def numbers(self) -> dict[WorkerName, int]:
        """The number of the weights of each worker that serves, as it registered."""
        rows = self.core.table.rows.values()
        return {row.name: row.record.weights_number for row in rows if row.serves and row.record is not None}


def test_weights_change_when_all_workers_have_read_the_same_files_and_processes_go_on_with_them() -> None:
    pools = Pools()
    pools.core.pools.make(NEW)
    pools.round()
    assert pools.core.table.served.pending is not None
    assert set(pools.numbers.values()) == {0}, "nothing has changed while they read"
    before = len(pools.began)
    pools.settle()
    served = pools.core.weights.told()
    assert (served.weights.version, served.weights.digest, served.behind) == ("new", DIGEST, 0)
    assert set(pools.numbers.values()) == {1}
    assert {start.successor_of for start in pools.began[before:]} == {Incarnation(1)}, "in place"
    assert all(start.weights == served.weights for start in pools.began[before:])


def test_decode_workers_drain_when_no_prefill_worker_has_the_old_weights_any_more() -> None:
    pools = Pools()
    pools.core.pools.make(NEW)
    pools.processes[WorkerName("prefill-1")].requests = 1
    for _ in range(6):
        pools.round()
    states = {name: one.state for name, one in pools.processes.items()}
    assert states[WorkerName("prefill-1")] == "draining"
    assert pools.numbers[WorkerName("prefill-0")] == 1
    assert states[WorkerName("decode-0")] == states[WorkerName("decode-1")] == "ready", (
        "what prefill-1 has begun they still take"
    )
    shown = {view.record.name: view.status.state for view in pools.core.views()}
    assert shown[WorkerName("decode-0")] == "draining", "routers send it nothing new"
    pools.processes[WorkerName("prefill-1")].requests = 0
    pools.settle()
    assert set(pools.numbers.values()) == {1}


def test_requests_have_so_long_to_end_and_are_ended_then() -> None:
    pools = Pools(1, 1)
    pools.core.pools.make(NEW)
    one = pools.processes[WorkerName("decode-0")]
    one.requests = 3
    for _ in range(8):
        pools.round()
    assert one.requests == 3
    pools.settle()
    assert set(pools.numbers.values()) == {1}


def test_one_worker_that_can_not_take_them_ends_the_change_and_so_do_other_files_and_time() -> None:
    for wrong, words in (
        ("unfit", "decode-1 can't take them: the tensor x is missing"),
        ("digest", "have read different files"),
        ("slow", "prefill-0 has not read them within"),
    ):
        pools = Pools()
        if wrong == "unfit":
            pools.unfit[WorkerName("decode-1")] = "the tensor x is missing"
        elif wrong == "digest":
            pools.digest = str
        else:
            pools.slow.add(WorkerName("prefill-0"))
        pools.core.pools.make(NEW)
        pools.settle(8 + (wrong == "slow") * round(2 * ClusterConfig().start_timeout_s))
        served = pools.core.weights.told()
        assert words in served.failed
        assert (served.pending, served.weights.number) == (None, 0)
        assert set(pools.numbers.values()) == {0}
        # The next one has another number: what was read for this one is none of it.
        pools.unfit.clear()
        pools.slow.clear()
        pools.digest = lambda name: DIGEST
        pools.core.pools.make(NEW)
        served = pools.core.table.served
        assert served.pending is not None
        assert (served.pending.number, served.failed) == (2, "")
        pools.settle(8)
        assert set(pools.numbers.values()) == {2}, "it has its own time to be read in"


def test_a_controller_that_was_started_again_waits_for_the_word_of_every_worker() -> None:
    pools = Pools()
    last = WorkerName("decode-1")
    pools.unfit[last] = "the tensor x is missing"
    pools.core.pools.make(NEW)
    for name in pools.processes:
        pools.beat(name)
    pools.restart()
    for name in pools.processes:
        if name != last:
            for _ in range(2):
                pools.beat(name)
    pools.act()
    assert pools.core.table.served.pending is not None, "one worker has said nothing yet"
    pools.settle(4)
    served = pools.core.table.served
    assert (served.weights.number, served.pending) == (0, None)
    assert "decode-1 can't take them" in served.failed


def test_changes_are_refused_while_one_is_under_way_and_where_nobody_could_follow() -> None:
    pools = Pools()
    pools.core.pools.make(NEW)
    for other in (NEW, FlushCaches(), SleepCluster(1)):
        with pytest.raises(ConfigError, match="is being prepared"):
            pools.core.pools.make(other)
    pools.processes[WorkerName("prefill-0")].requests = 1
    for _ in range(3):
        pools.round()
    with pytest.raises(ConfigError, match="has still to follow"):
        pools.core.pools.make(NEW)
    pools.settle()
    with pytest.raises(ConfigError, match="names one set of weights"):
        pools.core.pools.make(NEW)
    old = Pools()
    old.protocol = WEIGHTS_SINCE - 1
    old.die(WorkerName("decode-0"))
    old.settle()
    with pytest.raises(ConfigError, match="decode-0 can't change its weights by its build"):
        old.core.pools.make(NEW)


def test_a_rolling_change_takes_one_worker_after_the_other() -> None:
    pools = Pools()
    pools.core.pools.make(replace(NEW, rolling=True))
    order = []
    for _ in range(80):
        pools.round()
        away = (
            4 - len(pools.numbers) + sum(one.state == "draining" for one in pools.processes.values() if one.registered)
        )
        assert away <= 1
        order += [name for name, number in pools.numbers.items() if number and name not in order]
    assert set(pools.numbers.values()) == {1}
    assert [name.partition("-")[0] for name in order] == ["prefill", "decode", "prefill", "decode"]


@pytest.mark.parametrize(
    "change", [NEW, replace(NEW, rolling=True), FlushCaches(wait_s=5.0), SleepCluster(1, wait_s=5.0)], ids=repr
)
def test_a_worker_that_an_operator_drains_leaves_for_good_whatever_else_changes(change: ServingChange) -> None:
    pools, leaving = Pools(prefill=3), WorkerName("prefill-2")
    pools.processes[leaving].requests = 1
    pools.core.pools.drain(leaving)
    pools.settle(3)
    pools.core.pools.make(change)
    pools.settle()
    pools.processes.get(leaving, Process(pools.began[0])).requests = 0
    pools.settle()
    pools.core.pools.make(SleepCluster(0))
    pools.settle()
    assert (pools.core.table.rows[leaving].state, len(pools.numbers)) == ("left", 4)


@pytest.mark.parametrize("rolling", [False, True])
def test_workers_that_share_their_experts_change_their_weights_together(*, rolling: bool) -> None:
    pools = Pools(prefill=1, decode=4, together=2)
    pools.core.pools.make(replace(NEW, rolling=rolling))
    away = 0
    for _ in range(80):
        pools.round()
        serve = [name for name in pools.numbers if name.startswith("decode")]
        away = max(away, 4 - len([name for name in serve if pools.processes[name].state == "ready"]))
    assert away == (2 if rolling else 4)
    assert (len(pools.numbers), set(pools.numbers.values())) == (5, {1})
    for change in (FlushCaches(wait_s=5.0), SleepCluster(1, wait_s=5.0), SleepCluster(0)):
        pools.core.pools.make(change)
        pools.settle()
        assert len(pools.numbers) == (0 if change == SleepCluster(1, wait_s=5.0) else 5)


def test_a_pool_that_is_scaled_down_during_a_change_stays_so() -> None:
    pools = Pools(prefill=3)
    pools.core.pools.make(NEW)
    pools.processes[WorkerName("prefill-2")].requests = 1
    pools.settle(4)
    assert pools.core.table.rows[WorkerName("prefill-2")].state == "draining"
    pools.core.pools.scale({Role.PREFILL: 2})
    pools.settle()
    assert pools.numbers == dict.fromkeys(map(WorkerName, ("prefill-0", "prefill-1", "decode-0", "decode-1")), 1)


def without(pools: Pools, name: WorkerName, seconds: float) -> None:
    """Time passes in which a worker never comes so far as to register."""
    for _ in range(round(2 * seconds)):
        pools.processes.pop(name, None)
        pools.round()


def test_a_rolling_change_goes_on_without_a_worker_that_stays_away_once_another_serves_the_new_weights() -> None:
    pools, away = Pools(), WorkerName("prefill-0")
    pools.core.pools.make(replace(NEW, rolling=True))
    while set(pools.numbers.values()) == {0}:
        pools.round()
    pools.die(away)
    without(pools, away, ClusterConfig().start_timeout_s - 10)
    assert sorted(pools.numbers.values()) == [0, 0, 1], "decode-0 was under way when it died; the others wait"
    without(pools, away, 60)
    assert pools.numbers == dict.fromkeys(map(WorkerName, ("prefill-1", "decode-0", "decode-1")), 1)
    pools.settle(400)
    assert (len(pools.numbers), set(pools.numbers.values())) == (4, {1}), "who comes back has them too"


@pytest.mark.parametrize("back", [UpdateWeights(""), UpdateWeights("/weights/old", "old", rolling=True)], ids=repr)
def test_a_rolling_change_that_takes_down_its_first_worker_halts_and_another_one_takes_its_place(
    back: UpdateWeights,
) -> None:
    pools, first = Pools(), WorkerName("prefill-0")
    pools.core.pools.make(replace(NEW, rolling=True))
    while first in pools.numbers:
        pools.round()
    without(pools, first, 3 * ClusterConfig().start_timeout_s)
    assert sorted(pools.numbers.values()) == [0, 0, 0]
    for order in (FlushCaches(), SleepCluster(1)):
        with pytest.raises(ConfigError, match="change to other weights, or back"):
            pools.core.pools.make(order)
    pools.core.pools.make(back)
    pools.core.pools.scale({Role.PREFILL: 1})
    pools.settle()
    assert pools.numbers == dict.fromkeys(map(WorkerName, ("prefill-1", "decode-0", "decode-1")), 2)


def test_a_rolling_change_stands_still_while_another_one_is_prepared() -> None:
    pools, slow = Pools(), WorkerName("decode-1")
    pools.core.pools.make(replace(NEW, rolling=True))
    while set(pools.numbers.values()) == {0}:
        pools.round()
    pools.slow.add(slow)
    pools.core.pools.make(UpdateWeights("", wait_s=7.0))
    pools.settle()
    assert sorted(pools.numbers.values()) == [0, 0, 1, 1], "the one that was under way has come back, no other has left"
    pools.restart()
    pools.settle(round(2 * ClusterConfig().start_timeout_s) + 10)
    served = pools.core.table.served
    assert (served.failed != "", served.weights.number, served.rolling, served.wait_s) == (True, 1, True, NEW.wait_s)
    pools.settle()
    assert set(pools.numbers.values()) == {1}, "the one before goes on, one worker after the other"


def test_the_way_back_is_a_change_to_the_checkpoint_that_workers_read_first() -> None:
    pools = Pools()
    with pytest.raises(ConfigError, match="the checkpoint's weights are what is served"):
        pools.core.pools.make(UpdateWeights(""))
    pools.core.pools.make(NEW)
    pools.settle()
    pools.digest = lambda name: ""  # As workers say of the checkpoint.
    pools.core.pools.make(UpdateWeights("", wait_s=5.0))
    for one in pools.processes.values():
        one.requests = 1
    pools.settle(6)
    served = pools.core.weights.told()
    assert (served.weights, served.behind) == (WeightsVersion(2), 4)
    kept = [one.told.prepare for one in pools.processes.values() if one.told is not None]
    assert kept == [served.weights] * 4, "what was read is kept until its worker has left"
    pools.settle()
    assert set(pools.numbers.values()) == {2}


def test_a_flush_is_a_change_to_the_same_weights_that_reads_nothing() -> None:
    pools = Pools()
    pools.core.pools.make(NEW)
    pools.settle()
    pools.core.pools.make(FlushCaches(5.0))
    told = []
    for _ in range(60):
        pools.round()
        told += [one.told.prepare for one in pools.processes.values() if one.told is not None]
    assert set(told) == {None}
    served = pools.core.weights.told()
    assert (served.weights.version, served.weights.number) == ("new", 2)
    assert set(pools.numbers.values()) == {2}


def test_a_part_of_weights_is_put_onto_those_alone_that_it_was_made_for() -> None:
    pools = Pools(1, 1)
    pools.core.pools.make(replace(NEW, onto=0))
    pools.settle()
    assert set(pools.numbers.values()) == {1}
    part = UpdateWeights("/weights/part", "part")
    for number in (0, 2):
        with pytest.raises(ConfigError, match="push them again"):
            pools.core.pools.make(replace(part, onto=number))
    pools.unfit[WorkerName("decode-0")] = "its shapes are others"
    pools.core.pools.make(UpdateWeights("/weights/unfit", "unfit"))
    pools.settle(4)
    assert pools.core.table.served.failed
    pools.unfit.clear()
    with pytest.raises(ConfigError, match="push them again"):
        pools.core.pools.make(replace(part, onto=pools.core.table.served.tried))
    pools.core.pools.make(replace(part, onto=1))
    pools.settle()
    assert set(pools.numbers.values()) == {3}, "the change before it was given up"


def test_weights_without_a_name_are_named_by_their_files() -> None:
    pools = Pools(1, 1)
    for number, letter in enumerate("ab", 1):
        pools.digest = lambda name, letter=letter: letter * 64  # type: ignore[misc]
        try:
            pools.core.pools.make(UpdateWeights("/weights", ""))
        except ConfigError as error:
            raise AssertionError(f"they are refused: {error}") from error
        pools.settle()
        weights = pools.core.table.served.weights
        assert (weights.number, weights.version, weights.digest) == (number, letter * 32, letter * 64)


def test_a_flush_of_the_checkpoints_weights_asks_nobody_to_read_and_all_leave_at_once() -> None:
    pools = Pools()
    pools.core.pools.make(replace(NEW, rolling=True))
    pools.settle(100)
    asked: set[object] = set()
    for flushed in (pools, Pools()):
        for one in flushed.processes.values():
            one.requests = 1
        flushed.core.pools.make(FlushCaches(9.0))
        for _ in range(6):
            flushed.round()
            asked |= {one.told.prepare for one in flushed.processes.values() if one.told is not None}
        changing = {row.name for row in flushed.core.table.rows.values() if row.changes}
        assert len(changing) == 4, "of a rolling change nothing is left"
        assert not any(flushed.numbers.values() if flushed is not pools else ())
        flushed.settle()
        assert len(set(flushed.numbers.values()) - {0}) == 1
    assert asked == {None}, "whichever folder they are from"


def test_who_changes_ends_its_requests_though_the_cluster_is_paused() -> None:
    pools = Pools(1, 1)
    pools.core.pools.make(PauseCluster())
    pools.processes[WorkerName("decode-0")].requests = 1
    pools.core.pools.make(replace(NEW, wait_s=1000.0))
    pools.settle(8)
    one = pools.processes[WorkerName("decode-0")]
    assert one.told is not None
    assert (one.state, one.told.paused) == ("draining", False)
    one.requests = 0
    pools.settle(8)
    told = [one.told for one in pools.processes.values()]
    assert [grant.paused for grant in told if grant is not None] == [True, True]
    assert set(pools.numbers.values()) == {1}


@pytest.mark.parametrize("restarts", [False, True])
def test_when_the_last_worker_had_changed_is_told(restarts: bool) -> None:
    pools = Pools(1, 2)
    pools.processes[WorkerName("decode-1")].requests = 1
    pools.core.pools.make(replace(NEW, wait_s=1000.0))
    pools.settle(8)
    told = pools.core.weights.told()
    assert (told.behind, told.since) == (1, 5000.0), "when the cluster has"
    pools.wall = 6000.0
    if restarts:
        pools.restart()
    pools.settle(2)
    assert pools.core.weights.told().since == 5000.0
    pools.processes[WorkerName("decode-1")].requests = 0
    pools.settle(8)
    pools.wall = 7000.0
    pools.settle(2)
    told = pools.core.weights.told()
    assert (told.behind, told.since) == (0, 6000.0)


@pytest.mark.parametrize(("rolling", "restarts"), [(False, False), (False, True), (True, False), (True, True)])
def test_requests_have_the_same_time_on_all_workers_whoever_waits_for_whom(rolling: bool, restarts: bool) -> None:
    pools = Pools(1, 1)
    for one in pools.processes.values():
        one.requests = 1
    pools.core.pools.make(replace(NEW, rolling=rolling))
    while pools.core.table.served.pending is not None:
        pools.round()
    began = pools.clock.now()
    if restarts:
        pools.settle(3)
        pools.restart()
    ended: dict[WorkerName, float] = {}
    for _ in range(60):
        pools.round()
        for name, process in pools.processes.items():
            if not process.requests:
                ended.setdefault(name, pools.clock.now() - began)
    assert set(pools.numbers.values()) == {1}
    waits = [NEW.wait_s, 2 * NEW.wait_s] if rolling else [NEW.wait_s] * 2
    for wait, took in zip(waits, sorted(ended.values()), strict=True):
        assert wait <= took <= wait + (6.0 if rolling or restarts else 2.0), ended


def test_sleep_is_asked_for_twice_and_of_another_level_only_when_awake() -> None:
    pools = Pools(1, 1)
    for _ in range(2):
        pools.core.pools.make(SleepCluster(1, 5.0))
        pools.settle(4)
    with pytest.raises(ConfigError, match="wake it first"):
        pools.core.pools.make(SleepCluster(2, 5.0))
    with pytest.raises(ConfigError, match="1 and 2"):
        pools.core.pools.make(SleepCluster(3, 5.0))


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_cluster_starts_nothing_and_keeps_processes_at_level_1(level: int) -> None:
    pools = Pools()
    pools.core.pools.make(SleepCluster(level, 5.0))
    before = len(pools.began)
    pools.settle()
    assert pools.numbers == {}
    assert len(pools.processes) == (4 if level == 1 else 0), "processes wait where level 1 keeps them"
    with pytest.raises(ConfigError, match="wake it first"):
        pools.core.pools.make(NEW)
    pools.settle()
    assert len(pools.began) == before
    pools.core.pools.make(SleepCluster(0))
    pools.settle()
    assert len(pools.numbers) == 4
    assert {bool(start.successor_of) for start in pools.began[before:]} == {level == 1}


def idle_pools(level: int = 1) -> Pools:
    """Pools that sleep after 100 s without a request."""
    return Pools(config=ClusterConfig(sleep_after_s=100.0, sleep_level=level))


def idle_for(pools: Pools, seconds: float) -> None:
    until = pools.clock.now() + seconds
    while pools.clock.now() < until:
        pools.round()


@pytest.mark.parametrize("level", [1, 2])
def test_a_cluster_without_requests_sleeps_and_a_request_wakes_it(level: int) -> None:
    pools = idle_pools(level)
    idle_for(pools, 60.0)
    assert not pools.core.weights.told().asleep
    idle_for(pools, 200.0)
    served = pools.core.weights.told()
    assert (served.asleep, served.by_demand) == (level, True)
    assert pools.numbers == {}
    assert len(pools.processes) == (4 if level == 1 else 0)
    assert pools.core.pools.make(SleepCluster(0, demand=True))[1]
    pools.settle()
    assert len(pools.numbers) == 4
    assert not pools.core.weights.told().by_demand
    idle_for(pools, 60.0)
    assert not pools.core.weights.told().asleep, "it has its time anew"


def test_work_of_any_worker_keeps_a_cluster_awake_seen_or_not() -> None:
    pools = idle_pools()
    one = pools.processes[WorkerName("decode-1")]
    for number in range(8):
        one.requests = int(number >= 4)
        one.steps += 0 if one.requests else 5  # Of a request that began and ended between two heartbeats.
        idle_for(pools, 60.0)
        assert not pools.core.weights.told().asleep
    one.requests = 0
    idle_for(pools, 200.0)
    assert pools.core.weights.told().asleep


def test_a_cluster_in_the_middle_of_something_does_not_fall_asleep() -> None:
    pools = idle_pools()
    pools.core.pools.make(PauseCluster())
    idle_for(pools, 200.0)
    assert not pools.core.weights.told().asleep
    pools.core.pools.make(PauseCluster(paused=False))
    pools.slow.add(WorkerName("decode-0"))
    pools.core.pools.make(NEW)
    idle_for(pools, 110.0)
    assert not pools.core.weights.told().asleep


def test_an_operators_sleep_is_not_ended_by_a_request() -> None:
    pools = idle_pools()
    pools.core.pools.make(SleepCluster(1))
    assert not pools.core.pools.make(SleepCluster(0, demand=True))[1]
    assert pools.core.weights.told().asleep
    pools.core.pools.make(SleepCluster(0))
    idle_for(pools, 200.0)
    assert pools.core.weights.told().by_demand
    pools.core.pools.make(SleepCluster(1))
    assert not pools.core.weights.told().by_demand, "an operator has said so now"


def test_a_sleep_by_demand_outlives_the_controller() -> None:
    pools = idle_pools()
    idle_for(pools, 200.0)
    pools.restart()
    idle_for(pools, 5.0)
    assert pools.core.weights.told().by_demand
    pools.core.pools.make(SleepCluster(0, demand=True))
    pools.settle()
    assert len(pools.numbers) == 4


def test_a_wake_in_the_middle_of_a_change_leaves_requests_their_time() -> None:
    pools = Pools(1, 1)
    pools.core.pools.make(NEW)
    pools.processes[WorkerName("decode-0")].requests = 3
    for _ in range(6):
        pools.round()
    pools.core.pools.make(SleepCluster(0))
    pools.round()
    assert pools.core.table.served.wait_s == NEW.wait_s
    assert pools.processes[WorkerName("decode-0")].requests == 3


def test_who_was_to_leave_for_a_sleep_that_is_over_serves_on_and_has_all_its_time_at_the_next() -> None:
    pools, wait_s = Pools(1, 1), 20.0
    one = pools.processes[WorkerName("decode-0")]
    one.requests = pools.processes[WorkerName("prefill-0")].requests = 1
    pools.core.pools.make(SleepCluster(1, wait_s))
    pools.settle(4)
    states = {view.record.name: view.status.state for view in pools.core.views()}
    assert set(states.values()) == {"draining"}, "the decode worker leaves once the prefill worker has"
    pools.core.pools.make(SleepCluster(0))
    pools.settle(round(2 * wait_s) + 20)
    states = {view.record.name: view.status.state for view in pools.core.views()}
    assert states == dict.fromkeys(map(WorkerName, ("prefill-0", "decode-0")), "ready")
    assert (one.start.incarnation, one.requests) == (1, 1)
    pools.core.pools.make(replace(NEW, wait_s=wait_s))
    pools.settle(8)
    assert (one.state, one.requests) == ("draining", 1)
    pools.settle()
    assert set(pools.numbers.values()) == {1}


def test_a_pause_is_told_to_all_workers_and_outlives_the_controller() -> None:
    pools = Pools()
    pools.core.pools.make(PauseCluster())
    pools.round()
    assert all(one.told is not None and one.told.paused for one in pools.processes.values())
    pools.restart()
    pools.round()
    assert all(one.told is not None and one.told.paused for one in pools.processes.values())
    pools.core.pools.make(PauseCluster(paused=False))
    pools.round()
    assert not any(one.told is not None and one.told.paused for one in pools.processes.values())


@pytest.mark.parametrize("seed", range(60))
def test_whoever_dies_in_whichever_phase_the_cluster_ends_in_one_version(seed: int) -> None:
    draw = random.Random(seed)
    pools = Pools(together=1 + seed % 2)
    pools.core.pools.make(replace(NEW, rolling=draw.random() < 0.3))
    was_served = False
    for _ in range(draw.randrange(2, 25)):
        for name in list(pools.processes):
            if draw.random() < 0.7:
                pools.beat(name)
            if draw.random() < 0.05:
                for mate in pools.group(name):
                    pools.die(mate)
            if draw.random() < 0.2 and name in pools.processes:
                pools.processes[name].requests = draw.choice([0, 1])
        if draw.random() < 0.15:
            pools.restart()
        pools.clock.advance(0.5)
        committed = pools.core.table.served.weights.number
        pools.act()
        assert committed <= pools.core.table.served.weights.number, "what was changed to stays"
        was_served |= bool(committed)
        if not committed:
            assert not any(pools.numbers.values()), "nobody serves what isn't the cluster's"
    for one in pools.processes.values():
        one.requests = 0
    pools.settle(400)
    served = pools.core.weights.told()
    assert len(pools.numbers) == 4
    assert set(pools.numbers.values()) == {served.weights.number}
    assert served.pending is None
    assert served.weights.number or not was_served
