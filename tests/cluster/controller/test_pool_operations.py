"""Pools that grow, shrink and are renewed: by the controller's logic, against workers that obey it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.cluster.controller import pool_operations
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import KillWorker, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.controller.wanted_worker import WorkerState
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.pool_changes import LoadAdapter, UnloadAdapter
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.sampling_params import AdapterRef

A, B = NodePlace("a" * 12, "a"), NodePlace("b" * 12, "b")


class Company:
    """A controller whose starts succeed at once, and whose workers do what grants tell them."""

    def __init__(self, **pools: int) -> None:
        self.clock, self.ledger = ManualClock(), MemoryLedger()
        self.core = Controller(self.clock, ClusterConfig(), self.ledger)
        self.core.set_nodes([A, B])
        self.starts: list[StartWorker] = []
        self.killed: list[str] = []
        self.serving: dict[WorkerName, tuple[Role, Incarnation]] = {}
        self.draining: set[WorkerName] = set()
        for role, count in pools.items():
            self.core.pools.add_some(Role(role), count)
        self.settle()

    def order(self, start: StartWorker) -> None:
        node = next(n for n in (A, B) if not start.only or n.named(start.only))
        role, name, number = start.role, start.name, start.incarnation
        fits = WorkerLimits(8, 8)
        grant = self.core.register(WorkerRecord(name, role, number, 7, node.host, "", "", fits, node.node_id))
        if not grant.fenced:
            self.serving[name] = role, number

    def settle(self) -> None:
        """Rounds of starts and heartbeats until nothing changes any more."""
        for _ in range(8):
            self.clock.advance(0.1)
            for action in self.core.tick():
                if isinstance(action, StartWorker):
                    self.starts.append(action)
                    self.order(action)
                if isinstance(action, KillWorker):
                    self.killed.append(action.name)
            for name, (role, number) in list(self.serving.items()):
                state = "draining" if name in self.draining else "ready"
                grant = self.core.renew(name, number, WorkerStatus(name, role, state, 7, "", number, 0, 0, 1, 1))
                if name in self.draining:
                    self.core.leave(name, number)
                    self.draining.discard(name)
                    del self.serving[name]
                elif grant.drain:
                    self.draining.add(name)

    def pool(self, role: Role) -> list[str]:
        return sorted(name for name, (one, _) in self.serving.items() if one is role)


def test_a_pool_grows_by_the_lowest_numbers_that_are_free() -> None:
    company = Company(prefill=1, decode=1)
    assert company.core.pools.add_some(Role.DECODE, 2) == ("decode-1", "decode-2")
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-0", "decode-1", "decode-2"]
    company.core.pools.drain("decode-1")
    company.settle()
    assert company.core.pools.add_some(Role.DECODE, 2) == ("decode-1", "decode-3")
    company.settle()
    assert company.serving[WorkerName("decode-1")] == (Role.DECODE, 2), "one new start is a new incarnation"


def test_a_pool_shrinks_by_drain_from_the_highest_number() -> None:
    company = Company(prefill=2, decode=3)
    assert company.core.pools.scale({Role.DECODE: 1, Role.PREFILL: 3}) == ("decode-2", "decode-1", "prefill-2")
    assert company.killed == []
    company.settle()
    assert (company.pool(Role.DECODE), company.pool(Role.PREFILL)) == (
        ["decode-0"],
        ["prefill-0", "prefill-1", "prefill-2"],
    )
    assert company.killed == [], "they left by themselves"
    assert company.core.pools.scale({Role.DECODE: 1}) == ()
    assert company.core.pools.scale({Role.DECODE: 3}) == ("decode-1", "decode-2")
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-0", "decode-1", "decode-2"]


@pytest.mark.parametrize("told", ["to restart", "to change its role"])
def test_who_was_told_to_come_back_and_is_then_sent_away_does_not_come_back(told: str) -> None:
    company = Company(prefill=3, decode=2)
    if told == "to restart":
        name = WorkerName("decode-1")
        company.core.pools.restart(name)
        assert company.core.pools.scale({Role.DECODE: 1}) == (name,)
    else:
        name = WorkerName("prefill-2")
        company.core.pools.change_role(name, Role.DECODE)
        assert company.core.pools.scale({Role.DECODE: 2}) == (name,)
    begun = len(company.starts)
    company.settle()
    assert company.starts[begun:] == []
    assert name not in company.serving
    assert company.core.table.rows[name].state is WorkerState.LEFT


def test_a_pool_that_shrinks_lets_go_first_of_those_that_do_not_serve_yet() -> None:
    company = Company(prefill=1, decode=1)
    company.core.pools.add_some(Role.DECODE, 1)
    (start,) = [a for a in company.core.tick() if isinstance(a, StartWorker)]
    assert company.core.pools.scale({Role.DECODE: 1}) == ("decode-1",)
    assert [a.name for a in company.core.tick() if isinstance(a, KillWorker)] == ["decode-1"]
    fits = WorkerLimits(8, 8)
    assert company.core.register(WorkerRecord(start.name, start.role, start.incarnation, 7, "a", "", "", fits)).fenced
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-0"]


@pytest.mark.parametrize("how", ["died", "added while nobody starts workers"])
def test_one_that_does_not_run_and_is_wanted_no_more_has_left_and_can_come_back(how: str) -> None:
    """A worker that is shown as dead is one to look after."""
    company = Company(prefill=1, decode=2)
    core, name, notes = company.core, WorkerName("decode-1" if how == "died" else "decode-2"), list[str]()
    core.table.on_note(notes.append)
    if how == "died":
        core.died(name, company.serving.pop(name)[1], "killed")
    else:
        core.detach()
        core.pools.add_some(Role.DECODE, 1)
    before = len(company.starts)
    kept = {Role.DECODE: 1 if how == "died" else 2}
    assert core.pools.scale(kept) == (name,)
    core.attach([(name, number) for name, (_, number) in company.serving.items()])
    company.settle()
    assert {view.record.name: view.status.state for view in core.views()}[name] == "left"
    assert len(company.starts) == before
    assert f"{name} isn't started: its pool has enough workers" in notes
    core.pools.scale({Role.DECODE: kept[Role.DECODE] + 1})
    company.settle()
    assert name in company.serving


def test_workers_that_leave_already_are_not_counted_and_not_told_twice() -> None:
    company = Company(prefill=1, decode=3)
    company.core.pools.drain("decode-0")
    assert company.core.pools.scale({Role.DECODE: 2}) == ()
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-1", "decode-2"]


def test_a_worker_that_changes_its_role_counts_where_it_goes() -> None:
    company = Company(prefill=2, decode=2)
    company.core.pools.change_role(WorkerName("decode-1"), Role.PREFILL)
    assert company.core.pools.scale({Role.DECODE: 1, Role.PREFILL: 3}) == ()
    company.settle()
    assert company.pool(Role.PREFILL) == ["decode-1", "prefill-0", "prefill-1"]
    assert company.core.pools.add_some(Role.DECODE, 1) == ("decode-2",), "decode-1 is another worker's name"


@pytest.mark.parametrize("other", ["changes its role", "drains", "is scaled away", "has left", "is dead"])
def test_the_last_worker_of_a_role_is_not_drained_where_the_role_is_to_be_kept(other: str) -> None:
    """Two orders that come by two routers, neither of which knows yet of the other's."""
    company = Company(prefill=1, decode=2)
    pools, first, last = company.core.pools, WorkerName("decode-1"), WorkerName("decode-0")
    both = [Role.PREFILL, Role.DECODE]
    match other:
        case "changes its role":
            pools.change_role(first, Role.PREFILL)
        case "drains":
            assert pools.drain(first, both) == (first,)
        case "is scaled away":
            pools.scale({Role.DECODE: 1})
        case "has left":
            pools.drain(first)
            company.settle()
        case _:
            row = company.core.table.rows[first]
            row.state, row.wanted = WorkerState.DEAD, False
    with pytest.raises(ConfigError, match="decode-0 is the last decode worker that stays; --force"):
        pools.drain(last, both)
    assert not company.core.table.rows[last].drains
    assert pools.drain(last, [Role.PREFILL]) == (last,), "where decode isn't needed"


