from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import (
    ControllerAction,
    ForgetArenas,
    KillWorker,
    OperatorNote,
    StartFailed,
    StartWorker,
)
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.controller.wanted_worker import TRANSITIONS, WorkerEvent, WorkerState, advance
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError, IllegalTransition
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

NAME = WorkerName("decode-0")
CONFIG = ClusterConfig(heartbeat_s=1.0, lease_s=10.0, start_timeout_s=60.0, restart_limit=3)


class Cluster:
    """A controller with one worker, driven by hand."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self.clock = ManualClock()
        self.ledger = ledger or MemoryLedger()
        self.core = Controller(self.clock, CONFIG, self.ledger)
        self.core.pools.add(NAME, Role.DECODE)

    def starts(self, actions: list[ControllerAction] | None = None) -> list[int]:
        return [a.incarnation for a in (self.core.tick() if actions is None else actions) if isinstance(a, StartWorker)]

    def up(self, incarnation: int) -> None:
        assert self.starts() == [incarnation]
        assert not self.core.register(_record(incarnation)).fenced

    def renew(self, incarnation: int, state: str = "ready") -> bool:
        return not self.core.renew(NAME, Incarnation(incarnation), _status(incarnation, state)).fenced

    @property
    def state(self) -> str:
        (view,) = self.core.views()
        return view.status.state


def _record(incarnation: int) -> WorkerRecord:
    fits = WorkerLimits(1024, 2048)
    return WorkerRecord(NAME, Role.DECODE, Incarnation(incarnation), 77, "n", "127.0.0.1:1", "tcp://127.0.0.1:2", fits)


def _status(incarnation: int, state: str = "ready") -> WorkerStatus:
    return WorkerStatus(NAME, Role.DECODE, state, 77, "n", Incarnation(incarnation), 1, 0, 64, 60)


def test_each_start_gets_a_larger_incarnation() -> None:
    cluster = Cluster()
    for incarnation in (1, 2, 3):
        cluster.up(incarnation)
        cluster.clock.advance(60)
        cluster.renew(incarnation)
        cluster.core.died(NAME, Incarnation(incarnation), "signal 9")


def test_the_number_is_in_the_ledger_before_it_is_handed_out() -> None:
    class Full(MemoryLedger):
        full = False

        def put(self, key: str, value: str) -> None:
            if self.full:
                raise OSError("disk full")

    ledger = Full()
    cluster = Cluster(ledger)
    ledger.full = True
    with pytest.raises(OSError, match="disk full"):
        cluster.core.tick()
    assert cluster.state == "dead"
    assert cluster.core.table.failed == "disk full", "it must end, and so must say why"
    ledger.full = False
    assert cluster.starts() == [1]


def test_a_worker_that_renews_keeps_its_lease() -> None:
    cluster = Cluster()
    cluster.up(1)
    for _ in range(10):
        cluster.clock.advance(9.9)
        assert cluster.core.tick() == []
        assert cluster.renew(1)
    assert cluster.state == "ready"


def test_a_worker_that_does_not_renew_is_killed_and_followed_by_the_next_incarnation() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(10.0)
    actions = cluster.core.tick()
    assert actions[0] == KillWorker(NAME, Incarnation(1), 77, "n")
    assert isinstance(actions[1], OperatorNote)
    assert "no heartbeat" in actions[1].text
    assert cluster.starts(actions) == [2]


def test_grants_name_the_latest_incarnation_of_each_worker_that_has_ended_and_none_with_a_lease() -> None:
    cluster, other = Cluster(), WorkerName("prefill-0")

    def ended() -> list[tuple[str, int]]:
        grant = cluster.core.renew(other, Incarnation(1), structs.replace(_status(1), name=other))
        return [(one.name, one.incarnation) for one in grant.ended]

    cluster.core.pools.add(other, Role.PREFILL)
    cluster.core.tick()
    cluster.core.register(structs.replace(_record(1), name=other))
    assert ended() == [], "the first ones are starting"
    cluster.core.register(_record(1))
    cluster.clock.advance(9.9)
    assert ended() == []
    cluster.clock.advance(0.1)
    cluster.core.tick()
    assert ended() == [(NAME, 1)], "its lease is over"
    cluster.core.register(_record(2))
    assert ended() == [(NAME, 1)]
    cluster.core.leave(NAME, Incarnation(2))
    assert ended() == [(NAME, 2)], "it has left"


@pytest.mark.parametrize("how", ["its node was cordoned", "it was given up", "its process was lost"])
def test_grants_name_a_start_that_was_ended_as_well(how: str) -> None:
    """Its process may have got as far as to hold something of others before it was told."""
    cluster, other = Cluster(), WorkerName("prefill-0")
    cluster.core.pools.add(other, Role.PREFILL)
    cluster.core.tick()
    cluster.core.register(structs.replace(_record(1), name=other))
    if how == "its node was cordoned":
        node = NodePlace("n" * 12, "n")
        cluster.core.placed(NAME, Incarnation(1), node)
        assert cluster.core.pools.cordon("n") == (NAME,)
    elif how == "it was given up":
        cluster.core.pools.give_up(NAME)
    else:
        cluster.core.attach([(other, Incarnation(1))])
    grant = cluster.core.renew(other, Incarnation(1), structs.replace(_status(1), name=other))
    assert [(one.name, one.incarnation) for one in grant.ended] == [(NAME, 1)]


def test_an_incarnation_that_is_up_already_is_not_registered_again() -> None:
    """Somebody else says it is this one: who came first goes on, and its record stays."""
    cluster = Cluster()
    cluster.up(1)
    other = structs.replace(_record(1), pid=78, endpoint="127.0.0.1:9")
    assert cluster.core.register(other).fenced
    assert cluster.core.views()[0].record == _record(1)
    assert cluster.renew(1)


def test_grants_name_a_worker_that_left_for_another_role() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.core.died(NAME, Incarnation(1), "killed")
    cluster.up(2)
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    cluster.core.leave(NAME, Incarnation(2))
    cluster.core.tick()
    grant = cluster.core.register(_record(3))
    assert [(one.name, one.incarnation) for one in grant.ended] == [(NAME, 2)]


def test_a_lease_that_has_ended_is_fenced_for_ever() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(10.0)
    cluster.core.tick()
    assert not cluster.renew(1)
    assert cluster.core.register(_record(1)).fenced
    assert not cluster.core.register(_record(2)).fenced
    assert not cluster.renew(1)
    assert cluster.state == "ready"
    assert cluster.core.late_messages == 3


def test_a_dead_process_is_restarted_at_once() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(5.0)
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    actions = cluster.core.tick()
    assert OperatorNote("decode-0 died (signal 9); restarting, incarnation 2") in actions
    assert cluster.starts(actions) == [2]


def test_a_death_that_is_reported_twice_counts_once() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    cluster.core.died(NAME, Incarnation(1), "no heartbeat")
    assert cluster.starts() == [2]
    cluster.core.died(NAME, Incarnation(1), "late news")
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
        cluster.core.died(NAME, Incarnation(incarnation), "out of memory")
    assert waits == [0.0, 0.0, 0.5, 1.0]
    actions = cluster.core.tick()
    reports = [a.text for a in actions if isinstance(a, OperatorNote)]
    assert "left dead (cluster.restart_limit)" in reports[-1]
    assert actions.count(ForgetArenas(NAME)) == 1, "only now that nobody comes after it"
    cluster.clock.advance(3600)
    assert cluster.core.tick() == []
    assert cluster.state == "dead"


def test_what_is_kept_for_a_successor_is_forgotten_when_a_worker_leaves_and_not_when_it_dies() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    actions = cluster.core.tick()
    assert ForgetArenas(NAME) not in actions
    assert cluster.starts(actions) == [2]
    assert not cluster.core.register(_record(2)).fenced
    assert ForgetArenas(NAME, Incarnation(2)) in cluster.core.tick(), "it has taken over what it could"
    cluster.core.leave(NAME, Incarnation(2))
    assert ForgetArenas(NAME) in cluster.core.tick()


def test_deaths_long_ago_do_not_count() -> None:
    cluster = Cluster()
    for incarnation in range(1, 8):
        cluster.up(incarnation)
        cluster.clock.advance(300)
        cluster.core.died(NAME, Incarnation(incarnation), "signal 9")
    assert cluster.starts() == [8]


def test_a_worker_that_never_registers_is_killed_when_its_time_is_over() -> None:
    cluster = Cluster()
    assert cluster.starts() == [1]
    cluster.clock.advance(59.9)
    assert cluster.core.tick() == []
    cluster.clock.advance(0.2)
    actions = cluster.core.tick()
    assert KillWorker(NAME, Incarnation(1), 0, "") in actions
    assert StartFailed(NAME, "not ready after 60 s") in actions


def test_a_worker_that_left_by_drain_is_not_started_again() -> None:
    cluster = Cluster()
    cluster.up(1)
    assert cluster.renew(1, "draining")
    assert cluster.state == "draining"
    cluster.core.leave(NAME, Incarnation(1))
    assert cluster.state == "left"
    cluster.core.died(NAME, Incarnation(1), "exited")
    cluster.clock.advance(3600)
    assert cluster.starts() == []
    assert cluster.state == "left"


def test_one_that_leaves_in_order_has_no_end_of_the_one_before_it() -> None:
    """`status` says how a worker ended: one that was killed, came back and was drained has left, and wasn't killed."""
    cluster = Cluster()
    cluster.up(1)
    cluster.core.died(NAME, Incarnation(1), "killed, signal 9")
    assert [view.status.last_end for view in cluster.core.views()] == ["killed, signal 9"]
    cluster.up(2)
    cluster.renew(2, "draining")
    cluster.core.leave(NAME, Incarnation(2))
    assert cluster.state == "left"
    assert [view.status.last_end for view in cluster.core.views()] == [""]


