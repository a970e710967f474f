"""What workers get on nodes of different sizes: of their own node's cores and memory, with the weights counted."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from twinpool.cluster.assembly.memory_plan import MemoryPlan
from twinpool.cluster.assembly.node_shares import (
    CardFacts,
    MemoryShort,
    NodeFacts,
    NodeShare,
    by_machine,
    cores,
    free_bytes,
)
from twinpool.cluster.models import DEMO
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.cluster.serve.terminal import node_table, threads_of
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName

GIB = 1 << 30
MIB = 1 << 20
OTHER = 300 * MIB
"""What an interpreter with torch takes beside weights and pools, as the plan counts it."""


def prepared(*assignments: str, prefill: int = 4, decode: int = 4, ray: str | None = "auto") -> ServePlan:
    flags = ServeOptions(port=0, prefill=prefill, decode=decode, ray_address=ray, assignments=assignments)
    return prepare(flags, 64 * GIB)


def node(name: str, cores: int, free: int, prefill: int, decode: int) -> NodeFacts:
    return NodeFacts(name, cores, free, {Role.PREFILL: prefill, Role.DECODE: decode}, f"{name}-id")


def taken(share: NodeShare) -> int:
    """Bytes that all workers take that a node is planned for, counted from what each of them gets."""
    total = 0.0
    for role, count in share.workers.items():
        plan: MemoryPlan = share.plans[role]
        total += count * (sum(pool.nbytes for pool in plan.pools) + share.weights + OTHER + share.host_bytes[role])
    return int(total)


def test_threads_and_memory_are_worked_out_from_the_node_a_worker_is_on() -> None:
    """A small and a large one: nothing of the machine that serves counts."""
    cluster = replace(prepared(), weights=3 * GIB)
    small = cluster.divide(node("small", 4, 16 * GIB, prefill=1, decode=1))
    large = cluster.divide(node("large", 64, 256 * GIB, prefill=0, decode=4))
    assert (small.threads, large.threads) == (2, 16)
    assert small.workers == {Role.PREFILL: 1, Role.DECODE: 1}
    assert large.workers == {Role.PREFILL: 0, Role.DECODE: 4}
    for share in (small, large):
        assert taken(share) <= share.facts.free
    assert large.host_bytes[Role.DECODE] >= small.host_bytes[Role.DECODE]


@pytest.mark.parametrize(("cores", "threads", "found"), [(2, 0, "off"), (4, 0, "off"), (5, 0, "on"), (4, 1, "on")])
def test_workers_copy_on_threads_of_their_own_where_the_node_has_cores_left(
    cores: int, threads: int, found: str
) -> None:
    """Two workers of one rank; by default they divide the cores, and what can't be divided is left."""
    cluster = prepared(f"engine.threads={threads}", "engine.device=cpu", prefill=1, decode=1)
    share = cluster.divide(node("n", cores, 64 * GIB, 1, 1))
    told = share.sizes(Role.DECODE).applied_to(cluster.config, Role.DECODE)
    assert told.engine.copy_threads == found
    assert threads_of(share) == (f"{share.threads} + copies" if found == "on" else str(share.threads))
    share = replace(share, facts=replace(share.facts, cards=(CardFacts(0, "a GPU", GIB, GIB, 90, ()),)))
    assert threads_of(share) == str(share.threads), "a GPU needs none"


def test_a_node_with_more_places_than_there_are_workers_is_planned_for_the_workers() -> None:
    share = prepared(prefill=1, decode=2).divide(node("n", 12, 64 * GIB, 10_000, 10_000))
    assert share.workers == {Role.PREFILL: 1, Role.DECODE: 2}
    assert share.threads == 4


