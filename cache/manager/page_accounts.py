"""Accounts of a pool set: pages and slots in use, compared with the sum of what known owners hold."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.cache.pool.pool_set import PoolSet


def unaccounted(pools: PoolSet, held: Mapping[str, int], tier: str = "") -> list[str]:
    """Return a line for each pool where the number in use isn't `held`; `tier` is a word for these lines."""
    found = []
    for pool, allocator in pools.allocators.items():
        used = allocator.total - allocator.free - allocator.quarantined
        if used != held[pool]:
            name = f"{tier} {pool}" if tier else pool
            found.append(f"{name} pages: {used} in use, {held[pool]} accounted for")
    return found
