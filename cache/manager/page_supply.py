"""The page supply: pages and slots of the device's pools, leased for requests all pools or none.

`PageSupply` leases what is free or what the tree can evict. `LoadPlanner` leases, with a request's own pages, those
into which parts of its prefix are loaded from the host, where that is worth it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.cache.manager.tier_set import NoBackup, NoLoadBack, unaccounted
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import PrefixMatch, RadixTree
from twinpool.cache.prefix_cache.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.tree_node import NodeLock, Tier, TreeNode
from twinpool.cache.tiers.backup import HostBackup
from twinpool.cache.tiers.load_back import LoadBack
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import CapacityError


@dataclass(frozen=True, slots=True)
class PoolKinds:
    """Names of a model's pools by kind, and how many pages or slots of each a request leases at once."""

    full: str
    paged: tuple[str, ...]
    """Pools with block tables: the full pool and the window pools."""
    windows: Mapping[str, int]
    """Window pools, each with the most pages of it that one request holds at once."""
    states: tuple[str, ...]
    """Pools of recurrent states, in slots."""

    @classmethod
    def of(cls, spec: PoolSetSpec, stride: int) -> PoolKinds:
        """`stride`: positions beyond the committed length that launched steps of one request write at most."""
        return cls(
            spec.full.name,
            tuple(p.name for p in spec.pools if p.kind is not PoolKind.STATE),
            {p.name: spec.window_hold(p.name, stride) for p in spec.pools if p.window_tokens},
            tuple(p.name for p in spec.pools if p.kind is PoolKind.STATE),
        )

    def needs(self, pages: Mapping[str, int]) -> dict[str, int]:
        """Return what a request leases to get `pages` new pages, by pool.

        Of a window pool at most what the request ever holds at once, of each state pool one slot.
        """
        needs = {pool: min(count, self.windows.get(pool, count)) for pool, count in pages.items()}
        return needs | dict.fromkeys(self.states, 1)