@pytest.mark.parametrize("ray", [None, "auto"])
def test_the_weights_of_every_worker_count_on_its_node_also_under_ray(ray: str | None) -> None:
    cluster = replace(prepared(prefill=2, decode=2, ray=ray), weights=3 * GIB)
    facts = node("n", 8, 11 * GIB, 2, 2)
    with pytest.raises(MemoryShort, match=r"4 workers need 3,072 MiB of weights each"):
        cluster.divide(facts)
    share = cluster.divide(replace(facts, places={Role.PREFILL: 1, Role.DECODE: 1}))
    assert taken(share) <= facts.free


def test_ranks_take_places_and_threads_each() -> None:
    cluster = prepared("decode.tp=2", prefill=2, decode=2)
    share = cluster.divide(node("n", 12, 64 * GIB, prefill=2, decode=5))
    assert share.workers == {Role.PREFILL: 2, Role.DECODE: 2}
    assert share.threads == 2
    fewer = cluster.divide(node("n", 12, 64 * GIB, prefill=2, decode=3))
    assert fewer.workers == {Role.PREFILL: 2, Role.DECODE: 1}, "a place is left over"


def test_more_processes_than_cores_take_are_refused_but_where_some_of_a_joined_ray_stay_away() -> None:
    cluster = prepared("cluster.workers_per_core=2", prefill=2, decode=3)
    facts = node("n", 2, 64 * GIB, 2, 3)
    assert cluster.divide(facts).workers == {Role.PREFILL: 2, Role.DECODE: 3}
    with pytest.raises(MemoryShort, match=r"^5 workers are 5 processes, and 2 cores take 4 "):
        cluster.divide(replace(facts, node_id=""))


@pytest.mark.parametrize("free", [2 * GIB, 4 * GIB, 9 * GIB, 64 * GIB])
@pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 1)])
def test_host_tiers_stay_within_the_nodes_budget_and_leave_weights_and_pools_their_room(
    free: int, counts: tuple[int, int]
) -> None:
    cluster = replace(prepared("cluster.host_pools=1000.0"), weights=100 * MIB)
    share = cluster.divide(node("n", 8, free, *counts))
    together = sum(share.workers[role] * share.host_bytes[role] for role in PAIR)
    assert 0.5 * share.host_budget < together <= share.host_budget <= free // 4
    assert taken(share) <= free
    # To each the same multiple of what its device holds.
    times = {role: share.host_bytes[role] / share.plans[role].nbytes for role in PAIR}
    assert times[Role.PREFILL] == pytest.approx(times[Role.DECODE], rel=1e-6)


def test_no_host_tier_is_larger_than_a_few_times_its_device_pools() -> None:
    share = prepared().divide(node("n", 8, 64 * GIB, 1, 1))
    for role in PAIR:
        assert share.host_bytes[role] == 4 * share.plans[role].nbytes


@pytest.mark.parametrize(
    ("assignments", "tiers"),
    [
        ((), True), (("cluster.host_memory_share=0",), False), (("cluster.host_memory_bytes=40000000",), True),
        (("cluster.host_memory_share=0", "cluster.host_memory_bytes=40000000"), True),
        (("cluster.host_memory_bytes=100",), False),
    ],
)  # fmt: skip
def test_the_host_tier_is_on_unless_it_is_turned_off_or_the_budget_holds_no_page(
    assignments: tuple[str, ...], tiers: bool
) -> None:
    share = prepared(*assignments).divide(node("n", 8, 8 * GIB, 1, 1))
    assert all(share.host_bytes.values()) == any(share.host_bytes.values()) == tiers
    for role in PAIR:
        config = share.sizes(role).applied_to(prepared().config, role)
        assert config.cache_for(role).host_bytes == share.host_bytes[role]
        assert config.engine.threads == share.threads


def test_a_host_tier_that_the_configuration_gives_a_worker_is_its_own_and_there_is_no_budget() -> None:
    share = prepared("decode.cache.host_bytes=9000000").divide(node("n", 8, 8 * GIB, 2, 2))
    assert share.host_bytes == {Role.PREFILL: 0, Role.DECODE: 9_000_000}
    assert share.host_budget == 0


