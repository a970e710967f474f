"""Tiers below the device: a worker without host memory works as one whose host holds nothing."""

from __future__ import annotations

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import LayoutOrder
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import CapacityError

SPEC = pool_sets()["full"]


def manager_with(host: bool) -> KVCacheManager:
    memory = PoolSet(SPEC, {"full": 20}, order=LayoutOrder.PAGE_FIRST, tier="host") if host else None
    below = LowerTiers(memory)
    return KVCacheManager(PoolSet(SPEC, {"full": 20}), CpuDevice(), CacheConfig(), ManualClock().now, below=below)


@pytest.mark.parametrize("host", [True, False])
def test_a_request_runs_with_and_without_host_memory(host: bool) -> None:
    manager = manager_with(host)
    prefix = TokenPrefix.of(range(12), SPEC.page_tokens)
    assert manager.tiers.prefetcher.start(prefix) is None, "there is no storage"
    allocation = manager.allocations.allocate(prefix, 13, "a request", reusable=3)
    assert allocation is not None
    manager.launch()
    manager.finished.seal([(allocation, 12)])
    manager.finished.cache_pages(allocation, prefix)
    assert manager.poll() == []
    assert manager.check() == []
    assert ("host_pages_used" in manager.stats()) is host
    assert manager.stats().get("pages_saved", 0) == 3 * host
    manager.allocations.free(allocation)
    assert not manager.busy
    manager.close()


def test_without_host_memory_nothing_is_swapped_out() -> None:
    manager = manager_with(False)
    allocation = manager.allocations.allocate(TokenPrefix.of((), SPEC.page_tokens), 5, "a request", reusable=0)
    assert allocation is not None
    with pytest.raises(CapacityError, match=r"set cache\.host_bytes"):
        manager.swapped.swap_out(allocation, allocation.prefix, 4)
    assert len(manager.swapped) == 0
    manager.allocations.free(allocation)
    assert manager.check() == []


def test_when_the_manager_closes_every_allocation_is_freed() -> None:
    manager = manager_with(False)
    free = manager.pools.allocators["full"].free
    for first in range(3):
        prefix = TokenPrefix.of(range(first, 8), SPEC.page_tokens)
        assert manager.allocations.allocate(prefix, 8, f"request {first}", reusable=0) is not None
    assert manager.pools.allocators["full"].free < free
    manager.close()
    assert len(manager.allocations) == len(manager.tree.locks) == 0
    assert manager.pools.allocators["full"].free == free
