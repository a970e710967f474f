"""Prefix allocation: state for prompts that this worker computes, the prefix from the tiers, the rest leased."""

from __future__ import annotations

from twinpool.cache.allocation.allocation import Allocation, CachedTokens, page_digests
from twinpool.cache.allocation.block_table import PageRun
from twinpool.cache.manager.absent_tiers import NoPrefetcher
from twinpool.cache.manager.allocation_table import AllocationTable
from twinpool.cache.manager.pages.load_planner import LoadPlanner
from twinpool.cache.manager.pages.page_supply import PageSupply
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import Tier
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.tiers.prefetch import Prefetcher
from twinpool.cache.tiers.prefetch_request import PrefetchRequest


class PrefixAllocation:
    """Allocates for admitted requests: locks cached pages of a prefix, and leases the rest, all pools or none."""

    def __init__(
        self,
        pools: PoolSet,
        kinds: PoolKinds,
        tree: RadixTree,
        table: AllocationTable,
        supply: PageSupply,
        planner: LoadPlanner,
        prefetcher: Prefetcher | NoPrefetcher,
    ) -> None:
        self._pools, self._kinds, self._tree = pools, kinds, tree
        self._table, self._supply, self._planner, self._prefetcher = table, supply, planner, prefetcher

    def allocate(
        self,
        prefix: TokenPrefix,
        positions: int,
        owner: str,
        *,
        reusable: int,
        prefetch: PrefetchRequest | None = None,
        most: int | None = None,
    ) -> Allocation | None:
        """Allocate for `positions` positions: at most `reusable` pages of `prefix` from the tiers, the rest leased.

        `most`: the length that the request may reach, where it goes on here after its prompt. The full pool is extended
        as it grows; of window and state pools all that the request ever holds at once is leased now. All pools or none:
        returns None when there isn't room now, with nothing taken. Releases `prefetch` on success.
        """
        most = most or positions
        allocation = self._allocate(prefix, positions, most, owner, reusable, prefetch)
        if allocation is None and reusable and not len(self._table) and not self._supply.coming_back:
            # Nobody else holds pages, so the locked prefix itself may leave no room for the rest: try without it.
            allocation = self._allocate(prefix, positions, most, owner, 0, prefetch)
        return allocation

    def _allocate(
        self,
        prefix: TokenPrefix,
        positions: int,
        most: int,
        owner: str,
        reusable: int,
        prefetch: PrefetchRequest | None,
    ) -> Allocation | None:
        match = self._tree.match(prefix.head(reusable))
        tier = Tier.HOST if self._planner.worth_loading(match) else Tier.DEVICE
        depth = match.depth if tier is Tier.HOST else match.device_depth
        pages = self._pools.pages_for(most)
        needs = self._kinds.needs(dict.fromkeys(self._kinds.paged, pages - depth))
        needs[self._kinds.full] = self._pools.pages_for(positions) - depth
        if not self._supply.fits(needs):
            return None
        lock = self._tree.lock(match, owner, tier=tier)
        loads = self._planner.loads(lock)
        leases = self._planner.lease(lock, loads, needs)
        if leases is None:
            return None
        loaded = depth - match.device_depth
        stored = min(loaded, prefetch.gained) if prefetch is not None else 0
        if prefetch is not None:
            self._prefetcher.release(prefetch)
        spec = self._pools.spec
        size = spec.page_tokens
        cached = CachedTokens((depth - loaded) * size, (loaded - stored) * size, stored * size)
        allocation = Allocation(owner, prefix, pages, lock, depth, cached)
        allocation.loaded_bytes = sum(count * spec.unit_bytes(pool) for pool, count in loads.items())
        for pool in self._kinds.paged:
            held = lock.on_device(pool)
            allocation.enter(pool, held, depth)
            allocation.digests[pool] = page_digests(held, depth)
            allocation.tables[pool].put(depth, leases[pool].indices, leases[pool].epochs)
            allocation.runs[pool] = [PageRun(depth, leases[pool])]
        allocation.slots = {pool: leases[pool] for pool in self._kinds.states}
        return self._table.open(allocation, fresh=True)
