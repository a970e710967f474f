"""The fair shares of tenants in one worker, by virtual token counters, and which tenants are expected back.

A tenant's counter grows by what the worker does for it, in tokens over its weight; whoever has the lowest is served
next. So tenants that always have something waiting get tokens in proportion to their weights, whatever each sends, and
what one doesn't use goes to the others. Who comes back from having nothing to do has saved up no more than a credit:
its counter is lifted to the lowest of those who have been waiting meanwhile, less that. So its next tokens, up to the
credit, come before all others', as if it had been waiting for a while, and what it gets in the long run is its share
all the same. (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, whose counters are lifted all the
way; the forgetting is start-time fair queueing's, Goyal et al. 1996: when nobody has anything to do, all are even.)

Only tenants that have something to do, and those that left with more than their share, are kept, these up to a bound.

Returns: a tenant that came back lately is expected to send its next prompt soon, which must not find a long step under
way. Of all tenants the two that came last are remembered, which is all that the question needs: whether there is one of
the last so many seconds that isn't the only one with work now.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, MutableMapping, Set
from typing import TypeVar

T = TypeVar("T")
MAX_AHEAD = 1024
"""Tenants without anything to do whose counters are kept; beyond it those that are least ahead are forgotten."""


class FairShares:
    """The virtual token counters of one queue. Tenants are named; where there are none, all requests are of ``""``, and
    nothing here decides anything."""

    def __init__(self, credit: int = 0) -> None:
        """`credit`: tokens that a tenant may have saved up when it comes back, whatever its weight."""
        self._credit = credit
        self._counters: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        """Of the tenants that have something to do."""
        self._floor = 0.0
        """The lowest counter of those that have had something to do since before; never sinks until all are idle."""

    def __len__(self) -> int:
        """Tenants that are kept."""
        return len(self._counters)

    def follow(self, active: Mapping[str, int]) -> None:
        """Take in which tenants have something to do now, and their weights. To be called whenever that may have
        changed, before anything is chosen."""
        if not active:
            self._counters.clear()
            self._weights, self._floor = {}, 0.0
            return
        counters = self._counters
        stayed = [counters[tenant] for tenant in self._weights if tenant in active]
        if stayed:
            self._floor = max(self._floor, min(stayed))
        elif counters:  # Nobody who was here waits any more, so nobody is owed anything.
            self._floor = max(counters.values())
        for tenant in active.keys() - self._weights.keys():
            saved = self._credit / max(active[tenant], 1) if self._weights else 0.0
            counters[tenant] = max(counters.get(tenant, -math.inf), self._floor - saved)
        self._weights = {tenant: max(weight, 1) for tenant, weight in active.items()}
        if len(counters) > len(active):
            self._forget()

    def _forget(self) -> None:
        ahead = [tenant for tenant, count in self._counters.items() if tenant not in self._weights]
        ahead.sort(key=self._counters.__getitem__)
        least = self._floor - self._credit  # Lower than where any comes back, whatever its weight.
        for tenant in [t for t in ahead if self._counters[t] <= least] + ahead[:-MAX_AHEAD]:
            self._counters.pop(tenant, None)

    def charge(self, tenant: str, weight: int, tokens: int) -> None:
        """Count tokens that are computed for a tenant."""
        weight = max(weight, 1)
        counter = max(self._counters.get(tenant, self._floor), self._floor - self._credit / weight)
        self._counters[tenant] = counter + tokens / weight

    def credit(self, tenant: str) -> int:
        """Tokens that are left of what a tenant had saved up. It must have something to do."""
        return max(0, math.ceil((self._floor - self._counters[tenant]) * self._weights[tenant]))

    def counter(self, tenant: str, ahead: int = 0) -> float:
        """A tenant's counter, were `ahead` more tokens computed for it. It must have something to do."""
        return self._counters[tenant] + ahead / self._weights[tenant]

    def divide(self, budget: int, wanted: Mapping[str, int], quantum: int) -> dict[str, int]:
        """Divide a step's budget among tenants that could use `wanted` tokens of it each: `quantum` tokens at a time to
        whoever has the lowest counter, the first of `wanted` among equals. All of the budget is given, or all that is
        wanted."""
        given = dict.fromkeys(wanted, 0)
        heap = [(self.counter(tenant), place, tenant) for place, tenant in enumerate(wanted) if wanted[tenant] > 0]
        heapq.heapify(heap)
        while budget > 0 and heap:
            _, place, tenant = heap[0]
            part = min(quantum, budget, wanted[tenant] - given[tenant])
            given[tenant] += part
            budget -= part
            if given[tenant] < wanted[tenant]:
                heapq.heapreplace(heap, (self.counter(tenant, given[tenant]), place, tenant))
            else:
                heapq.heappop(heap)
        return given

    def in_turn(self, queues: MutableMapping[str, list[T]], ahead: Mapping[str, int]) -> Iterator[T]:
        """Yield what waits, tenant by tenant as their counters say, each tenant's in the order of its queue.

        `ahead`: tokens that were decided on and aren't charged yet, by tenant; the caller may change it between two
        items. `queues`: by tenant, none empty, in the order in which equals come; left as it is.
        """
        if len(queues) == 1:
            (only,) = queues.values()
            yield from only
            return
        rest = {tenant: iter(queue) for tenant, queue in queues.items()}
        while rest:
            tenant = min(rest, key=lambda t: self.counter(t, ahead.get(t, 0)))
            item = next(rest[tenant], None)
            if item is None:
                del rest[tenant]
            else:
                yield item


class TenantReturns:
    """The latest returns of tenants to having something to do. Times are seconds of one clock."""

    def __init__(self, window_s: float) -> None:
        """`window_s`: seconds after which a return is forgotten."""
        self._window_s = window_s
        self._there: Set[str] = frozenset()
        self._latest: list[tuple[str, float]] = []
        """The two that came last, the last one first."""

    def follow(self, active: Set[str], now: float) -> None:
        """Take in which tenants have something to do now. To be called whenever that may have changed."""
        for tenant in sorted(active - self._there):
            self._latest = [(tenant, now), *(one for one in self._latest if one[0] != tenant)][:2]
        self._there = frozenset(active)

    def expected(self, now: float) -> bool:
        """Whether a tenant came back within the window that isn't the only one with something to do now."""
        return any(now - at < self._window_s and self._there != {tenant} for tenant, at in self._latest)
