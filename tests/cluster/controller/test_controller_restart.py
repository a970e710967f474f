"""A controller that is killed and started again: what its ledger keeps, and what its workers notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import EndedProcess, ForgetArenas, KillWorker, StartWorker
from twinpool.cluster.controller.controller_table import ControllerTable
from twinpool.cluster.controller.leadership import ControllerLedger, LedgerLost, MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.controller.open_ledger import SqliteLedger
from twinpool.cluster.controller.wanted_worker import WantedWorker, WorkerState, from_ledger, to_ledger
from twinpool.cluster.processes.restart_policy import SETTLED_S, RestartHistory
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

CONFIG = ClusterConfig(heartbeat_s=1.0, lease_s=10.0, start_timeout_s=60.0, restart_limit=3)
A, B = WorkerName("decode-0"), WorkerName("prefill-0")

Keeper = Callable[[], ControllerLedger]


@pytest.fixture(params=["memory", "sqlite"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Keeper:
    """Opens the same ledger again and again."""
    memory = MemoryLedger()
    return (lambda: memory) if request.param == "memory" else (lambda: SqliteLedger(tmp_path / "controller.sqlite"))


class Lives:
    """One controller after the other over one ledger, by one clock."""

    def __init__(self, keeper: Keeper) -> None:
        self.clock = ManualClock()
        self._keeper = keeper
        self.core = self.again()

    def again(self, away_s: float = 0.0) -> Controller:
        """Kill the controller and start it again after `away_s`; nobody supervises it yet."""
        self.clock.advance(away_s)
        self.core = Controller(self.clock, CONFIG, self._keeper(), supervised=False)
        return self.core

    def up(self, name: WorkerName, role: Role) -> None:
        self.core.pools.add(name, role)
        (start,) = [a for a in self.core.tick() if isinstance(a, StartWorker)]
        assert not self.core.register(record(name, role, start.incarnation)).fenced

    def renew(self, name: WorkerName, incarnation: int = 1, state: str = "ready") -> LeaseGrant:
        role = self.core.table.rows[name].role
        return self.core.renew(name, Incarnation(incarnation), status(name, role, incarnation, state))

    def states(self) -> dict[str, str]:
        return {view.record.name: view.status.state for view in self.core.views()}


def record(name: WorkerName, role: Role, incarnation: int) -> WorkerRecord:
    return WorkerRecord(
        name, role, Incarnation(incarnation), 77, "n", "127.0.0.1:1", "tcp://127.0.0.1:2", WorkerLimits(1024, 2048),
        node_id="0123456789ab", fingerprint=Fingerprint(3, "layout", "numerics", "weights"), stream="127.0.0.1:3",
    )  # fmt: skip


def status(name: WorkerName, role: Role, incarnation: int, state: str) -> WorkerStatus:
    return WorkerStatus(name, role, state, 77, "n", Incarnation(incarnation), 1, 0, 64, 60)


def two(keeper: Keeper) -> Lives:
    lives = Lives(keeper)
    lives.core.attach([])
    lives.up(A, Role.DECODE)
    lives.up(B, Role.PREFILL)
    return lives


def test_workers_renew_with_the_next_controller_and_routers_see_the_same_table(keeper: Keeper) -> None:
    lives = two(keeper)
    before = [(view.record, view.status.state) for view in lives.core.views()]
    core = lives.again(away_s=7.0)
    assert [(view.record, view.status.state) for view in core.views()] == before
    assert not lives.renew(A).fenced
    assert not lives.renew(B).fenced
    assert not core.tick()


def test_a_worker_that_does_not_come_back_has_its_lease_to_the_end_and_no_longer(keeper: Keeper) -> None:
    """Its last renewal may have been granted in the moment in which the controller died."""
    lives = two(keeper)
    core = lives.again(away_s=3.0)
    core.attach([(A, Incarnation(1)), (B, Incarnation(1))])
    core.tick()
    lives.clock.advance(9.9)
    lives.renew(A)
    assert not [a for a in core.tick() if isinstance(a, KillWorker | StartWorker)]
    lives.clock.advance(0.2)
    actions = core.tick()
    assert [a.name for a in actions if isinstance(a, KillWorker)] == [B]
    assert [(a.name, a.incarnation) for a in actions if isinstance(a, StartWorker)] == [(B, 2)]
    assert lives.renew(B).fenced
    assert [(one.name, one.incarnation) for one in lives.renew(A).ended] == [(B, 1)]


def test_incarnations_grow_across_controllers(keeper: Keeper) -> None:
    lives = two(keeper)
    for number in (2, 3):
        lives.core.died(A, Incarnation(number - 1), "killed")
        core = lives.again(away_s=30.0)
        lives.renew(B)
        core.attach([(B, Incarnation(1))])
        (start,) = [a for a in core.tick() if isinstance(a, StartWorker)]
        assert (start.name, start.incarnation) == (A, number)
        assert not core.register(record(A, Role.DECODE, number)).fenced


def test_grants_of_the_next_controller_name_all_that_ended_under_the_one_before(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.died(A, Incarnation(1), "killed")
    assert [(one.name, one.incarnation) for one in lives.renew(B).ended] == [(A, 1)]
    lives.core.tick()
    lives.core.register(record(A, Role.DECODE, 2))
    lives.again()
    assert [(one.name, one.incarnation) for one in lives.renew(B).ended] == [(A, 1)]
    lives.core.leave(A, Incarnation(2))
    lives.again()
    assert [(one.name, one.incarnation) for one in lives.renew(B).ended] == [(A, 2)]


def test_a_start_under_way_has_not_ended_for_the_next_controller(keeper: Keeper) -> None:
    """Neither before the worker registers nor after; of a name's first start there is nothing before it to be named."""
    lives = Lives(keeper)
    lives.core.attach([])
    lives.up(B, Role.PREFILL)
    lives.core.pools.add(A, Role.DECODE)
    ended: list[tuple[WorkerName, int]] = []
    for number in (1, 2):
        assert [a.incarnation for a in lives.core.tick() if isinstance(a, StartWorker)] == [number]
        core = lives.again()
        assert lives.states()[A] == "starting"
        assert [(one.name, one.incarnation) for one in lives.renew(B).ended] == ended
        assert not core.register(record(A, Role.DECODE, number)).fenced
        for grant in (lives.renew(A, number), lives.renew(B)):
            assert [(one.name, one.incarnation) for one in grant.ended] == ended
        core.attach([(A, Incarnation(number)), (B, Incarnation(1))])
        core.died(A, Incarnation(number), "killed")
        ended = [(A, number)]


