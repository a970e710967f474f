"""Load or compute again: which parts of a request's prefix are worth loading from the host rather than computing anew.

Weighed is the time that loads took lately against the time that steps took. Pages that are loaded are leased with the
request's own, all or none, and stay within `cache.load_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from twinpool.cache.manager.running_pages import PageSupply
from twinpool.cache.manager.tier_set import NoLoadBack
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.prefix_cache.radix_tree import PrefixMatch
from twinpool.cache.prefix_cache.tree_node import NodeLock
from twinpool.cache.tiers.load_back import LoadBack
from twinpool.contracts.config.cache_config import CacheConfig


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
