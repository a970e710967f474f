"""The page supply: leases of device pages that are free or that the tree can evict."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.cache.manager.absent_tiers import NoBackup
from twinpool.cache.manager.page_accounts import unaccounted
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import Tier, TreeNode
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.tiers.host_backup import HostBackup
from twinpool.contracts.errors import CapacityError


class PageSupply:
    """Leases pages of the device's pools, for which the tree evicts. `backup` saves nodes that are written back."""

    def __init__(self, pools: PoolSet, kinds: PoolKinds, tree: RadixTree, backup: HostBackup | NoBackup) -> None:
        self._pools, self._kinds, self._tree, self._backup = pools, kinds, tree, backup
        self.counters = {"pages_evicted": 0.0}

    def lease_all(self, needs: Mapping[str, int], owner: str) -> dict[str, Lease] | None:
        """Lease `needs`, by pool, evicting from the tree where too few are free; None, with no lease, without room.

        Evicted pages that an operation still touches aren't free yet: then more are evicted. Where that can't make room
        either, nothing is.
        """
        if any(count > self.free_pages(pool) for pool, count in needs.items()):
            return None
        leases: dict[str, Lease] = {}
        for pool, count in needs.items():
            allocator = self._pools.allocators[pool]
            while count > allocator.free and (evicted := self.evict(pool, count - allocator.free)):
                self.counters["pages_evicted"] += evicted
            try:
                leases[pool] = allocator.lease(count, owner)
            except CapacityError:
                for lease in leases.values():
                    lease.release()
                return None
        return leases

    def evict(self, pool: str, count: int) -> int:
        """Free up to `count` pages (or slots) of `pool` that only the tree holds; returns how many."""
        spill = self._spill if self._tree.write_back else None
        return self._tree.eviction.evict(Tier.DEVICE, pool, count, spill)

    def _spill(self, node: TreeNode) -> bool:
        return self._backup.save([node]) and self._kinds.full not in node.parts[Tier.HOST]

    def free_pages(self, pool: str) -> int:
        """Pages (or slots) of `pool` that are free or that the tree can evict."""
        return self._pools.allocators[pool].free + self._tree.eviction.evictable(pool)

    @property
    def coming_back(self) -> bool:
        """Whether operations under way still keep pages: such as were given back (quarantine), and, where no allocation
        is open, such as copies lock in the tree."""
        protected = self._tree.accounts.protected
        return any(
            allocator.quarantined or protected[Tier.DEVICE, pool] for pool, allocator in self._pools.allocators.items()
        )

    def fits(self, needs: Mapping[str, int]) -> bool:
        """Whether the pools are large enough for `needs`, whatever is free now."""
        return all(count <= self._pools.allocators[pool].total for pool, count in needs.items())

    def cached_pages(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` are on the device."""
        there = 0
        for node, pages in self._tree.walked(prefix):
            if self._kinds.full not in node.parts[Tier.DEVICE]:
                break
            there += pages
        return there

    def kept_pages(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` are on the device and locked there."""
        held = 0
        for node, pages in self._tree.walked(prefix):
            part = node.parts[Tier.DEVICE].get(self._kinds.full)
            if part is None or not part.locks:
                break
            held += pages
        return held

    @property
    def max_positions(self) -> int:
        """Positions that one request can hold when all pages of all pools are free."""
        bounds = [self._pools.max_positions]
        for pool, most in self._kinds.windows.items():
            total = self._pools.allocators[pool].total
            bounds += [total * self._pools.spec.page_tokens] if total < most else []
        return min(bounds)

    def check(self, held: Mapping[str, int]) -> list[str]:
        """Return a line for each pool where pages in use aren't the tree's plus `held`, the count of all others'."""
        sizes = self._tree.accounts.sizes
        return unaccounted(self._pools, {pool: sizes[Tier.DEVICE, pool] + count for pool, count in held.items()})