def test_a_worker_that_dies_while_draining_is_not_started_again() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.renew(1, "draining")
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    cluster.clock.advance(3600)
    assert cluster.starts() == []
    assert cluster.state == "dead"


def test_undrain_makes_a_worker_ready_again() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.renew(1, "draining")
    assert cluster.renew(1, "ready")
    assert cluster.state == "ready"
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    assert cluster.starts() == [2]


def test_nothing_is_started_while_shutting_down() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.core.shut_down()
    cluster.core.died(NAME, Incarnation(1), "signal 15")
    assert cluster.starts() == []


def test_the_version_grows_with_each_change_and_not_without() -> None:
    cluster = Cluster()
    cluster.up(1)
    changes: list[int] = []
    cluster.core.on_change(lambda: changes.append(cluster.core.version))
    cluster.renew(1)
    cluster.renew(1)
    status = structs.replace(_status(1), running=5)
    cluster.core.renew(NAME, Incarnation(1), status)
    assert changes == [changes[0], changes[0] + 1]
    assert cluster.core.views()[0].status.running == 5


def test_two_workers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="already a worker decode-0"):
        Cluster().core.pools.add(NAME, Role.DECODE)


def test_an_event_that_is_not_in_the_table_raises() -> None:
    for state in WorkerState:
        for event in WorkerEvent:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(IllegalTransition, match=str(state)):
                    advance(state, event)