def test_what_protects_is_on_by_default() -> None:
    cluster = prepared(prefill=1, decode=1, ray=None)
    config = cluster.here.sizes(Role.DECODE).applied_to(cluster.config, Role.DECODE)
    assert config.cache_for(Role.DECODE).host_bytes > 0
    assert config.cache_for(Role.DECODE).verify
    assert config.cache.arena == "auto"
    assert config.decode.retract == "auto"
    assert config.audit.fraction == 0.01


def test_a_worker_takes_the_sizes_of_the_node_that_it_has_landed_on() -> None:
    cluster = prepared()
    shares = [cluster.divide(node(name, many, many * GIB, 1, 1)) for name, many in (("small", 2), ("large", 32))]
    plan = WorkerPlan(
        WorkerName("decode-0"), Role.DECODE, Incarnation(1), Path("m"), cluster.config, {}, "", "", Path("logs"),
        by_node={share.facts.node_id: share.sizes(Role.DECODE) for share in shares},
    )  # fmt: skip
    for share in shares:
        on = plan.on(share.facts.node_id)
        assert on.config.engine.threads == share.threads
        assert on.counts == share.plans[Role.DECODE].counts
        assert on.config.cache_for(Role.DECODE).host_bytes == share.host_bytes[Role.DECODE]
        assert on.node_id == share.facts.node_id
    with pytest.raises(ConfigError, match="was not measured"):
        plan.on("of-a-node-that-joined-just-now")
    assert replace(plan, by_node={}).on("any").config == cluster.config


def test_a_worker_reads_its_model_for_the_context_that_is_set() -> None:
    config = config_from_dict({"engine": {"context": 512}})
    plan = WorkerPlan(
        WorkerName("decode-0"), Role.DECODE, Incarnation(1), DEMO, config, {}, "", "", Path("logs")
    )  # fmt: skip
    assert plan.read_spec().context == 512


def test_nodes_that_share_a_machine_share_its_cores_and_memory() -> None:
    one, two, alone = by_machine([
        node("here", 8, 16 * GIB, 1, 0), node("here", 8, 16 * GIB, 0, 2), node("there", 8, 16 * GIB, 1, 1)
    ])  # fmt: skip
    assert (one.cores, one.free) == (two.cores, two.free) == (4, 8 * GIB)
    assert (alone.cores, alone.free) == (8, 16 * GIB)


def test_serve_shows_the_budget_of_each_node_and_how_it_was_divided() -> None:
    cluster = prepared()
    shares = {
        "small-id": cluster.divide(node("small", 4, 4 * GIB, 1, 0)),
        "large-id": cluster.divide(node("large", 32, 64 * GIB, 0, 2)),
    }
    cluster = replace(cluster, shares=shares)
    out = io.StringIO()
    Console(file=out, width=80).print(node_table(cluster))
    text = out.getvalue()
    small, large = (next(line for line in text.splitlines() if line.strip().startswith(n)) for n in ("small", "large"))
    of_small = f"1 x {shares['small-id'].host_bytes[Role.PREFILL] / MIB:,.1f} MiB"
    of_large = f"2 x {shares['large-id'].host_bytes[Role.DECODE] / MIB:,.1f} MiB"
    for line, share, each in ((small, shares["small-id"], of_small), (large, shares["large-id"], of_large)):
        assert f"{share.host_budget / MIB:,.1f} MiB" in line
        assert each in line
    assert "…" not in text, "nothing is cut on a usual terminal"


def test_cores_and_memory_are_those_that_the_control_group_grants(tmp_path: Path) -> None:
    free, bound = free_bytes(tmp_path / "none"), cores(tmp_path / "none")
    assert 0 < free <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == bound
    (tmp_path / "memory.max").write_text(f"{3 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {MIB}\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert free_bytes(tmp_path) == 2 * MIB
    assert cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("99900000 100000\n")
    assert cores(tmp_path) == bound
