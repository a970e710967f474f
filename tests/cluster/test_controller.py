from __future__ import annotations

import dataclasses

import pytest

from cluster.controller import Action, Controller, Forget, Kill, MemoryLedger, Report, Start
from cluster.states import TRANSITIONS, WorkerEvent, WorkerState, advance
from contracts.clock import ManualClock
from contracts.config import ClusterConfig
from contracts.errors import ConfigError, IllegalTransition
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import Fits, WorkerStatus
from contracts.ports import WorkerRecord

NAME = WorkerName("decode-0")
CONFIG = ClusterConfig(heartbeat_s=1.0, lease_s=10.0, start_timeout_s=60.0, restart_limit=3)


class Cluster:
    """A controller with one worker, driven by hand."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self.clock = ManualClock()
        self.ledger = ledger or MemoryLedger()
        self.brain = Controller(self.clock, CONFIG, self.ledger)
        self.brain.add(NAME, Role.DECODE)

    def starts(self, actions: list[Action] | None = None) -> list[int]:
        return [a.incarnation for a in (self.brain.tick() if actions is None else actions) if isinstance(a, Start)]

    def up(self, incarnation: int) -> None:
        assert self.starts() == [incarnation]
        assert not self.brain.register(_record(incarnation)).fenced

    def renew(self, incarnation: int, state: str = "ready") -> bool:
        return not self.brain.renew(NAME, Incarnation(incarnation), _status(incarnation, state)).fenced

    @property
    def state(self) -> str:
        (view,) = self.brain.views()
        return view.status.state


def _record(incarnation: int) -> WorkerRecord:
    fits = Fits(1024, 2048)
    return WorkerRecord(NAME, Role.DECODE, Incarnation(incarnation), 77, "n", "127.0.0.1:1", "tcp://127.0.0.1:2", fits)


def _status(incarnation: int, state: str = "ready") -> WorkerStatus:
    return WorkerStatus(NAME, Role.DECODE, state, 77, "n", Incarnation(incarnation), 1, 0, 64, 60)


def test_each_start_gets_a_larger_incarnation() -> None:
    cluster = Cluster()
    for incarnation in (1, 2, 3):
        cluster.up(incarnation)
        cluster.clock.advance(60)
        cluster.renew(incarnation)
        cluster.brain.died(NAME, Incarnation(incarnation), "signal 9")


def test_incarnations_grow_across_restarts_of_the_controller() -> None:
    ledger = MemoryLedger()
    Cluster(ledger).up(1)
    Cluster(ledger).up(2)


def test_the_number_is_in_the_ledger_before_it_is_handed_out() -> None:
    class Full(MemoryLedger):
        def record(self, name: str, incarnation: int) -> None:
            raise OSError("disk full")

    cluster = Cluster(Full())
    with pytest.raises(OSError, match="disk full"):
        cluster.brain.tick()
    assert cluster.state == "dead"


def test_a_worker_that_renews_keeps_its_lease() -> None:
    cluster = Cluster()
    cluster.up(1)
    for _ in range(10):
        cluster.clock.advance(9.9)
        assert cluster.brain.tick() == []
        assert cluster.renew(1)
    assert cluster.state == "ready"


def test_a_worker_that_does_not_renew_is_killed_and_followed_by_the_next_incarnation() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(10.0)
    actions = cluster.brain.tick()
    assert actions[0] == Kill(NAME, Incarnation(1), 77, "n")
    assert isinstance(actions[1], Report)
    assert "no heartbeat" in actions[1].text
    assert cluster.starts(actions) == [2]


def test_a_lease_that_has_ended_is_fenced_for_ever() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(10.0)
    cluster.brain.tick()
    assert not cluster.renew(1)
    assert cluster.brain.register(_record(1)).fenced
    assert not cluster.brain.register(_record(2)).fenced
    assert not cluster.renew(1)
    assert cluster.state == "ready"
    assert cluster.brain.late_messages == 3


def test_a_dead_process_is_restarted_at_once() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(5.0)
    cluster.brain.died(NAME, Incarnation(1), "signal 9")
    actions = cluster.brain.tick()
    assert Report("decode-0 died (signal 9); restarting, incarnation 2") in actions
    assert cluster.starts(actions) == [2]


def test_a_death_that_is_reported_twice_counts_once() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.brain.died(NAME, Incarnation(1), "signal 9")
    cluster.brain.died(NAME, Incarnation(1), "no heartbeat")
    assert cluster.starts() == [2]
    cluster.brain.died(NAME, Incarnation(1), "late news")
    assert cluster.state == "starting"
    assert cluster.starts() == []


def test_a_worker_that_keeps_dying_waits_longer_each_time_and_is_then_left_dead() -> None:
    cluster = Cluster()
    waits = []
    for incarnation in (1, 2, 3, 4):
        start = cluster.clock.now()
        while not cluster.starts():
            cluster.clock.advance(0.25)
        waits.append(cluster.clock.now() - start)
        cluster.brain.died(NAME, Incarnation(incarnation), "out of memory")
    assert waits == [0.0, 0.0, 0.5, 1.0]
    actions = cluster.brain.tick()
    reports = [a.text for a in actions if isinstance(a, Report)]
    assert "left dead (cluster.restart_limit)" in reports[-1]
    assert actions.count(Forget(NAME)) == 1, "only now that nobody comes after it"
    cluster.clock.advance(3600)
    assert cluster.brain.tick() == []
    assert cluster.state == "dead"


def test_what_is_kept_for_a_successor_is_forgotten_when_a_worker_leaves_and_not_when_it_dies() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.brain.died(NAME, Incarnation(1), "signal 9")
    actions = cluster.brain.tick()
    assert Forget(NAME) not in actions
    assert cluster.starts(actions) == [2]
    assert not cluster.brain.register(_record(2)).fenced
    assert Forget(NAME, Incarnation(2)) in cluster.brain.tick(), "it has taken over what it could"
    cluster.brain.leave(NAME, Incarnation(2))
    assert Forget(NAME) in cluster.brain.tick()


def test_deaths_long_ago_do_not_count() -> None:
    cluster = Cluster()
    for incarnation in range(1, 8):
        cluster.up(incarnation)
        cluster.clock.advance(300)
        cluster.brain.died(NAME, Incarnation(incarnation), "signal 9")
    assert cluster.starts() == [8]


def test_a_worker_that_never_registers_is_killed_when_its_time_is_over() -> None:
    cluster = Cluster()
    assert cluster.starts() == [1]
    cluster.clock.advance(59.9)
    assert cluster.brain.tick() == []
    cluster.clock.advance(0.2)
    actions = cluster.brain.tick()
    assert Kill(NAME, Incarnation(1), 0, "") in actions
    assert cluster.brain.never_ready() == [(NAME, "not ready after 60 s")]


def test_a_worker_that_left_by_drain_is_not_started_again() -> None:
    cluster = Cluster()
    cluster.up(1)
    assert cluster.renew(1, "draining")
    assert cluster.state == "draining"
    cluster.brain.leave(NAME, Incarnation(1))
    assert cluster.state == "left"
    cluster.brain.died(NAME, Incarnation(1), "exited")
    cluster.clock.advance(3600)
    assert cluster.starts() == []
    assert cluster.state == "left"


def test_a_worker_that_dies_while_draining_is_not_started_again() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.renew(1, "draining")
    cluster.brain.died(NAME, Incarnation(1), "signal 9")
    cluster.clock.advance(3600)
    assert cluster.starts() == []
    assert cluster.state == "dead"


def test_undrain_makes_a_worker_ready_again() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.renew(1, "draining")
    assert cluster.renew(1, "ready")
    assert cluster.state == "ready"
    cluster.brain.died(NAME, Incarnation(1), "signal 9")
    assert cluster.starts() == [2]


def test_nothing_is_started_while_shutting_down() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.brain.shut_down()
    cluster.brain.died(NAME, Incarnation(1), "signal 15")
    assert cluster.starts() == []


def test_the_version_grows_with_each_change_and_not_without() -> None:
    cluster = Cluster()
    cluster.up(1)
    changes: list[int] = []
    cluster.brain.on_change(lambda: changes.append(cluster.brain.version))
    cluster.renew(1)
    cluster.renew(1)
    status = dataclasses.replace(_status(1), running=5)
    cluster.brain.renew(NAME, Incarnation(1), status)
    assert changes == [changes[0], changes[0] + 1]
    assert cluster.brain.views()[0].status.running == 5


def test_two_workers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="already a worker decode-0"):
        Cluster().brain.add(NAME, Role.DECODE)


def test_an_event_that_is_not_in_the_table_raises() -> None:
    for state in WorkerState:
        for event in WorkerEvent:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(IllegalTransition, match=str(state)):
                    advance(state, event)


def test_a_worker_that_left_has_no_way_back() -> None:
    assert not [event for state, event in TRANSITIONS if state is WorkerState.LEFT]
