"""The memory of a node, counted term by term: what workers take together, what is left for pools, and the most of each.

Numbers are in the tests' own terms: bytes of a pool are its pages times what a page of it has, and each term is a power
of two of its own, so that none can stand in for another.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from twinpool.cache.arena.arena import max_index_bytes
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.cluster.assembly.memory_plan import MemoryPlan, StepMemory
from twinpool.cluster.assembly.node_shares import CardFacts, NodeFacts, NodeShare
from twinpool.cluster.serve.memory_fit import MemoryDemand, max_bytes, shared_weights
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Role

MIB, GIB = 1 << 20, 1 << 30
PROCESS, ON_CARDS = 300 * MIB, 2 * GIB
"""What a rank's process takes beside weights, pools and steps, as the pages of docs say."""
LAYERS, HEADS, WIDTH, PAGE = 2, 4, 64, 16
PAGE_BYTES = LAYERS * HEADS * WIDTH * 2 * PAGE
"""On each rank: these heads aren't sliced."""
SPEC = PoolSetSpec(PAGE, (PoolSpec("full", (BufferSpec("k", LAYERS, (HEADS, WIDTH), torch.bfloat16),)),))
CONTEXT = 1 << 22
"""Positions: pools take all that they may."""
WEIGHTS = 64 * MIB
STEPS = {Role.PREFILL: 3 * MIB, Role.DECODE: 5 * MIB}
"""Bytes of each rank's steps."""
RANKS = {Role.PREFILL: 1, Role.DECODE: 2}
WORKERS = {Role.PREFILL: 2, Role.DECODE: 3}
HOSTS = {Role.PREFILL: 16 * MIB, Role.DECODE: 32 * MIB}


def steps(nbytes: int) -> StepMemory:
    return StepMemory(nbytes, 0, 0, 0, 0, 0, rows=1)


def config(shares: str = "off", hosts: Mapping[Role, int] = {}, *, arena: str = "none", **cluster: object) -> Config:
    sections: dict[str, dict[str, object]] = {
        str(role): {"tp": RANKS[role], "cache": {"host_bytes": hosts.get(role, 0)}} for role in PAIR
    }
    return config_from_dict(
        sections | {"engine": {"share_weights": shares}, "cache": {"arena": arena}, "cluster": cluster}
    )


def demand(config: Config, free: int, workers: Mapping[Role, int] = WORKERS) -> MemoryDemand:
    sized = {role: steps(nbytes) for role, nbytes in STEPS.items()}
    return MemoryDemand(config, SPEC, CONTEXT, WEIGHTS, workers, free, sized)


def pool_bytes(plan: MemoryPlan, role: Role) -> int:
    return RANKS[role] * (plan.counts["full"] + 1) * PAGE_BYTES


def besides(role: Role, shares: str) -> int:
    """Bytes of a worker besides its pools and its host tier."""
    return RANKS[role] * (PROCESS + STEPS[role]) + (WEIGHTS if shares == "off" else 0)


@pytest.mark.parametrize(("shares", "copies"), [("off", 0), ("on", 2)])
def test_what_workers_take_together_is_the_sum_of_all_their_parts(shares: str, copies: int) -> None:
    """Weights that are shared are there once for each number of ranks."""
    asked = demand(config(shares, HOSTS), 64 * GIB)
    plans = asked.plans()
    assert plans is not None
    pools = {role: pool_bytes(plans[role], role) for role in PAIR}
    each = {role: pools[role] + besides(role, shares) + HOSTS[role] for role in PAIR}
    assert asked.need(plans) == sum(WORKERS[role] * each[role] for role in PAIR) + copies * WEIGHTS
    exactly = demand(config(shares, HOSTS), asked.need(plans))
    assert exactly.fits(plans)
    assert not demand(config(shares, HOSTS), asked.need(plans) - 1).fits(plans)


def test_weights_that_are_shared_are_counted_for_the_roles_that_have_workers() -> None:
    asked = demand(config("on"), 64 * GIB, {Role.PREFILL: 0, Role.DECODE: 1})
    plans = asked.plans()
    assert plans is not None
    pools = pool_bytes(plans[Role.DECODE], Role.DECODE)
    assert asked.need(plans) == pools + besides(Role.DECODE, "on") + WEIGHTS