def test_a_worker_that_left_comes_back_only_when_an_operator_wants_it() -> None:
    assert [event for state, event in TRANSITIONS if state is WorkerState.LEFT] == [WorkerEvent.WANTED]
    cluster = Cluster()
    cluster.up(1)
    cluster.renew(1, "draining")
    cluster.core.leave(NAME, Incarnation(1))
    cluster.clock.advance(3600)
    assert cluster.starts() == []
    assert cluster.core.pools.undrain(NAME) == (NAME,)
    cluster.up(2)
    assert not cluster.renew(1), "what the one before it says is void"


def test_one_that_was_left_dead_begins_anew_when_an_operator_wants_it() -> None:
    cluster = Cluster()
    for incarnation in (1, 2, 3, 4):
        while not cluster.starts():
            cluster.clock.advance(0.25)
        cluster.core.died(NAME, Incarnation(incarnation), "out of memory")
    cluster.clock.advance(3600)
    assert cluster.starts() == []
    cluster.core.pools.undrain(NAME)
    cluster.up(5)
    cluster.core.died(NAME, Incarnation(5), "again")
    assert cluster.starts() == [6], "its deaths of before don't count"


class Nodes:
    """A controller with workers on two nodes, driven by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, CONFIG, MemoryLedger())
        self.places = {host: NodePlace(f"{host}-0123456789abcdef", host) for host in ("a", "b")}
        self.core.set_nodes(self.places.values())
        self.incarnation: dict[WorkerName, Incarnation] = {}
        for number in range(4):
            self.core.pools.add(WorkerName(f"decode-{number}"), Role.DECODE)
        self.told: list[StartWorker] = []
        self.land(lambda start: "ab"[int(start.name[-1]) % 2])

    def land(self, where: Callable[[StartWorker], str]) -> list[str]:
        """Carry out what is to be started; returns the names."""
        starts = [a for a in self.core.tick() if isinstance(a, StartWorker)]
        for start in starts:
            host = where(start)
            assert not any(self.places[host].named(name) for name in start.avoid), "it lands where it must not"
            self.incarnation[start.name] = start.incarnation
            self.core.placed(start.name, start.incarnation, self.places[host])
            assert not self.register(start.name, host).fenced
        return [start.name for start in starts]

    def register(self, name: str, host: str) -> LeaseGrant:
        number = self.incarnation[WorkerName(name)]
        record = WorkerRecord(
            WorkerName(name), Role.DECODE, number, 77, host, "e", "c", WorkerLimits(1, 1), self.places[host].node_id
        )
        return self.core.register(record)

    def renew(self, name: str, state: str = "ready") -> LeaseGrant:
        number = self.incarnation[WorkerName(name)]
        status = WorkerStatus(WorkerName(name), Role.DECODE, state, 77, "", number, 1, 0, 64, 60)
        return self.core.renew(WorkerName(name), number, status)

    def states(self) -> dict[str, str]:
        return {view.record.name: f"{view.status.state} on {view.record.node}" for view in self.core.views()}


@pytest.mark.parametrize("name", ["b", "b-0123456789", "b-0123456789abcdef"])
def test_a_drained_node_is_cordoned_and_all_that_serve_there_are_told(name: str) -> None:
    nodes = Nodes()
    nodes.renew("decode-1", "draining")
    assert nodes.core.pools.drain(name) == ("decode-3",), "decode-1 drains already"
    assert nodes.renew("decode-3").drain
    assert not nodes.renew("decode-0").drain
    assert [view.record.name for view in nodes.core.views() if view.cordoned] == ["decode-1", "decode-3"]
    nodes.renew("decode-3", "draining")
    assert not nodes.renew("decode-3", "ready").drain, "who undrains one of them is obeyed"
    nodes.core.died(WorkerName("decode-3"), Incarnation(1), "killed")
    assert nodes.land(lambda start: "a") == ["decode-3"]


def test_no_worker_lands_on_a_cordoned_node_whenever_it_was_started() -> None:
    nodes = Nodes()
    for number in (1, 3):
        nodes.core.died(WorkerName(f"decode-{number}"), Incarnation(1), "killed")
    starts = {a.name: a.incarnation for a in nodes.core.tick() if isinstance(a, StartWorker)}
    nodes.incarnation |= starts
    nodes.core.placed(WorkerName("decode-1"), starts[WorkerName("decode-1")], nodes.places["b"])
    nodes.core.pools.drain("b")
    kills = [a for a in nodes.core.tick() if isinstance(a, KillWorker)]
    assert [kill.name for kill in kills] == ["decode-1"], "it was building its worker there"
    assert nodes.register("decode-3", "b").fenced, "nobody knew yet where it would land"
    assert set(nodes.land(lambda start: "a")) | {"decode-1"} == {"decode-1", "decode-3"}
    assert nodes.states()["decode-3"] == "ready on a"
    for view in nodes.core.views():
        assert not (view.cordoned and view.status.state in ("starting", "ready"))


def test_where_a_start_was_placed_is_seen_before_its_worker_has_registered() -> None:
    nodes = Nodes()
    nodes.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    (start,) = [a for a in nodes.core.tick() if isinstance(a, StartWorker)]
    nodes.core.placed(start.name, start.incarnation, nodes.places["a"])
    (view,) = [view for view in nodes.core.views() if view.record.name == start.name]
    assert (view.status.state, view.status.node, view.record.node) == ("starting", "a", "a")


def test_a_start_that_is_moved_to_another_node_is_no_death() -> None:
    nodes = Nodes()
    nodes.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    for _ in range(3 * CONFIG.restart_limit):
        start = next(a for a in nodes.core.tick() if isinstance(a, StartWorker))
        nodes.core.placed(start.name, start.incarnation, nodes.places["b"])
        nodes.core.pools.drain("b")
        nodes.core.pools.undrain("b")
    assert nodes.states()["decode-1"].startswith("dead")
    assert nodes.land(lambda start: "b") == ["decode-1"]


def test_where_every_node_is_cordoned_a_worker_waits_and_is_started_after_the_undrain() -> None:
    nodes = Nodes()
    nodes.core.died(WorkerName("decode-0"), Incarnation(1), "killed")
    nodes.core.pools.drain("a")
    nodes.core.pools.drain("b")
    reports = []
    for _ in range(100):
        nodes.clock.advance(1.0)
        for number in (1, 2, 3):
            nodes.renew(f"decode-{number}", "draining")
        reports += [a.text for a in nodes.core.tick() if isinstance(a, OperatorNote) and "waits" in a.text]
    assert reports == ["decode-0 waits: every node is cordoned (a, b); undrain one"], "told once"
    assert nodes.states()["decode-0"] == "dead on a"
    nodes.core.pools.undrain("a")
    assert nodes.land(lambda start: "a") == ["decode-0"]
    nodes.core.died(WorkerName("decode-0"), Incarnation(2), "killed")
    nodes.core.pools.drain("a")
    nodes.clock.advance(1.0)
    told = [a.text for a in nodes.core.tick() if isinstance(a, OperatorNote) and "waits" in a.text]
    assert told == reports, "and again each time that it comes to that"


def test_a_start_that_waits_for_a_place_is_begun_anew_when_a_node_is_undrained() -> None:
    """Where it may not be is part of what was asked for: it would wait for another node for ever."""
    nodes = Nodes()
    nodes.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    nodes.core.pools.drain("b")
    assert [(a.name, a.avoid) for a in nodes.core.tick() if isinstance(a, StartWorker)] == [("decode-1", ("b",))]
    nodes.core.pools.undrain("b")
    actions = nodes.core.tick()
    assert [(a.name, a.incarnation) for a in actions if isinstance(a, KillWorker)] == [("decode-1", 2)]
    assert [(a.name, a.incarnation, a.avoid) for a in actions if isinstance(a, StartWorker)] == [("decode-1", 3, ())]


def test_a_node_that_ray_has_taken_away_is_uncordoned_under_whichever_name() -> None:
    nodes = Nodes()
    nodes.core.pools.cordon("b")
    nodes.core.set_nodes([nodes.places["a"]])
    nodes.core.pools.uncordon("b-0123456789")
    assert not nodes.core.table.nodes.cordoned(nodes.places["b"])


def test_an_undrained_node_gets_back_those_that_left_it() -> None:
    nodes = Nodes()
    nodes.core.pools.drain("b")
    nodes.renew("decode-1", "draining")
    nodes.renew("decode-3", "draining")
    nodes.core.leave(WorkerName("decode-1"), Incarnation(1))
    assert nodes.core.pools.undrain("b-0123456789") == ("decode-1",), "under whichever name"
    assert nodes.land(lambda start: "b") == ["decode-1"]
    assert not any(view.cordoned for view in nodes.core.views())
    assert not nodes.renew("decode-3", "ready").drain


def test_an_unknown_node_is_refused_with_those_that_there_are() -> None:
    nodes = Nodes()
    for steer in (nodes.core.pools.drain, nodes.core.pools.undrain, nodes.core.pools.cordon, nodes.core.pools.uncordon):
        with pytest.raises(ConfigError, match="nodes: a, b"):
            steer("c")


def test_a_controller_that_stood_still_ends_no_lease_for_it() -> None:
    """It has heard nobody: all of its workers would be dead to it, and each of them lives."""
    cluster = Cluster()
    cluster.up(1)
    cluster.clock.advance(12.0)
    cluster.core.stood_still(12.0)
    assert cluster.core.tick() == []
    assert cluster.renew(1)
    cluster.clock.advance(10.0)
    assert [a.name for a in cluster.core.tick() if isinstance(a, KillWorker)] == [NAME]


def test_a_controller_that_stood_still_gives_starts_the_time_that_it_missed() -> None:
    """A start may be placed, or have registered, while nobody could hear of it."""
    cluster = Cluster()
    assert cluster.starts() == [1]
    cluster.clock.advance(59.0)
    cluster.core.stood_still(30.0)
    cluster.clock.advance(30.0)
    assert cluster.core.tick() == []
    cluster.clock.advance(1.0)
    assert [a.name for a in cluster.core.tick() if isinstance(a, KillWorker)] == [NAME]


@pytest.mark.parametrize(("served_s", "delays"), [(9.0, [0.0, 0.5, 1.0]), (10.0, [0.0, 0.0, 0.0])])
def test_how_long_a_worker_served_is_counted_from_when_it_was_ready(served_s: float, delays: list[float]) -> None:
    """A start takes longer than that by itself: whoever dies soon after it, again and again, waits longer each time."""
    cluster = Cluster()
    for number, delay in enumerate(delays, 1):
        assert cluster.starts() == [number]
        cluster.clock.advance(30.0)
        assert not cluster.core.register(_record(number)).fenced
        cluster.clock.advance(served_s)
        cluster.core.died(NAME, Incarnation(number), "signal 9")
        if delay:
            cluster.clock.advance(delay - 0.01)
            assert cluster.starts() == []
            cluster.clock.advance(0.02)


def test_a_worker_that_never_got_ready_has_not_served_however_long_its_start_took() -> None:
    cluster = Cluster()
    waits = []
    for number in (1, 2, 3):
        began = cluster.clock.now()
        while cluster.starts() != [number]:
            cluster.clock.advance(0.25)
        waits.append(cluster.clock.now() - began)
        cluster.clock.advance(50.0)
        cluster.core.died(NAME, Incarnation(number), "no memory")
    assert waits == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("how", ["left", "died", "lease"])
def test_who_comes_back_in_another_role_shows_nothing_of_the_old_one(how: str) -> None:
    """Routers place by the record: with the old one they would send prompts to who decodes."""
    cluster = Cluster()
    cluster.up(1)
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    cluster.renew(1, "draining")
    cluster.core.detach()
    match how:
        case "left":
            cluster.core.leave(NAME, Incarnation(1))
        case "died":
            cluster.core.died(NAME, Incarnation(1), "signal 9")
        case _:
            cluster.clock.advance(10.0)
            cluster.core.tick()
    (view,) = cluster.core.views()
    assert (view.record.role, view.status.role, view.status.state) == (Role.PREFILL, Role.PREFILL, "dead")
    assert (view.record.endpoint, view.record.pid) == ("", 0)
    cluster.core.attach([])
    assert [a.role for a in cluster.core.tick() if isinstance(a, StartWorker)] == [Role.PREFILL]


def test_a_worker_that_restarts_in_its_role_is_started_again_however_it_ends() -> None:
    for how in ("left", "died"):
        cluster = Cluster()
        cluster.up(1)
        cluster.core.pools.restart(NAME)
        assert cluster.core.renew(NAME, Incarnation(1), _status(1)).drain
        cluster.renew(1, "draining")
        if how == "left":
            assert not cluster.core.leave(NAME, Incarnation(1), closed=True), "its process ends: it has no other role"
        else:
            cluster.core.died(NAME, Incarnation(1), "signal 9")
        (start,) = [a for a in cluster.core.tick() if isinstance(a, StartWorker)]
        assert (start.role, start.incarnation, start.successor_of) == (Role.DECODE, 2, 0)
        assert not cluster.core.register(_record(2)).fenced
        assert not cluster.core.renew(NAME, Incarnation(2), _status(2)).drain, "the order was for the one before"
        cluster.renew(2, "draining")
        cluster.core.leave(NAME, Incarnation(2))
        assert cluster.state == "left", "what drains now drains to leave"


def test_a_worker_is_still_starting_on_its_node_until_its_own_time_is_over() -> None:
    """The time to register begins anew where the process was placed: a node may have to be found for it first."""
    cluster = Cluster()
    cluster.core.set_nodes([NodePlace("a" * 12, "a")])
    assert cluster.starts() == [1]
    cluster.clock.advance(40.0)
    cluster.core.tick()
    assert cluster.core.views()[0].status.waits
    cluster.core.placed(NAME, Incarnation(1), NodePlace("a" * 12, "a"))
    assert not cluster.core.views()[0].status.waits
    cluster.clock.advance(59.0)
    assert cluster.core.tick() == []
    cluster.clock.advance(1.0)
    assert [a.name for a in cluster.core.tick() if isinstance(a, KillWorker)] == [NAME]


def test_what_is_said_of_an_earlier_incarnation_changes_nothing_of_the_one_that_is() -> None:
    cluster = Cluster()
    cluster.up(1)
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    cluster.up(2)
    cluster.core.tick()
    before = cluster.core.views()
    deadline, late = cluster.core.table.rows[NAME].deadline, cluster.core.late_messages
    cluster.clock.advance(1.0)
    cluster.core.died(NAME, Incarnation(1), "signal 9")
    cluster.core.placed(NAME, Incarnation(1), NodePlace("b" * 12, "b"))
    assert not cluster.core.leave(NAME, Incarnation(1), closed=True)
    assert cluster.core.renew(NAME, Incarnation(1), _status(1)).fenced
    assert cluster.core.register(_record(1)).fenced
    assert cluster.core.register(_record(3)).fenced
    assert cluster.core.views() == before
    assert cluster.core.table.rows[NAME].deadline == deadline
    assert cluster.core.late_messages == late + 6
    assert cluster.core.tick() == []


def test_a_worker_that_is_still_starting_on_a_node_that_is_drained_is_among_those_told() -> None:
    nodes = Nodes()
    nodes.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    start = next(a for a in nodes.core.tick() if isinstance(a, StartWorker))
    nodes.core.placed(start.name, start.incarnation, nodes.places["b"])
    assert sorted(nodes.core.pools.drain("b")) == ["decode-1", "decode-3"]


def test_a_worker_that_was_placed_nowhere_is_on_no_node() -> None:
    nodes = Nodes()
    nodes.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    assert any(isinstance(a, StartWorker) for a in nodes.core.tick())
    with pytest.raises(ConfigError, match=r"no worker or node is named ''; nodes: a, b$"):
        nodes.core.pools.drain("")