def test_a_worker_that_is_to_come_back_stays_for_its_role() -> None:
    company = Company(prefill=1, decode=2)
    pools = company.core.pools
    pools.restart(WorkerName("decode-1"))
    assert pools.drain(WorkerName("decode-0"), [Role.DECODE]) == ("decode-0",)


def test_a_node_with_the_last_worker_of_a_role_is_not_drained_nor_cordoned() -> None:
    company = Company(prefill=1, decode=2)
    (node,) = {row.node.host for row in company.core.table.rows.values()}
    with pytest.raises(ConfigError, match=f"{node} has the last decode worker that stays"):
        company.core.pools.drain(node, [Role.PREFILL, Role.DECODE])
    assert company.core.table.nodes.free(node)
    assert not any(row.drains for row in company.core.table.rows.values())
    assert len(company.core.pools.drain(node)) == 3


@pytest.mark.parametrize("other", ["changes its role", "drains", "is scaled away"])
def test_the_last_worker_that_has_a_role_or_is_to_have_it_keeps_it(other: str) -> None:
    """Two orders that come by two routers, neither of which knows yet of the other's."""
    company = Company(prefill=1, decode=2)
    pools, first, last = company.core.pools, WorkerName("decode-1"), WorkerName("decode-0")
    match other:
        case "changes its role":
            pools.change_role(first, Role.PREFILL)
        case "drains":
            pools.drain(first)
        case _:
            pools.scale({Role.DECODE: 1})
    with pytest.raises(ConfigError, match="decode-0 is the last decode worker that stays; --force"):
        pools.change_role(last, Role.PREFILL)
    company.settle()
    assert company.serving[last][0] is Role.DECODE
    with pytest.raises(ConfigError, match="the last decode worker"):
        pools.change_role(last, Role.PREFILL)
    pools.change_role(last, Role.PREFILL, empty=True)
    company.settle()
    assert company.serving[last][0] is Role.PREFILL