class PageSupply:
    """Leases pages of the device's pools, for which the tree evicts. `backup` saves nodes that are written back.

    The other parts of a manager take `pools`, `kinds` and `tree` from here.
    """

    def __init__(self, pools: PoolSet, kinds: PoolKinds, tree: RadixTree, backup: HostBackup | NoBackup) -> None:
        self.pools, self.kinds, self.tree, self._backup = pools, kinds, tree, backup
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
            allocator = self.pools.allocators[pool]
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
        spill = self._spill if self.tree.write_back else None
        return self.tree.eviction.evict(Tier.DEVICE, pool, count, spill)

    def _spill(self, node: TreeNode) -> bool:
        return self._backup.save([node]) and self.kinds.full not in node.parts[Tier.HOST]

    def free_pages(self, pool: str) -> int:
        """Pages (or slots) of `pool` that are free or that the tree can evict."""
        return self.pools.allocators[pool].free + self.tree.eviction.evictable(pool)

    @property
    def coming_back(self) -> bool:
        """Whether operations under way still keep pages: such as were given back (quarantine), and, where no allocation
        is open, such as copies lock in the tree."""
        protected = self.tree.accounts.protected
        return any(
            allocator.quarantined or protected[Tier.DEVICE, pool] for pool, allocator in self.pools.allocators.items()
        )

    def fits(self, needs: Mapping[str, int]) -> bool:
        """Whether the pools are large enough for `needs`, whatever is free now."""
        return all(count <= self.pools.allocators[pool].total for pool, count in needs.items())

    def cached_pages(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` are on the device."""
        there = 0
        for node, pages in self.tree.walked(prefix):
            if self.kinds.full not in node.parts[Tier.DEVICE]:
                break
            there += pages
        return there

    def kept_pages(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` are on the device and locked there."""
        held = 0
        for node, pages in self.tree.walked(prefix):
            part = node.parts[Tier.DEVICE].get(self.kinds.full)
            if part is None or not part.locks:
                break
            held += pages
        return held

    @property
    def max_positions(self) -> int:
        """Positions that one request can hold when all pages of all pools are free."""
        bounds = [self.pools.max_positions]
        for pool, most in self.kinds.windows.items():
            total = self.pools.allocators[pool].total
            bounds += [total * self.pools.spec.page_tokens] if total < most else []
        return min(bounds)

    def check(self, held: Mapping[str, int]) -> list[str]:
        """Return a line for each pool where pages in use aren't the tree's plus `held`, the count of all others'."""
        sizes = self.tree.accounts.sizes
        return unaccounted(self.pools, {pool: sizes[Tier.DEVICE, pool] + count for pool, count in held.items()})


class LoadPlanner:
    """Plans loads of parts that a request's lock keeps on the host: whether they are worth it, and whether they fit."""

    def __init__(self, supply: PageSupply, load_back: LoadBack | NoLoadBack, config: CacheConfig) -> None:
        self._supply, self._load_back = supply, load_back
        self._spec = supply.pools.spec
        self._policy, self._max_bytes = config.load_back, config.load_bytes
        self._page_bytes = sum(map(self._spec.unit_bytes, supply.kinds.paged))
        self._tokens_per_s = 0.0
        """A moving average of tokens computed per second; 0 before the first step."""
        self.counters = {"loads_skipped": 0.0}

    @property
    def enabled(self) -> bool:
        """Whether the policy (`load_back` of the cache configuration) allows any loads."""
        return self._policy != "never"

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step's speed; `worth_loading` weighs loading against it."""
        if seconds > 0:
            rate = tokens / seconds
            self._tokens_per_s = rate if not self._tokens_per_s else 0.8 * self._tokens_per_s + 0.2 * rate

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second that were computed, and that were loaded from the host; those that aren't known are left
        out."""
        loaded = self._load_back.bytes_per_s * self._spec.page_tokens / self._page_bytes if self._page_bytes else 0.0
        rates = {"compute_tokens_per_s": self._tokens_per_s, "load_tokens_per_s": loaded}
        return {name: rate for name, rate in rates.items() if rate}

    def worth_loading(self, match: PrefixMatch) -> bool:
        """Whether to load the pages that the host has below the device's anchor, rather than compute them again."""
        below, loaded_per_s = match.depth - match.device_depth, self._load_back.bytes_per_s
        if not below or not self.enabled:
            return False
        if self._policy == "always" or not self._tokens_per_s or not loaded_per_s:
            return True
        worth = below * self._page_bytes / loaded_per_s < below * self._spec.page_tokens / self._tokens_per_s
        self.counters["loads_skipped"] += not worth
        return worth

    def loads(self, lock: NodeLock) -> Counter[str]:
        """Pages (and slots) by pool that must be loaded from the host before the parts of `lock` can be used."""
        loads = Counter[str]()
        for part in self._load_back.missing(lock):
            loads[part.component] += len(part)
        return loads

    def lease(self, lock: NodeLock, loads: Mapping[str, int], needs: Mapping[str, int]) -> dict[str, Lease] | None:
        """Lease `needs` for the owner of `lock`, and further pages into which `loads` are planned.

        All pools or none: returns None without room, and has given `lock` back then. The tree owns the pages of loads.
        """
        leases = None
        if self._fit(loads):
            leases = self._supply.lease_all({pool: needs[pool] + loads.get(pool, 0) for pool in needs}, lock.owner)
        if leases is None:
            self._supply.tree.locks.unlock(lock)
            return None
        if loads:
            into = {pool: leases[pool].split(count, lock.owner) for pool, count in loads.items()}
            self._load_back.plan(lock, into)
        return leases

    def _fit(self, loads: Mapping[str, int]) -> bool:
        """Whether `loads` and those under way stay within `load_bytes`; with none under way, always."""
        if not loads or not self._load_back.nbytes:
            return True
        nbytes = sum(count * self._spec.unit_bytes(pool) for pool, count in loads.items())
        return self._load_back.nbytes + nbytes <= self._max_bytes
