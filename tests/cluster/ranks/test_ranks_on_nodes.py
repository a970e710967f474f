"""Workers whose ranks may be on several nodes: where they are placed, what nodes have for them, and who drains them."""

from __future__ import annotations

import io
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.assembly.test_node_shares import GIB, node, prepared
from tests.cluster.router_stub import row
from twinpool.cli.operator.drain_command import DrainCommand
from twinpool.cli.operator.status_command import folded, status_table
from twinpool.cluster.assembly.node_shares import MemoryShort
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NOWHERE, ClusterRoom, NodePlace, NodeRoom, Occupant, RoleRoom
from twinpool.cluster.ray_nodes import worker_actor
from twinpool.cluster.ray_nodes.ray_facts import NodeDrains
from twinpool.cluster.serve.memory_fit import common_sizes
from twinpool.cluster.worker_process.worker_plan import WorkerPlan, rank_link_timeout_s
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import RankNode, WorkerLimits, WorkerRecord

OVER = "cluster.ranks_over_hosts=true"
MIB = 1 << 20
NAME = WorkerName("decode-0")
A, B, C = (NodePlace(letter * 12, f"host-{letter}") for letter in "abc")


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("assignments", "ray", "said"),
    [
        (("decode.pp=2", OVER), None, "is for a Ray of several machines: join it with --ray-address"),
        (("decode.pp=2", "decode.dp=2", OVER), "auto", "decode.dp=2: workers that share their experts are on one node"),
        (("decode.tp=2", "engine.share_weights=on", OVER), "auto", "doesn't go with engine.share_weights=on yet"),
        (("decode.tp=2", "engine.device=cuda", OVER), "auto", "is for CPUs so far: NCCL between hosts"),
    ],
)
def test_what_ranks_over_hosts_do_not_go_with_is_refused_by_name(
    assignments: tuple[str, ...], ray: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prepared(*assignments, ray=ray)


def test_workers_of_one_rank_are_as_without() -> None:
    assert not prepared(OVER, ray=None).config.over_hosts(Role.DECODE)


def test_a_link_between_ranks_is_cut_well_before_the_lease_ends() -> None:
    for lease_s, link_s, found in ((10.0, 30.0, 5.0), (10.0, 2.0, 2.0)):
        config = config_from_dict({"cluster": {"lease_s": lease_s}, "transfer": {"link_timeout_s": link_s}})
        assert rank_link_timeout_s(config) == found


# ---------------------------------------------------------------- what a node is divided for


def test_a_worker_that_no_node_has_room_for_fits_on_two() -> None:
    """Weights of 12 GiB, on nodes of 10."""
    facts = node("n", 4, 10 * GIB, prefill=0, decode=1)
    alone = replace(prepared("decode.tp=2", prefill=1, decode=1), weights=12 * GIB)
    with pytest.raises(MemoryShort):
        alone.divide(replace(facts, places={Role.PREFILL: 0, Role.DECODE: 2}))
    spread = replace(prepared("decode.tp=2", OVER, prefill=1, decode=1), weights=12 * GIB)
    share = spread.divide(facts)
    assert share.workers == {Role.PREFILL: 0, Role.DECODE: 0.5}
    assert (share.plans[Role.DECODE].nbytes + share.host_bytes[Role.DECODE]) / 2 + 6 * GIB <= facts.free
    with pytest.raises(MemoryShort, match=r"0.5 workers need"):
        replace(spread, weights=24 * GIB).divide(facts)


def test_of_stages_the_largest_counts_on_every_node() -> None:
    share = prepared("decode.pp=2", OVER, prefill=1, decode=1).divide(node("n", 4, 10 * GIB, prefill=0, decode=1))
    assert share.largest[Role.DECODE] > 1.0, "the first stage has the embedding, too"


def test_all_ranks_have_the_pools_of_the_node_that_has_least() -> None:
    cluster = prepared("decode.tp=2", OVER, prefill=1, decode=1)
    small, large = (
        cluster.divide(node(name, 4, free * MIB, prefill=0, decode=1)) for name, free in (("s", 320), ("l", 4000))
    )
    none = cluster.divide(node("none", 4, 4000 * MIB, prefill=0, decode=0))
    found = common_sizes({"s": small, "l": large, "none": none}, Role.DECODE)
    least = small.sizes(Role.DECODE)
    assert least.counts != large.sizes(Role.DECODE).counts
    for one in found.values():
        assert (one.counts, one.host_bytes) == (least.counts, least.host_bytes)


# ---------------------------------------------------------------- room


def room_of(place: NodePlace, places: int, memory: int = 1000) -> NodeRoom:
    return NodeRoom(
        place, memory * MIB, 100, 2, {Role.DECODE: RoleRoom(200 * MIB, ranks=2, places=places, over_hosts=True)}
    )


def decodes(count: int, node: NodePlace = NOWHERE, *others: NodePlace, only: str = "") -> list[Occupant]:
    return [Occupant(WorkerName(f"decode-{n}"), Role.DECODE, node, only, others=others) for n in range(count)]


def test_ranks_fit_on_several_nodes_where_no_node_has_places_for_all() -> None:
    cluster = ClusterRoom((room_of(A, 1), room_of(B, 1), room_of(C, 1)))
    assert cluster.refusal((), decodes(1)) == ""
    assert "2 more decode workers would not fit, 1 would" in cluster.refusal((), decodes(2))
    assert "none would" in cluster.refusal((), decodes(1, only=A.host)), "one node has one place"
    assert [one.node for one in cluster.nodes_for((), decodes(1))] == [A, B, C]
    held = decodes(1, A, B)
    assert "none would" in cluster.refusal(held, decodes(1)), "one place is left, on the third"
    assert cluster.nodes_for(held, decodes(1)) == []


def test_ranks_take_the_memory_of_their_own_nodes() -> None:
    cluster = ClusterRoom((room_of(A, 9, memory=100), room_of(B, 9, memory=300)))
    assert [one.node for one in cluster.nodes_for((), decodes(1))] == [B], "one node has room for all of it"
    assert [one.node for one in cluster.nodes_for(decodes(1, B, B), decodes(1))] == [A, B]
    assert [one.node for one in cluster.nodes_for(decodes(1, A, B), decodes(1))] == [B], "two of its three are left"


# ---------------------------------------------------------------- placement


def plan_of(**cluster: Any) -> WorkerPlan:
    config = config_from_dict({"decode": {"tp": 2}, "cluster": cluster})
    return WorkerPlan(NAME, Role.DECODE, Incarnation(1), Path("m"), config, {}, "", "", Path("logs"))


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("over", "free", "taken", "strategies"),
    [
        (True, {"a": 1, "b": 1}, True, ["PACK"]),
        (True, {"a": 1, "b": 2}, True, ["STRICT_PACK"]),
        (True, {"a": 1, "b": 2}, False, ["STRICT_PACK", "PACK"]),  # Another has taken it meanwhile.
        (True, {}, True, ["PACK"]),
        (False, {"a": 1, "b": 1}, False, ["STRICT_PACK"]),
    ],
)
def test_ranks_are_packed_on_a_node_that_has_places_for_all_and_spread_else(
    monkeypatch: pytest.MonkeyPatch, over: bool, free: dict[str, float], taken: bool, strategies: list[str]
) -> None:
    asked: list[str] = []
    removed: list[Any] = []

    def placement_group(bundles: Any, *, strategy: str, **_: Any) -> Any:
        assert bundles == [{"twinpool_decode": 1.0}] * 2
        asked.append(strategy)
        return types.SimpleNamespace(strategy=strategy, wait=lambda within_s: taken)

    monkeypatch.setattr(worker_actor, "placement_group", placement_group)
    monkeypatch.setattr(worker_actor, "remove_placement_group", removed.append)
    group = worker_actor.places_for_ranks(plan_of(ranks_over_hosts=over), 2, {}, kept=False, free=free)
    assert asked == strategies
    assert group.strategy == strategies[-1]
    assert [one.strategy for one in removed] == strategies[:-1]


