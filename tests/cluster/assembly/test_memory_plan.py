"""Plans of pools: each kind of state by what it grows with, within the memory that there is."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool_sets import NAMES, pool_sets
from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolKind, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import host_counts
from twinpool.cluster.assembly.memory_plan import MemoryPlan, plan_memory, stride
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

MIB = 1 << 20
CONTEXT = 32_768
HYBRID = PoolSetSpec(
    16,
    (
        PoolSpec("full", (BufferSpec("k", 4, (4, 128), torch.bfloat16),)),
        PoolSpec("window", (BufferSpec("window_k", 20, (4, 128), torch.bfloat16),), PoolKind.WINDOW, 1024),
        PoolSpec(
            "state", (BufferSpec("recurrent", 8, (16, 128, 64), torch.float32, index=IndexSpace.SLOT),), PoolKind.STATE
        ),
    ),
)


def plan(budget: int, role: Role = Role.PREFILL, spec: PoolSetSpec = HYBRID, **sections: object) -> MemoryPlan:
    found = plan_memory(spec, config_of(**sections), role, CONTEXT, budget)
    assert found is not None
    return found


def config_of(**sections: object) -> Config:
    return config_from_dict(sections)


def test_where_memory_is_no_question_all_that_may_run_at_once_has_its_windows_and_states() -> None:
    for role, requests in ((Role.PREFILL, 32), (Role.DECODE, 64)):
        found = plan(1 << 40, role)
        assert found.positions == 8 * CONTEXT
        assert found.requests == requests
        hold = HYBRID.window_hold("window", stride(Config(), role))
        assert found.counts["window"] >= requests * hold
        assert found.counts["state"] >= requests


def test_windows_and_states_cost_what_requests_need_and_not_what_positions_would() -> None:
    even = HYBRID.even(8 * CONTEXT // 16)
    as_many = sum(HYBRID.unit_bytes(pool) * count for pool, count in even.items())
    assert plan(1 << 40, Role.DECODE).nbytes < as_many / 5


@pytest.mark.parametrize("budget", [60 * MIB, 300 * MIB, 1000 * MIB, 4000 * MIB])
@pytest.mark.parametrize("role", Role)
def test_in_short_memory_requests_and_positions_shrink_together_and_fill_it(role: Role, budget: int) -> None:
    found, all_of_it = plan(budget, role), plan(1 << 40, role)
    assert found.nbytes <= budget
    assert found.requests < all_of_it.requests
    assert found.nbytes > budget - 2 * HYBRID.page_bytes - MIB * 8 * 5 or found.requests == 1
    share, positions = found.requests / all_of_it.requests, found.positions / all_of_it.positions
    assert share <= positions + 1 / all_of_it.requests


def test_too_little_for_one_request_is_no_plan() -> None:
    assert plan_memory(HYBRID, Config(), Role.PREFILL, CONTEXT, 20 * MIB) is None


def test_what_the_configuration_says_is_taken_as_it_is() -> None:
    found = plan(1, cache={"device_tokens": 4096, "device_requests": 3})
    assert (found.positions, found.requests) == (4096, 3)
    assert found.counts["state"] == 3 * 5
    only_tokens = plan(200 * MIB, cache={"device_tokens": 16384})
    assert only_tokens.positions == 16384
    assert 1 <= only_tokens.requests < 32, "requests are what memory leaves room for"
    assert plan(1 << 40, cache={"device_tokens": 160}).requests == 10, "each has a page at least"


@pytest.mark.parametrize("name", NAMES)
def test_the_host_mirrors_the_device_within_its_bytes(name: str) -> None:
    spec = pool_sets()[name]
    like = {pool: 10 * (i + 1) for i, pool in enumerate(spec.by_name)}
    for nbytes in (20_000, 54_321, 1 << 20):
        counts = host_counts(spec, nbytes, like)
        used = sum(spec.unit_bytes(pool) * count for pool, count in counts.items())
        assert nbytes - spec.page_bytes < used <= nbytes
        if nbytes == 1 << 20:
            shares = [counts[pool] / count for pool, count in like.items()]
            assert max(shares) < 1.1 * min(shares)
    with pytest.raises(ConfigError, match="holds no page"):
        host_counts(spec, 2 * sum(map(spec.unit_bytes, spec.by_name)) - 1, like)