def test_nothing_starts_while_no_supervisor_is_there_to_start_it(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.died(A, Incarnation(1), "killed")
    core = lives.again()
    assert not [a for a in core.tick() if isinstance(a, StartWorker)]
    core.attach([(B, Incarnation(1))])
    assert [a.name for a in core.tick() if isinstance(a, StartWorker)] == [A]
    core.detach()
    core.died(B, Incarnation(1), "killed")
    assert not [a for a in core.tick() if isinstance(a, StartWorker)]


def test_a_start_whose_order_was_lost_begins_anew_with_a_number_of_its_own(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.died(A, Incarnation(1), "killed")
    assert [a.incarnation for a in lives.core.tick() if isinstance(a, StartWorker)] == [2]
    core = lives.again()
    core.attach([(B, Incarnation(1))])
    actions = core.tick()
    assert KillWorker(A, Incarnation(2), 0, "") in actions, "it may have been started all the same"
    assert [a.incarnation for a in actions if isinstance(a, StartWorker)] == [3]
    assert core.register(record(A, Role.DECODE, 2)).fenced


def test_a_start_that_the_supervisor_has_goes_on(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.died(A, Incarnation(1), "killed")
    lives.core.tick()
    core = lives.again()
    core.attach([(A, Incarnation(2)), (B, Incarnation(1))])
    assert not [a for a in core.tick() if isinstance(a, StartWorker | KillWorker)]
    assert not core.register(record(A, Role.DECODE, 2)).fenced


def test_a_start_under_way_has_all_its_time_from_when_the_next_controller_begins(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.died(A, Incarnation(1), "killed")
    lives.core.tick()
    core = lives.again(away_s=CONFIG.start_timeout_s)
    core.attach([(A, Incarnation(2)), (B, Incarnation(1))])
    core.set_nodes([NodePlace("0123456789ab", "n")])
    assert core.tick() == [], "Ray may only be slow to place it"
    core.set_nodes([])
    lives.clock.advance(CONFIG.lease_s)
    lives.renew(B)
    assert not [a for a in core.tick() if isinstance(a, KillWorker)]


def test_what_ended_while_the_controller_was_away_is_dead_at_once_and_what_is_gone_by_its_lease(keeper: Keeper) -> None:
    lives = two(keeper)
    core = lives.again(away_s=1.0)
    core.attach([], [EndedProcess(A, Incarnation(1), "signal 9")])
    actions = core.tick()
    assert [a.name for a in actions if isinstance(a, StartWorker)] == [A]
    assert lives.states()[B] == "ready", "it may live where the supervisor can't see it"


def test_processes_that_should_not_be_there_are_killed_and_their_arenas_forgotten(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.pools.drain(A)
    lives.core.leave(A, Incarnation(1))
    core = lives.again()
    core.attach([(A, Incarnation(1)), (B, Incarnation(1)), (WorkerName("stranger-0"), Incarnation(5))])
    actions = core.tick()
    killed = {(a.name, a.incarnation) for a in actions if isinstance(a, KillWorker)}
    assert killed == {(A, 1), ("stranger-0", 5)}
    assert ForgetArenas(A) in actions
    assert lives.states() == {A: "left", B: "ready"}
    core.pools.undrain(A)
    core.died(B, Incarnation(1), "killed")
    core.detach()
    assert core.tick() == [], "what nobody would carry out is not kept"


def test_one_whose_lease_ended_while_nobody_could_kill_it_is_killed_by_the_supervisor_that_comes(
    keeper: Keeper,
) -> None:
    lives = two(keeper)
    core = lives.again()
    lives.clock.advance(CONFIG.lease_s)
    lives.renew(B)
    core.tick()
    assert lives.states() == {A: "dead", B: "ready"}
    core.attach([(A, Incarnation(1)), (B, Incarnation(1))])
    assert [(a.name, a.incarnation) for a in core.tick() if isinstance(a, KillWorker)] == [(A, 1)]


def test_a_worker_that_has_served_long_under_the_next_controller_dies_no_quick_death(keeper: Keeper) -> None:
    lives = two(keeper)
    core = lives.again()
    core.attach([(A, Incarnation(1)), (B, Incarnation(1))])
    lives.clock.advance(SETTLED_S)
    for number in (1, 2):  # Only the second death is quick, and the first quick one is not waited off.
        core.died(A, Incarnation(number), "killed")
        assert [a.incarnation for a in core.tick() if isinstance(a, StartWorker) and a.name == A] == [number + 1]
        assert not core.register(record(A, Role.DECODE, number + 1)).fenced


def test_what_a_worker_that_serves_has_taken_over_is_not_forgotten_with_what_was_there_before_it(
    keeper: Keeper,
) -> None:
    lives = two(keeper)
    lives.core.died(A, Incarnation(1), "killed")
    lives.core.tick()
    lives.core.register(record(A, Role.DECODE, 2))
    core = lives.again()
    core.attach([(A, Incarnation(2)), (B, Incarnation(1))])
    assert [a for a in core.tick() if isinstance(a, ForgetArenas)] == [ForgetArenas(A, Incarnation(2))]


def test_a_worker_whose_registration_was_answered_by_nobody_registers_again(keeper: Keeper) -> None:
    lives = two(keeper)
    core = lives.again()
    assert not core.register(record(A, Role.DECODE, 1)).fenced
    other = structs.replace(record(A, Role.DECODE, 1), pid=78)
    assert core.register(other).fenced, "somebody else who says he is it"


def test_drains_changes_of_role_restarts_and_cordons_go_on(keeper: Keeper) -> None:
    lives = two(keeper)
    lives.core.set_nodes([NodePlace("0123456789ab", "n"), NodePlace("fedcba987654", "m")])
    lives.core.pools.cordon("n")
    lives.core.pools.drain(A)
    lives.core.pools.change_role(B, Role.DECODE, empty=True)
    core = lives.again()
    assert [view.cordoned for view in core.views()] == [True, True]
    assert lives.renew(A).drain
    assert lives.renew(B).drain
    lives.renew(B, state="draining")
    core = lives.again()
    assert not lives.renew(B, state="draining").drain, "it drains by now"
    core.leave(A, Incarnation(1))
    core.leave(B, Incarnation(1))
    core = lives.again()
    core.attach([])
    (start,) = [a for a in core.tick() if isinstance(a, StartWorker)]
    assert (start.name, start.role, start.incarnation, start.avoid) == (B, Role.DECODE, 2, ("n",))
    assert lives.states()[A] == "left"
    core.set_nodes([NodePlace("0123456789ab", "n"), NodePlace("fedcba987654", "m")])
    core.pools.uncordon("n")
    assert not any(view.cordoned for view in lives.again().views())


def test_a_row_is_the_same_after_the_ledger_but_for_what_heartbeats_say() -> None:
    """Every field that is kept has a value of its own here."""
    row = WantedWorker(
        A, Role.PREFILL, Incarnation(7), RestartHistory(CONFIG), WorkerState.DRAINING, False,
        record(A, Role.PREFILL, 7), None, 0.0, None, 0.0, NodePlace("abc", "host"), "only-here", (), True, True,
        Role.DECODE, "it fell",
    )  # fmt: skip
    row.others = (NodePlace("def", "other"),)
    back = from_ledger(A, to_ledger(row), CONFIG)
    kept = {f.name for f in dataclasses.fields(WantedWorker)} - {"restarts", "status", "deadline", "ready_since"}
    kept -= {
        "changed_at",
        "changes",
        "numbers_at",
        "counters_at",
        "counters_said",
        "waits",
        "lacks_room",
        "served_as",
        "started_at",
        "waiting",
        "process_since",
    }
    default = WantedWorker(A, Role.PREFILL, Incarnation(7), row.restarts)
    for name in kept - {"restart_at", "avoids", "held", "name", "role", "incarnation"}:
        assert getattr(row, name) != getattr(default, name), f"{name} should not have its default here"
    for name in kept:
        assert getattr(back, name) == getattr(row, name), name


def test_a_ledger_is_written_by_the_last_who_has_begun_with_it_and_nobody_else(tmp_path: Path) -> None:
    """A controller that was stopped goes on, and another one has taken its place."""
    path = tmp_path / "controller.sqlite"
    first = Controller(ManualClock(), CONFIG, SqliteLedger(path))
    first.pools.add(A, Role.DECODE)
    second = Controller(ManualClock(), CONFIG, SqliteLedger(path))
    with pytest.raises(LedgerLost, match="another controller"):
        first.tick()
    assert "another controller" in first.table.failed
    assert [a.incarnation for a in second.tick() if isinstance(a, StartWorker)] == [1]
    with pytest.raises(LedgerLost):
        first.tick()
    third = Controller(ManualClock(), CONFIG, SqliteLedger(path))
    assert third.table.rows[A].incarnation == 1


def test_a_ledger_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "controller.sqlite"
    path.write_text("not a database" * 100)
    with pytest.raises(ConfigError, match=r"controller\.sqlite"):
        SqliteLedger(path)
    with pytest.raises(ConfigError, match="nowhere"):
        SqliteLedger(tmp_path / "nowhere" / "ledger")


def test_a_table_of_another_version_is_refused_not_guessed_at() -> None:
    ledger = MemoryLedger()
    ledger.put("worker/decode-0", '{"role": "decode"}')
    with pytest.raises(ConfigError, match="can't read"):
        ControllerTable(ManualClock(), CONFIG, ledger)