@pytest.mark.slow
def test_places_are_counted_on_the_nodes_that_the_worker_may_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray._private.state

    there = {"a": {"twinpool_decode": 3.0}, "b": {"CPU": 4.0}, "c": {"twinpool_decode": 5.0}}
    monkeypatch.setattr(ray._private.state, "state", types.SimpleNamespace(available_resources_per_node=lambda: there))
    assert worker_actor.free_places(plan_of(), {"a", "b"}) == {"a": 3.0, "b": 0.0}


@pytest.mark.slow
def test_a_place_of_another_role_is_taken_on_the_node_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(worker_actor, "placement_group", lambda bundles, **options: asked.append(options))
    for nodes in (["a", "b"], ["a", "a"]):
        worker_actor.take_places((NAME, Incarnation(2)), {"twinpool_prefill": 1.0}, nodes, kept=False)
    assert [one["strategy"] for one in asked] == ["PACK", "STRICT_PACK"]
    assert [list(label.values()) for label in asked[0]["bundle_label_selector"]] == [["a"], ["b"]]


# ---------------------------------------------------------------- the controller


class Cluster:
    """A controller with one worker, which has been placed on two nodes."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self.core = Controller(ManualClock(), ClusterConfig(), self.ledger)
        self.core.set_nodes([A, B, C])
        self.core.pools.add(NAME, Role.DECODE)
        self.start = self.begun()

    def begun(self) -> StartWorker:
        (start,) = [action for action in self.core.tick() if isinstance(action, StartWorker)]
        self.core.placed(NAME, start.incarnation, A, (B,))
        return start

    def ready(self) -> None:
        nodes = (RankNode(B.host, B.node_id),)
        record = WorkerRecord(
            NAME, Role.DECODE, self.start.incarnation, 7, A.host, "e", "c", WorkerLimits(1, 1), A.node_id,
            rank_nodes=nodes,
        )  # fmt: skip
        assert not self.core.register(record).fenced

    def state(self) -> str:
        (view,) = self.core.views()
        return str(view.status.state)


@pytest.mark.parametrize("target", [B.host, B.node_id, A.host])
def test_d1_a_node_that_is_drained_drains_the_workers_that_have_any_rank_there(target: str) -> None:
    cluster = Cluster()
    cluster.ready()
    assert cluster.core.pools.drain(target) == (NAME,)


def test_nobody_else_s_node_drains_a_worker() -> None:
    cluster = Cluster()
    cluster.ready()
    assert cluster.core.pools.drain(C.host) == ()
    (view,) = cluster.core.views()
    assert not view.cordoned


def test_c7_a_worker_that_starts_with_a_rank_on_a_cordoned_node_starts_elsewhere() -> None:
    cluster = Cluster()
    assert cluster.core.pools.cordon(B.host) == (NAME,), "it was starting there"
    second = [action for action in cluster.core.tick() if isinstance(action, StartWorker)]
    assert [one.avoid for one in second] in ([(B.host,)], [])
    late = Cluster()
    late.core.pools.cordon(C.host)
    late.core.placed(NAME, late.start.incarnation, A, (C,))
    assert late.state() == "dead", "Ray has placed it before it heard of the cordon"


def test_ray_drains_a_node_of_a_follower() -> None:
    cluster = Cluster()
    cluster.ready()
    drains = NodeDrains(lambda: {})
    drains._nodes = {B.node_id: 0}
    assert drains.due(cluster.core.views()) == [B.node_id]


# ---------------------------------------------------------------- commands


def spread_row(name: str = "decode-0", **changes: Any) -> dict[str, Any]:
    return row(name, node=A.host, node_id=A.node_id, rank_nodes=[[B.host, B.node_id], [B.host, B.node_id]], **changes)


def test_status_shows_the_nodes_of_a_worker_and_folds_none_that_are_elsewhere() -> None:
    from rich.console import Console

    shown = io.StringIO()
    Console(file=shown, width=200).print(status_table([spread_row()]))
    assert "host-a, host-b" in shown.getvalue()
    many = [spread_row(name=f"decode-{n}") for n in range(40)]
    one = row("decode-40", node=A.host, node_id=A.node_id)
    assert [len(part) for part in folded([*many, one])] == [40, 1]


def test_a_drain_of_a_followers_node_follows_the_worker() -> None:
    class Router:
        def __init__(self) -> None:
            self.looks = [[spread_row(state="draining")], [spread_row(state="left")]]

        def call(self, method: str, path: str) -> dict[str, Any]:
            return {"is_node": True, "workers": []}

        def rows(self) -> list[dict[str, Any]]:
            return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

        def clock(self) -> float:
            return 0.0

        def sleep(self, seconds: float) -> None: ...

    report = DrainCommand(Router(), B.host, force=False, timeout_s=60.0).run()  # type: ignore[arg-type]
    assert [one.name for one in report.workers] == ["decode-0"]
    assert report.left
