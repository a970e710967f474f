"""Prefix transfer: cached pages of the full pool from one worker's tree to another's, for no request in particular."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.cache.allocation.allocation import Allocation, CachedTokens, page_digests
from twinpool.cache.manager.allocation_table import AllocationTable
from twinpool.cache.manager.pages.page_supply import PageSupply
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.memory.required_pages import missing
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import PageOffer, Tier
from twinpool.cache.prefix_cache.radix_tree import RadixTree


class PrefixTransfer:
    """Holds a prefix that is pushed to another worker, and reserves pages for a prefix that is pulled from one."""

    def __init__(
        self, pools: PoolSet, kinds: PoolKinds, tree: RadixTree, table: AllocationTable, supply: PageSupply
    ) -> None:
        self._pools, self._kinds, self._tree, self._table, self._supply = pools, kinds, tree, table, supply
        self._full = kinds.full

    def hold_for_push(self, prefix: TokenPrefix, owner: str) -> Allocation:
        """Lock the leading full pages of `prefix` that are on the device, to be written to another worker.

        `depth` of the allocation is their number, perhaps 0; the allocation holds nothing else. The caller frees it.
        """
        wanted = {self._full: range(len(prefix))}
        lock, held = self._tree.hold(prefix, wanted, owner, host=False)
        depth = len(held[self._full])
        allocation = Allocation(owner, prefix, depth, lock, depth, CachedTokens())
        allocation.enter_nothing(self._kinds.paged)
        allocation.lacking = {self._full: range(depth, len(prefix))}
        allocation.enter_held(self._full, wanted[self._full])
        allocation.digests[self._full] = page_digests(lock.on_device(self._full), depth)
        return self._table.open(allocation)

    def reserve_for_pull(self, prefix: TokenPrefix, owner: str, *, spare: bool) -> tuple[Allocation, Lease] | None:
        """Lease the full pages of `prefix` that the device lacks, for another worker to write.

        With `spare`, only free pages are leased and nothing is evicted. Returns None without room, or if nothing lacks.
        """
        wanted = {self._full: range(len(prefix))}
        lock, held = self._tree.hold(prefix, wanted, owner, host=False)
        lacking = missing(wanted, held)[self._full]
        room = lacking and not (spare and len(lacking) > self._pools.allocators[self._full].free)
        leases = self._supply.lease_all({self._full: len(lacking)}, owner) if room else None
        if leases is None:
            self._tree.locks.unlock(lock)
            return None
        allocation = Allocation(owner, prefix, len(prefix), lock, lacking.start, CachedTokens())
        allocation.enter_nothing(self._kinds.paged)
        allocation.lacking = {self._full: lacking}
        return self._table.open(allocation), leases[self._full]

    def insert_pulled(self, allocation: Allocation, lease: Lease, digests: Mapping[int, int]) -> None:
        """Insert pulled pages, which must be verified, into the tree; frees the allocation and `lease`.

        `digests` are by page number.
        """
        lacking = allocation.lacking[self._full]
        offer = PageOffer(lacking.start, lease, [digests[n] for n in lacking])
        self._tree.insert(allocation.prefix, {self._full: [offer]}, Tier.DEVICE)
        lease.release()
        self._table.free(allocation)