def test_a_role_may_be_left_to_a_worker_that_comes_back_or_changes_to_it() -> None:
    company = Company(prefill=2, decode=1)
    pools = company.core.pools
    pools.change_role(WorkerName("prefill-1"), Role.DECODE)
    pools.change_role(WorkerName("decode-0"), Role.PREFILL)
    company.settle()
    assert {name: role for name, (role, _) in company.serving.items()} == {
        "prefill-0": Role.PREFILL, "prefill-1": Role.DECODE, "decode-0": Role.PREFILL
    }  # fmt: skip
    pools.restart(WorkerName("decode-0"))
    pools.change_role(WorkerName("prefill-0"), Role.DECODE)
    company.settle()
    assert company.serving[WorkerName("decode-0")][0] is Role.PREFILL


def test_a_worker_is_restarted_by_drain_and_comes_back_as_its_next_incarnation() -> None:
    company = Company(prefill=1, decode=2)
    company.core.pools.restart(WorkerName("decode-1"))
    company.settle()
    assert company.serving[WorkerName("decode-1")] == (Role.DECODE, 2)
    assert company.killed == []
    company.core.pools.drain("decode-1")
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-0"]
    company.core.pools.restart(WorkerName("decode-1"))
    company.settle()
    assert company.serving[WorkerName("decode-1")] == (Role.DECODE, 3)


def test_a_worker_that_is_told_to_restart_while_it_leaves_comes_back() -> None:
    company = Company(prefill=1, decode=2)
    name = WorkerName("decode-1")
    company.core.pools.drain(name)
    status = WorkerStatus(name, Role.DECODE, "draining", 7, "", Incarnation(1), 0, 0, 1, 1)
    company.core.renew(name, Incarnation(1), status)
    company.core.pools.restart(name)
    company.core.leave(name, Incarnation(1))
    del company.serving[name]
    company.settle()
    assert company.serving[name] == (Role.DECODE, 2)


