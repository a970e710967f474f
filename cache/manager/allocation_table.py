"""The allocation table: a worker's open allocations, each freed once, and invalid once state it relies on is damaged.

`free` is the only end of an allocation. Pages and slots that launched operations still name are pinned until these
operations are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from twinpool.cache.allocation.allocation import Allocation
from twinpool.cache.device.device_port import Completion
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.pool.in_flight import InFlightPins
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.tree_node import NodeLock
from twinpool.cache.prefix_cache.tree_locks import TreeLocks


class AllocationTable:
    """All allocations that aren't freed yet, by their locks in the tree."""

    def __init__(self, pools: PoolSet, kinds: PoolKinds, locks: TreeLocks, in_flight: InFlightPins) -> None:
        self._pools, self._kinds, self._locks, self._in_flight = pools, kinds, locks, in_flight
        self._allocations: dict[NodeLock, Allocation] = {}
        self._fresh: list[Allocation] = []
        self.counters = {f"hit_tokens_{tier}": 0.0 for tier in ("device", "host", "storage")}

    def __len__(self) -> int:
        return len(self._allocations)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._allocations.values())

    def open(self, allocation: Allocation, *, fresh: bool = False) -> Allocation:
        """Enter an allocation. `fresh`: its state slots are still to be filled, at `KVCacheManager.launch`."""
        self._allocations[allocation.lock] = allocation
        if fresh:
            self._fresh.append(allocation)
        self.counters["hit_tokens_device"] += allocation.cached.device
        self.counters["hit_tokens_host"] += allocation.cached.host
        self.counters["hit_tokens_storage"] += allocation.cached.storage
        return allocation

    def is_fresh(self, allocation: Allocation) -> bool:
        return allocation in self._fresh

    def take_fresh(self) -> list[Allocation]:
        """Return the allocations opened as `fresh` since the last call, except those freed meanwhile."""
        fresh, self._fresh = self._fresh, []
        return [allocation for allocation in fresh if not allocation.released]

    def free(self, allocation: Allocation, after: Sequence[Completion] = ()) -> None:
        """Give back everything that the allocation holds. Idempotent.

        `after`: launched operations that name its pages and slots. These are leased to nobody before the operations
        are complete.
        """
        if allocation.released:
            return
        allocation.released = True
        snapshots = [s for held in allocation.snapshots.values() for s in held]
        under_way = [c for c in [*after, *allocation.started, *(s.completion for s in snapshots)] if not c.done]
        for completion in under_way:
            reason = f"launched for {allocation.owner}"
            self._in_flight.hold(
                completion, *(self._pools.allocators[p].pin(i, reason) for p, i in allocation.named().items())
            )
        del self._allocations[allocation.lock]
        self._locks.unlock(allocation.lock)
        leases = [s.lease for s in snapshots] + [*allocation.slots.values(), *allocation.spare.values()]
        for lease in leases + [run.lease for runs in allocation.runs.values() for run in runs]:
            lease.release()

    def free_all(self) -> None:
        for allocation in list(self):
            self.free(allocation)

    def failed(self) -> list[Allocation]:
        """Allocations whose recurrent states failed to get into their slots and that aren't marked invalid yet."""
        return [a for a in self if not a.invalid and a.start_failed]

    def invalidate_reliant(self, failed: Sequence[Allocation], locks: Iterable[NodeLock]) -> list[Allocation]:
        """Mark `failed` and the allocations of `locks` invalid; returns those that weren't invalid before."""
        relied = [self._allocations.get(lock) for lock in locks]
        invalid = [*failed]
        invalid += [a for a in dict.fromkeys(relied) if a is not None and not a.invalid and a not in invalid]
        for allocation in invalid:
            allocation.invalid = True
        return invalid

    def own(self, pool: str) -> int:
        """Device pages (or slots) of `pool` that allocations leased themselves and still hold."""
        return sum(allocation.own(pool) for allocation in self)

    def check(self) -> list[str]:
        """Check all block tables; returns a line for each fault."""
        found = []
        for allocation in self:
            for pool in self._kinds.paged:
                found += allocation.check(self._pools.allocators[pool], pool)
        return found
