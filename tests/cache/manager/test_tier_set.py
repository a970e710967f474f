"""Tiers below the device: a worker without host memory works as one whose host holds nothing."""

from __future__ import annotations

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.device.device_backends import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.memory_layout import LayoutOrder
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import CapacityError

SPEC = pool_sets()["full"]


def manager_with(host: bool) -> KVCacheManager:
    below = PoolSet(SPEC, {"full": 20}, order=LayoutOrder.PAGE_FIRST, tier="host") if host else None
    return KVCacheManager(PoolSet(SPEC, {"full": 20}), CpuDevice(), CacheConfig(), ManualClock().now, host=below)


@pytest.mark.parametrize("host", [True, False])
def test_a_request_runs_with_and_without_host_memory(host: bool) -> None:
    manager = manager_with(host)
    prefix = TokenPrefix.of(range(12), SPEC.page_tokens)
    assert manager.tiers.prefetcher.start(prefix) is None, "there is no storage"
    allocation = manager.prefixes.allocate(prefix, 13, "a request", reusable=3)
    assert allocation is not None
    manager.launch()
    manager.sealer.seal([(allocation, 12)])
    manager.sharing.cache_pages(allocation, prefix)
    assert manager.poll() == []
    assert manager.check() == []
    assert ("host_pages_used" in manager.stats()) is host
    assert manager.stats().get("pages_saved", 0) == 3 * host
    manager.table.free(allocation)
    assert not manager.busy
    manager.close()


def test_without_host_memory_nothing_is_swapped_out() -> None:
    manager = manager_with(False)
    allocation = manager.prefixes.allocate(TokenPrefix.of((), SPEC.page_tokens), 5, "a request", reusable=0)
    assert allocation is not None
    with pytest.raises(CapacityError, match=r"set cache\.host_bytes"):
        manager.swap_out.start(allocation, allocation.prefix, 4)
    assert len(manager.swap_out) == 0
    manager.table.free(allocation)
    assert manager.check() == []