def test_a_worker_that_dies_while_it_drains_to_restart_is_started_again() -> None:
    company = Company(prefill=1, decode=2)
    name = WorkerName("decode-1")
    company.core.pools.restart(name)
    status = WorkerStatus(name, Role.DECODE, "draining", 7, "", Incarnation(1), 0, 0, 1, 1)
    company.core.renew(name, Incarnation(1), status)
    company.core.died(name, Incarnation(1), "killed")
    del company.serving[name]
    company.settle()
    assert company.serving[name] == (Role.DECODE, 2)


def test_a_worker_is_added_to_one_node_and_waits_for_it() -> None:
    company = Company(prefill=1, decode=1)
    assert company.core.pools.add_some(Role.DECODE, 1, "b") == ("decode-1",)
    company.settle()
    assert company.starts[-1].only == "b"
    assert company.core.table.rows[WorkerName("decode-1")].node == B
    company.core.pools.cordon("b")
    company.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    del company.serving[WorkerName("decode-1")]
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-0"], "it is not started elsewhere"
    company.core.pools.uncordon("b")
    company.settle()
    assert company.serving[WorkerName("decode-1")] == (Role.DECODE, 2)
    company.core.pools.drain("decode-1")
    company.settle()
    for node in ("", "b"):
        assert company.core.pools.add_some(Role.DECODE, 1, node) == ("decode-1",)
        company.settle()
        assert company.starts[-1].only == node, "where it was is over once it is added anew"
        company.core.pools.drain("decode-1")
        company.settle()