def test_weights_that_are_shared_are_there_once_for_each_way_that_ranks_hold_experts() -> None:
    """Workers of two ranks each, of which one side's ranks hold whole experts."""
    needs = []
    for ep in (1, 2):
        decode = {"tp": 2, "ep": ep, "cache": {"host_bytes": 0}}
        sections = {"prefill": {"tp": 2, "cache": {"host_bytes": 0}}, "decode": decode}
        asked = demand(config_from_dict(sections | {"engine": {"share_weights": "on"}}), 64 * GIB)
        plans = asked.plans()
        assert plans is not None
        pools = sum(count * plans[role].nbytes for role, count in WORKERS.items())
        needs.append(asked.need(plans) - pools)
    assert needs[1] - needs[0] == WEIGHTS


def test_each_rank_has_an_index_of_its_own_part_of_a_host_tier_that_outlives_it() -> None:
    plain, indexed = (demand(config("off", HOSTS, arena=arena), 64 * GIB) for arena in ("none", "auto"))
    plans = plain.plans()
    assert plans is not None
    indices = {role: RANKS[role] * max_index_bytes(SPEC, HOSTS[role] // RANKS[role]) for role in PAIR}
    assert indexed.need(plans) - plain.need(plans) == sum(WORKERS[role] * indices[role] for role in PAIR)


@pytest.mark.parametrize("shares", ["off", "on"])
@pytest.mark.parametrize("hosts", [{}, HOSTS])
def test_pools_take_a_quarter_of_a_workers_part_and_no_more_than_its_other_parts_leave(
    shares: str, hosts: Mapping[Role, int]
) -> None:
    copies = 2 * WEIGHTS if shares == "on" else 0
    for part in (800 * MIB, 8 * GIB):
        plans = demand(config(shares, hosts), copies + 5 * part).plans()
        assert plans is not None
        for role in PAIR:
            left = part - besides(role, shares) - hosts.get(role, 0)
            most = min(part // 4, left)
            assert (most == left) == (part < GIB and role is Role.DECODE), "both bounds are met"
            assert most - RANKS[role] * PAGE_BYTES < plans[role].nbytes <= most


def test_host_tiers_take_what_is_wished_and_no_memory_that_workers_need() -> None:
    free = 16 * GIB
    asked = demand(config(host_memory_bytes=free), free)
    plans = asked.plans()
    assert plans is not None
    budget, tiers = asked.host_tiers(plans)
    assert budget == free - asked.need(plans)
    assert sum(WORKERS[role] * tiers[role] for role in PAIR) <= budget
    total = sum(WORKERS[role] * plans[role].nbytes for role in PAIR)
    for role in PAIR:
        two_pages = 2 * RANKS[role] * PAGE_BYTES
        for times, some in ((0.9, False), (2.2, True)):
            wished = int(times * two_pages * total / plans[role].nbytes)
            _, tiers = demand(config(host_memory_bytes=wished), free).host_tiers(plans)
            assert bool(tiers[role]) is some, (role, times)


def share(facts: NodeFacts) -> NodeShare:
    asked = demand(config(), 64 * GIB)
    plans = asked.plans()
    assert plans is not None
    return NodeShare(facts, WORKERS, 1, WEIGHTS, plans, 0, HOSTS, steps=asked.steps)


@pytest.mark.parametrize("shares", ["off", "on"])
def test_the_most_that_a_worker_takes_is_the_sum_of_its_parts(shares: str) -> None:
    """Those that it shares are left out, and are the node's."""
    on_cpu = share(NodeFacts("n", 8, 64 * GIB, WORKERS))
    card = CardFacts(0, "a GPU", 80 * GIB, 80 * GIB, 90, ())
    on_card = share(NodeFacts("n", 8, 64 * GIB, WORKERS, cards=(card,)))
    asked = config(shares)
    for role in PAIR:
        pools = pool_bytes(on_cpu.plans[role], role)
        assert max_bytes(on_cpu, asked, role) == pools + besides(role, shares) + HOSTS[role]
        assert max_bytes(on_card, asked, role) == RANKS[role] * ON_CARDS + HOSTS[role]
    assert shared_weights(on_cpu, asked) == (2 * WEIGHTS if shares == "on" else 0)
    assert shared_weights(on_card, asked) == 0, "they are on the card"
