"""Who of the workers that are due is started, and what the others wait for; whoever adds them is asked for room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import KillWorker, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

HERE = NodePlace("a" * 12, "here")
THERE = NodePlace("b" * 12, "there")
CONFIG = ClusterConfig()


def here(most: int, starts: int = 2, **changes: object) -> NodeRoom:
    """A node with room for `most` workers of any role."""
    roles: dict[str, RoleRoom] = dict.fromkeys(PAIR, RoleRoom(10))
    node = NodeRoom(NodePlace("", "here"), 10 * most, starts=starts, roles=roles)
    return replace(node, **changes)


class Cluster:
    """A controller on one node, whose starts are carried out when the test says so."""

    def __init__(self, room: ClusterRoom, **pools: int) -> None:
        self.clock, self.ledger = ManualClock(), MemoryLedger()
        self.core = Controller(self.clock, CONFIG, self.ledger)
        self.core.set_nodes([HERE])
        self.core.set_room(room)
        self.starting: dict[WorkerName, StartWorker] = {}
        self.serving: dict[WorkerName, tuple[Role, Incarnation]] = {}
        self.max_at_once = 0
        for role, count in pools.items():
            self.core.pools.add_some(Role(role), count)

    def again(self) -> None:
        """Another controller goes on from the ledger, with a supervisor that has what there is."""
        self.core = Controller(self.clock, CONFIG, self.ledger, supervised=False)
        starting = [(one.name, one.incarnation) for one in self.starting.values()]
        self.core.attach([*starting, *((name, number) for name, (_, number) in self.serving.items())])
        self.core.set_nodes([HERE])

    def tick(self, after_s: float = 0.1) -> list[str]:
        """The workers that are started by now."""
        self.clock.advance(after_s)
        started = []
        for action in self.core.tick():
            if isinstance(action, KillWorker):
                self.starting.pop(action.name, None)
                self.serving.pop(action.name, None)
            if isinstance(action, StartWorker):
                self.starting[action.name] = action
                started.append(str(action.name))
        for name, (role, number) in self.serving.items():
            self.core.renew(name, number, WorkerStatus(name, role, "ready", 7, "here", number, 0, 0, 1, 1))
        self.max_at_once = max(self.max_at_once, len(self.starting))
        return started

    def up(self, *names: str) -> None:
        """Have starts succeed, all of them where none is named."""
        for name in names or list(self.starting):
            start = self.starting.pop(WorkerName(name))
            limits, number = WorkerLimits(8, 8), start.incarnation
            record = WorkerRecord(start.name, start.role, number, 7, "here", "", "", limits, HERE.node_id)
            assert not self.core.register(record).fenced
            self.serving[start.name] = start.role, number

    def die(self, name: str) -> None:
        worker = WorkerName(name)
        _, number = self.serving.pop(worker)
        self.core.died(worker, number, "killed")

    def waits(self) -> dict[str, str]:
        return {str(view.record.name): view.status.waits for view in self.core.views() if view.status.waits}

    def states(self) -> dict[str, str]:
        return {str(view.record.name): view.status.state for view in self.core.views()}


def test_only_so_many_start_at_once_and_the_others_wait_their_turn_and_say_so() -> None:
    cluster = Cluster(ClusterRoom((here(60),)), prefill=1, decode=1)
    assert cluster.tick() == ["prefill-0", "decode-0"]
    cluster.up()
    cluster.core.pools.scale({Role.DECODE: 20})
    assert cluster.tick() == ["decode-1", "decode-2"]
    assert cluster.tick() == []
    waits = cluster.waits()
    assert len(waits) == 17
    assert all("its turn" in text and "cluster.starts_at_once" in text for text in waits.values())
    assert set(cluster.states().values()) == {"ready", "starting"}, "nothing of it has died"
    version = cluster.core.version
    cluster.core.tick()
    assert cluster.core.version == version, "who waits isn't told again and again"
    cluster.up("decode-1")
    assert cluster.tick() == ["decode-3"]
    while cluster.starting:
        cluster.up()
        cluster.tick()
    assert (len(cluster.serving), cluster.max_at_once, cluster.waits()) == (21, 2, {})


def test_who_served_comes_back_before_any_that_never_did_and_is_not_held_up_by_their_starts() -> None:
    cluster = Cluster(ClusterRoom((here(60),)), prefill=1, decode=1)
    cluster.tick()
    cluster.up()
    cluster.core.pools.scale({Role.DECODE: 20})
    cluster.tick()
    assert sorted(cluster.starting) == ["decode-1", "decode-2"]
    cluster.die("decode-0")
    cluster.die("prefill-0")
    assert cluster.tick() == ["prefill-0", "decode-0"]
    cluster.up("decode-1", "decode-2")
    assert cluster.tick() == [], "those that served are on their way, and count"
    cluster.up("prefill-0", "decode-0")
    assert cluster.tick() == ["decode-3", "decode-4"]


def test_nobody_takes_the_room_of_one_that_served_and_waits_to_start_again() -> None:
    """A table that is older than the check, or a node that has become smaller."""
    cluster = Cluster(ClusterRoom(), prefill=1, decode=3)
    cluster.tick()
    cluster.up("prefill-0", "decode-0")
    for name in ("decode-1", "decode-2"):
        cluster.core.died(WorkerName(name), cluster.starting.pop(WorkerName(name)).incarnation, "no memory")
    cluster.core.set_room(ClusterRoom((here(2),)))
    cluster.die("decode-0")
    cluster.die("prefill-0")
    started = [name for _ in range(100) for name in cluster.tick(1.0)]
    assert started[:2] == ["prefill-0", "decode-0"]
    cluster.up()
    cluster.die("decode-0")
    assert cluster.tick() == [], "it died soon, and its start isn't due yet"
    assert [name for _ in range(10) for name in cluster.tick(1.0)] == ["decode-0"]
    cluster.up()
    for _ in range(100):
        assert cluster.tick(1.0) == []
    assert {name: text.split(" (")[0] for name, text in cluster.waits().items()} == {
        "decode-1": "room for a decode worker on a node",
        "decode-2": "room for a decode worker on a node",
    }
    assert cluster.states()["decode-1"] == "dead", "it has run before"
    cluster.core.set_room(ClusterRoom((here(3),)))
    assert cluster.tick() == ["decode-1"], "it has become larger"


def test_what_does_not_fit_is_not_started_after_a_restart_of_controller_and_supervisor_either() -> None:
    cluster = Cluster(ClusterRoom(), prefill=1, decode=30)
    cluster.core.set_room(ClusterRoom((here(4),)))
    cluster.tick()
    cluster.again()
    for _ in range(50):
        cluster.up()
        cluster.tick(1.0)
    assert sorted(cluster.serving) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    with pytest.raises(ConfigError, match="none would"):
        cluster.core.pools.add_some(Role.DECODE, 1)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda pools: pools.scale({Role.DECODE: 60}), 5),
        (lambda pools: pools.scale({Role.PREFILL: 2, Role.DECODE: 4}), 5),
        (lambda pools: pools.scale({Role.PREFILL: 3, Role.DECODE: 3}), 5),
        (lambda pools: pools.add_some(Role.DECODE, 3), 5),
        (lambda pools: pools.add_some(Role.DECODE, 3, "here"), 5),
        (lambda pools: pools.undrain("here"), 5),
        (lambda pools: pools.undrain("decode-2"), 3),
        (lambda pools: pools.restart(WorkerName("decode-2")), 3),
        (lambda pools: pools.add(WorkerName("decode-2"), Role.DECODE), 3),
    ],
    ids=["scale", "both pools", "the first pool fits", "add", "add to a node", "undrain a node", "undrain", "restart",
         "add by name"],
)  # fmt: skip
@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart of the controller"])
def test_whoever_adds_more_than_fits_is_refused_and_nothing_has_changed(
    change: object, most: int, *, restarted: bool
) -> None:
    cluster = Cluster(ClusterRoom((here(6),)), prefill=1, decode=5)
    for _ in range(5):
        cluster.tick()
        cluster.up()
    for name in ("decode-2", "decode-3", "decode-4"):
        cluster.core.pools.drain(name)
        _, number = cluster.serving.pop(WorkerName(name))
        cluster.core.leave(WorkerName(name), number)
    cluster.core.set_room(ClusterRoom((here(most),)))
    if restarted:
        cluster.again()
    before = dict(cluster.ledger.rows)
    with pytest.raises(ConfigError, match=r"would not fit, (\d+|none) would: each takes about"):
        change(cluster.core.pools)  # type: ignore[operator]
    assert (cluster.ledger.rows, cluster.tick()) == (before, [])


def test_a_change_of_role_is_refused_where_the_node_has_no_room_for_the_new_one() -> None:
    roles = {Role.PREFILL: RoleRoom(10), Role.DECODE: RoleRoom(30)}
    cluster = Cluster(ClusterRoom((here(6, roles=roles),)), prefill=2, decode=1)
    cluster.tick()
    cluster.up()
    cluster.tick()
    cluster.up()
    with pytest.raises(ConfigError, match="1 more decode worker would not fit"):
        cluster.core.pools.change_role(WorkerName("prefill-0"), Role.DECODE)
    status = WorkerStatus(WorkerName("prefill-0"), Role.PREFILL, "ready", 7, "here", Incarnation(1), 0, 0, 1, 1)
    assert not cluster.core.renew(status.name, status.incarnation, status).drain, "nothing has changed"
    cluster.core.set_room(ClusterRoom((here(7, roles=roles),)))
    cluster.core.pools.change_role(WorkerName("prefill-0"), Role.DECODE)


def test_who_waits_for_room_on_its_own_node_holds_up_none_that_is_bound_to_another() -> None:
    cluster = Cluster(ClusterRoom((here(2, node=HERE), here(1, node=THERE))), prefill=1)
    cluster.core.set_nodes([HERE, THERE])
    cluster.tick()
    cluster.up()
    for node in ("here", "there"):
        cluster.core.pools.add_some(Role.DECODE, 1, node)
    cluster.core.set_room(ClusterRoom((here(1, node=HERE), here(1, node=THERE))))
    assert cluster.tick() == ["decode-1"]


def test_one_that_is_sent_away_makes_room_at_once_and_who_comes_waits_until_it_has_left() -> None:
    cluster = Cluster(ClusterRoom((here(3),)), prefill=1, decode=2)
    for _ in range(2):
        cluster.tick()
        cluster.up()
    assert set(cluster.core.pools.scale({Role.PREFILL: 2, Role.DECODE: 1})) == {"prefill-1", "decode-1"}
    assert cluster.tick() == []
    assert "room for a prefill worker" in cluster.waits()["prefill-1"]
    _, number = cluster.serving.pop(WorkerName("decode-1"))
    cluster.core.leave(WorkerName("decode-1"), number)
    assert cluster.tick() == ["prefill-1"]


def test_a_drain_is_taken_back_only_where_nobody_has_its_room_by_then() -> None:
    """It still runs, and whoever was added meanwhile is to have its room."""
    cluster = Cluster(ClusterRoom((here(3),)), prefill=1, decode=2)
    for _ in range(2):
        cluster.tick()
        cluster.up()
    cluster.core.pools.drain("decode-1")
    assert cluster.core.pools.add_some(Role.DECODE, 1) == ("decode-2",)
    with pytest.raises(ConfigError, match="1 more decode worker would not fit"):
        cluster.core.pools.undrain("decode-1")
    cluster.core.pools.drain("decode-0")
    assert cluster.core.pools.undrain("decode-1") == ()


def test_on_a_ray_that_may_grow_who_has_no_room_asks_for_a_node_and_lands_on_none_that_is_full() -> None:
    full = here(1, node=HERE, roles={Role.PREFILL: RoleRoom(10, places=9), Role.DECODE: RoleRoom(10, places=9)})
    cluster = Cluster(ClusterRoom((full,), grows=True), prefill=1)
    cluster.tick()
    cluster.up()
    cluster.core.pools.add_some(Role.DECODE, 1)
    cluster.tick()
    assert cluster.starting[WorkerName("decode-0")].avoid == (HERE.node_id,)


def test_one_that_served_gets_its_place_back_from_one_that_never_did() -> None:
    """Ray may give a place to whoever asks first."""
    places = {role: RoleRoom(10, places=2) for role in PAIR}
    cluster = Cluster(ClusterRoom((here(9, node=HERE, roles=places),), grows=True), prefill=1, decode=2)
    for _ in range(2):
        cluster.tick()
        cluster.up()
    cluster.core.pools.add_some(Role.DECODE, 1)
    cluster.tick()
    cluster.die("decode-1")
    cluster.core.placed(WorkerName("decode-2"), Incarnation(1), HERE)
    assert cluster.tick() == ["decode-1"]
    for _ in range(12):
        cluster.tick(1.0)
    assert sorted(cluster.starting) == ["decode-1"], "decode-2 was taken back"
    cluster.core.placed(WorkerName("decode-1"), Incarnation(2), HERE)
    cluster.up("decode-1")
    assert cluster.tick() == ["decode-2"]


def test_of_several_that_never_served_the_latest_start_makes_way() -> None:
    places = {role: RoleRoom(10, places=4) for role in PAIR}
    cluster = Cluster(ClusterRoom((here(9, starts=9, node=HERE, roles=places),), grows=True), decode=2)
    cluster.tick()
    cluster.up()
    for name in ("decode-2", "decode-3"):
        cluster.core.pools.add_some(Role.DECODE, 1)
        assert cluster.tick() == [name]
        cluster.core.placed(WorkerName(name), Incarnation(1), HERE)
    cluster.die("decode-1")
    assert cluster.tick() == ["decode-1"]
    for _ in range(12):
        cluster.tick(1.0)
    assert sorted(cluster.starting) == ["decode-1", "decode-2"], "decode-2 has come further"


@given(
    most=st.integers(2, 8),
    starts=st.integers(1, 3),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.integers(1, 8), st.integers(1, 8)),
            st.tuples(st.sampled_from(["up", "die", "restart"]), st.integers(0, 7), st.just(0)),
        ),
        max_size=14,
    ),
)
@settings(max_examples=20, deadline=None)
def test_whatever_happens_no_more_run_than_fit_or_start_than_may_and_all_that_fit_serve_in_the_end(
    most: int, starts: int, steps: list[tuple[str, int, int]]
) -> None:
    cluster = Cluster(ClusterRoom((here(most, starts),)))
    cluster.core.pools.add_some(Role.PREFILL, 1)
    cluster.core.pools.add_some(Role.DECODE, 1)
    wanted = (1, 1)
    for what, first, second in steps:
        match what:
            case "scale":
                fits = first + second <= most
                try:
                    cluster.core.pools.scale({Role.PREFILL: first, Role.DECODE: second})
                except ConfigError:
                    assert not fits
                else:
                    assert fits or (first <= wanted[0] and second <= wanted[1])
                    wanted = first, second
            case "up":
                for name in list(cluster.starting)[: first + 1]:
                    cluster.up(name)
            case "die" if cluster.serving:
                cluster.die(sorted(cluster.serving)[first % len(cluster.serving)])
            case "restart":
                cluster.again()
            case _:
                pass
        cluster.tick(1.0)
        _leave(cluster)
        assert len(cluster.serving) + len(cluster.starting) <= most
        assert len(cluster.starting) <= 2 * starts, "as many of those that served as of those that never did"
    for _ in range(60):
        cluster.tick(1.0)
        _leave(cluster)
        cluster.up()
    pools = [role for role, _ in cluster.serving.values()]
    assert (pools.count(Role.PREFILL), pools.count(Role.DECODE)) == wanted


def _leave(cluster: Cluster) -> None:
    """Have those that are told to leave do so."""
    for name, (role, number) in list(cluster.serving.items()):
        status = WorkerStatus(name, role, "ready", 7, "here", number, 0, 0, 1, 1)
        if cluster.core.renew(name, number, status).drain:
            cluster.core.leave(name, number)
            del cluster.serving[name]


def sharing(most: int, starts: int = 1) -> ClusterRoom:
    """A node on which two decode workers each share their experts."""
    roles: dict[str, RoleRoom] = {Role.PREFILL: RoleRoom(10), Role.DECODE: RoleRoom(10, together=2)}
    return ClusterRoom((here(most, starts, roles=roles),))


def test_workers_that_share_their_experts_start_in_one_turn_and_come_back_together() -> None:
    cluster = Cluster(sharing(60), prefill=1, decode=4)
    assert cluster.tick() == ["prefill-0"]
    cluster.up()
    assert cluster.tick() == ["decode-0", "decode-1"], "one turn for both"
    cluster.up()
    assert cluster.tick() == ["decode-2", "decode-3"]
    cluster.up()
    cluster.die("decode-2")
    assert cluster.tick(5.0) == []
    assert cluster.waits() == {"decode-2": "decode-3, with which it shares its experts"}
    cluster.die("decode-3")
    assert cluster.tick(5.0) == ["decode-2", "decode-3"]


def test_what_ends_the_start_of_one_ends_that_of_those_that_share_its_experts() -> None:
    cluster = Cluster(sharing(60, starts=9), prefill=1, decode=2)
    cluster.tick()
    cluster.core.died(WorkerName("decode-1"), cluster.starting.pop(WorkerName("decode-1")).incarnation, "no memory")
    started = cluster.tick() + cluster.tick(5.0)
    assert started == ["decode-0", "decode-1"], "at once, and not when the other's start has taken too long"
    assert [row.restarts.deaths for row in cluster.core.table.rows.values()] == [0, 0, 1]
    del cluster.starting[WorkerName("decode-0")]
    cluster.again()
    assert cluster.tick() == ["decode-0", "decode-1"], "a launcher that was to start both has started one"


def test_one_that_is_not_wanted_holds_up_those_that_share_its_experts_and_they_say_so() -> None:
    cluster = Cluster(sharing(60, starts=9), prefill=1, decode=2)
    cluster.tick()
    cluster.up()
    cluster.core.pools.drain("decode-1")
    cluster.die("decode-1")
    cluster.die("decode-0")
    assert cluster.tick(5.0) == []
    assert cluster.waits() == {"decode-0": "decode-1, with which it shares its experts"}
    cluster.core.pools.undrain("decode-1")
    assert cluster.tick(5.0) == ["decode-0", "decode-1"]


def test_pools_of_sharing_workers_change_by_whole_groups() -> None:
    cluster = Cluster(sharing(60, starts=9), prefill=1, decode=4)
    cluster.tick()
    cluster.up()
    pools = cluster.core.pools
    with pytest.raises(ConfigError, match=r"^3 decode workers .* by decode\.dp=2: .* as 2 or 4$"):
        pools.scale({Role.DECODE: 3})
    with pytest.raises(ConfigError, match=r"^1 decode workers .* by decode\.dp=2: .* as 2$"):
        pools.add_some(Role.DECODE, 1)
    for name, role in (("decode-0", Role.PREFILL), ("prefill-0", Role.DECODE)):
        with pytest.raises(ConfigError, match="share their experts keep their role"):
            pools.change_role(WorkerName(name), role, empty=True)
    assert pools.add_some(Role.DECODE, 2) == ("decode-4", "decode-5")
    assert set(pools.scale({Role.DECODE: 4})) == {"decode-4", "decode-5"}, "those that don't serve yet"
    assert set(pools.scale({Role.DECODE: 2})) == {"decode-2", "decode-3"}
    with pytest.raises(ConfigError, match=r"^decode-1 is the last decode worker that stays; --force"):
        pools.restart(WorkerName("decode-1"), PAIR)
    pools.restart(WorkerName("decode-1"))
    rows = cluster.core.table.rows
    assert all(rows[WorkerName(name)].becomes is Role.DECODE for name in ("decode-0", "decode-1"))
    with pytest.raises(ConfigError, match="decode-0 restarts with decode-1, with which it shares its experts"):
        pools.undrain("decode-0")


def test_what_a_drain_has_left_of_a_group_is_scaled_away_first() -> None:
    cluster = Cluster(sharing(60, starts=9), prefill=1, decode=4)
    cluster.tick()
    cluster.up()
    cluster.core.pools.drain("decode-1")
    assert cluster.core.pools.scale({Role.DECODE: 2}) == ("decode-0",)


def test_workers_that_share_their_experts_wait_for_one_node_with_room_for_all_of_them() -> None:
    roles: dict[str, RoleRoom] = {Role.PREFILL: RoleRoom(10), Role.DECODE: RoleRoom(10, together=2)}
    small = NodeRoom(HERE, 20, roles=roles)
    cluster = Cluster(ClusterRoom((replace(small, memory=60),)), prefill=1, decode=2)
    cluster.core.set_room(ClusterRoom((small, replace(small, node=THERE, memory=10))))
    assert cluster.tick() == ["prefill-0"]
    cluster.up()
    assert cluster.tick() == [], "each of both nodes has room for one"
    why = "room for 2 decode workers that share their experts on a node (about 0 MiB at most)"
    assert cluster.waits() == {"decode-0": why, "decode-1": why}
    cluster.core.set_room(ClusterRoom((small, replace(small, node=THERE, memory=20))))
    assert cluster.tick() == ["decode-0", "decode-1"]
    assert {start.avoid for start in cluster.starting.values()} >= {(HERE.node_id,)}


def test_a_refused_restart_of_a_group_has_changed_none_of_it() -> None:
    cluster = Cluster(sharing(3, starts=9), prefill=1, decode=2)
    cluster.tick()
    cluster.up()
    pools, rows = cluster.core.pools, cluster.core.table.rows
    for name in ("decode-0", "decode-1"):
        pools.drain(name)
    _leave(cluster)
    pools.add_some(Role.PREFILL, 1)
    with pytest.raises(ConfigError, match="2 more decode workers would not fit, none would"):
        pools.restart(WorkerName("decode-0"))
    assert not any(rows[WorkerName(name)].wanted for name in ("decode-0", "decode-1"))