def test_a_cordon_leaves_who_serves_and_moves_who_starts() -> None:
    company = Company(prefill=1, decode=2)
    assert company.core.pools.cordon("a") == ()
    company.settle()
    assert company.pool(Role.DECODE) == ["decode-0", "decode-1"]
    company.core.pools.uncordon("a")
    company.core.died(WorkerName("decode-1"), Incarnation(1), "killed")
    (start,) = [a for a in company.core.tick() if isinstance(a, StartWorker)]
    company.core.placed(start.name, start.incarnation, A)
    assert company.core.pools.cordon("a") == ("decode-1",)
    actions = company.core.tick()
    assert [a.avoid for a in actions if isinstance(a, StartWorker)] == [("a",)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pools: pools.scale({Role.DECODE: 0}), "each role needs a worker"),
        (lambda pools: pools.scale({Role.DECODE: 5000}), "the most"),
        (lambda pools: pools.scale({Role.COLOCATED: 1}), "can't have colocated workers"),
        (lambda pools: pools.add_some(Role.COLOCATED, 1), "can't have colocated workers"),
        (lambda pools: pools.add_some(Role.DECODE, 0), "at least 1"),
        (lambda pools: pools.add_some(Role.DECODE, 1, "c"), "no node is named 'c'; nodes: a, b"),
        (lambda pools: pools.restart(WorkerName("decode-9")), "workers: decode-0, prefill-0"),
        (lambda pools: pools.cordon("decode-0"), "no worker or node is named 'decode-0'"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(change: object, words: str) -> None:
    company = Company(prefill=1, decode=1)
    before = dict(company.ledger.rows)
    with pytest.raises(ConfigError, match=words):
        change(company.core.pools)  # type: ignore[operator]
    assert company.ledger.rows == before


@pytest.mark.parametrize(
    "change",
    [
        lambda pools: pools.add_some(Role.DECODE, 5),
        lambda pools: pools.scale({Role.PREFILL: 3, Role.DECODE: 3}),
        lambda pools: pools.scale({Role.PREFILL: 1, Role.DECODE: 5}),
    ],
    ids=["add", "one pool would fit and the other not", "one pool shrinks and the other doesn't fit"],
)
def test_what_is_more_than_the_table_holds_is_refused_whole(change: object, monkeypatch: pytest.MonkeyPatch) -> None:
    company = Company(prefill=2, decode=1)
    monkeypatch.setattr("twinpool.cluster.controller.pool_operations.MAX_WORKERS", 5)
    before = dict(company.ledger.rows)
    with pytest.raises(ConfigError, match="room for 2 new names, not for"):
        change(company.core.pools)  # type: ignore[operator]
    assert (company.ledger.rows, [a for a in company.core.tick() if isinstance(a, StartWorker)]) == (before, [])
    company.core.pools.scale({Role.PREFILL: 3, Role.DECODE: 2})  # As many as there is room for.


@pytest.mark.parametrize("how", ["scaled away", "drained", "its node is drained"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "and its controller is started again"])
def test_one_that_dies_before_it_has_heard_that_it_is_to_leave_has_left(how: str, *, restarted: bool) -> None:
    company = Company(prefill=1, decode=2)
    core, name = company.core, WorkerName("decode-1")
    match how:
        case "scaled away":
            assert core.pools.scale({Role.DECODE: 1}) == (name,)
        case "drained":
            assert core.pools.drain(name) == (name,)
        case _:
            assert name in core.pools.drain("a")
    if restarted:
        core = company.core = Controller(company.clock, ClusterConfig(), company.ledger)
        core.set_nodes([A, B])
    notes = list[str]()
    core.table.on_note(notes.append)
    core.died(name, company.serving.pop(name)[1], "out of memory")
    assert any("decode-1 died (out of memory); it was draining and is not restarted" in note for note in notes)
    before = len(company.starts)
    company.settle()
    assert [start.name for start in company.starts[before:]] == []
    core.pools.undrain(name)
    if core.table.nodes.cordoned(A):
        core.pools.uncordon("a")
    company.settle()
    assert name in company.serving, "an operator has it back"


def test_a_pool_is_emptied_where_that_is_said() -> None:
    company = Company(prefill=1, decode=2)
    company.core.pools.scale({Role.DECODE: 0}, empty=True)
    company.settle()
    assert company.pool(Role.DECODE) == []


@given(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6), restarts=st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_is_asked_for_in_turn_is_there_in_the_end_and_nobody_was_killed(
    sizes: list[tuple[int, int]], restarts: bool
) -> None:
    """Also when a controller that was started again carries on in the middle."""
    company = Company(prefill=2, decode=2)
    for prefill, decode in sizes:
        company.core.pools.scale({Role.PREFILL: prefill, Role.DECODE: decode})
        if restarts:
            company.core = Controller(company.clock, ClusterConfig(), company.ledger)
            company.core.set_nodes([A, B])
    company.settle()
    assert (len(company.pool(Role.PREFILL)), len(company.pool(Role.DECODE))) == sizes[-1]
    ended_starts = {start.name for start in company.starts} - company.serving.keys()
    assert set(company.killed) <= ended_starts


def test_adapters_are_served_by_name_until_they_are_dropped_and_outlive_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_operations, "MAX_ADAPTERS", 2)
    ledger = MemoryLedger()

    def controller() -> Controller:
        return Controller(ManualClock(), ClusterConfig(), ledger)

    def adapter(name: str, digest: str) -> AdapterRef:
        return AdapterRef(name, digest, f"/adapters/{name}")

    core = controller()
    for change in (
        LoadAdapter(adapter("a", "1")),
        LoadAdapter(adapter("a", "1")),
        LoadAdapter(adapter("b", "2")),
        LoadAdapter(adapter("b", "2")),
        LoadAdapter(adapter("b", "3"), replace=True),
    ):
        before = core.version
        core.pools.make(change)
        assert core.version > before, "routers are told"
    for refused, words in (
        (LoadAdapter(adapter("a", "9")), "another adapter is served as a"),
        (LoadAdapter(adapter("c", "9"), replace=True), "2 adapters are served already"),
        (UnloadAdapter("c"), "no adapter is served as 'c'"),
    ):
        with pytest.raises(ConfigError, match=words):
            core.pools.make(refused)
    assert controller().table.adapters == {"a": adapter("a", "1"), "b": adapter("b", "3")}
    core.pools.make(UnloadAdapter("a"))
    core.pools.make(LoadAdapter(adapter("c", "9")))
    assert set(controller().table.adapters) == {"b", "c"}
