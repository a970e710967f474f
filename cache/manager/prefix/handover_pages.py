"""Hand-over pages: preallocated for prompts that another worker computes, and committed once they have arrived."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.cache.allocation.allocation import Allocation, CachedTokens, page_digests
from twinpool.cache.allocation.block_table import NULL_PAGE, PageRun
from twinpool.cache.manager.allocation_table import AllocationTable
from twinpool.cache.manager.pages.load_planner import LoadPlanner
from twinpool.cache.manager.pages.state_slots import StateSlots
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.memory.required_pages import due, missing
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.radix_tree import RadixTree


class HandoverPages:
    """Allocates for prompts that are handed over to this worker. State that its own tree has needn't be sent."""

    def __init__(
        self,
        pools: PoolSet,
        kinds: PoolKinds,
        tree: RadixTree,
        table: AllocationTable,
        planner: LoadPlanner,
        slots: StateSlots,
    ) -> None:
        self._pools, self._kinds, self._tree = pools, kinds, tree
        self._table, self._planner, self._slots = table, planner, slots

    def preallocate(
        self, prefix: TokenPrefix, prompt: int, positions: int, owner: str, most: int | None = None
    ) -> tuple[Allocation, dict[str, Lease]] | None:
        """Allocate for a prompt of `prompt` positions that is handed over, with room for `positions` in all.

        `most`: the length that the request may reach. The full pool is extended as it grows; of window and state pools
        all that the request ever holds at once is leased now. Parts that the tree has are locked, component by
        component: on the device, or on the host if they can be loaded. Returns the allocation and a lease for each
        pool: first the pages (or the slot) that `lacking` names, then those of later positions. The receiver owns the
        leases until `commit_transfer`. Returns None without room, with nothing taken.
        """
        reserved = self._preallocate(prefix, prompt, positions, owner, most or positions)
        if reserved is None and len(prefix) and not len(self._table):
            # Pages in quarantine aren't waited for here: a writer whose death isn't proven may keep them for long.
            reserved = self._preallocate(prefix.head(0), prompt, positions, owner, most or positions)
        return reserved

    def _preallocate(
        self, prefix: TokenPrefix, prompt: int, positions: int, owner: str, most: int
    ) -> tuple[Allocation, dict[str, Lease]] | None:
        full, wanted = self._kinds.full, due(self._pools.spec, prompt)
        lock, held = self._tree.hold(prefix, wanted, owner, host=self._planner.enabled)
        loads = self._planner.loads(lock)
        lacking = missing(wanted, held)
        pages, pages_here = self._pools.pages_for(most), self._pools.pages_for(prompt)
        needs = self._kinds.needs({pool: len(lacking[pool]) + pages - pages_here for pool in self._kinds.paged})
        needs[full] = len(lacking[full]) + self._pools.pages_for(positions) - pages_here
        leases = self._planner.lease(lock, loads, needs)
        if leases is None:
            return None
        depth = lacking[full].start
        size = self._pools.spec.page_tokens
        from_host = min(loads[full], depth) * size
        cached = CachedTokens(min(prompt, depth * size - from_host), from_host)
        allocation = Allocation(owner, prefix, pages, lock, depth, cached, lacking=lacking)
        for pool in self._kinds.paged:
            allocation.enter_held(pool, wanted[pool])
        return self._table.open(allocation), leases

    def commit_transfer(
        self, allocation: Allocation, prompt: int, leases: Mapping[str, Lease], digests: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Enter `leases` into the block tables; the allocation owns them from now on.

        Everything in `lacking` must have arrived there, verified. `digests` are those of the pages that arrived, by
        pool and page number. State slots that weren't lacking are filled from the tree's snapshots.
        """
        whole = prompt // self._pools.spec.page_tokens
        for pool in self._kinds.paged:
            lacking, lease = allocation.lacking[pool], leases[pool]
            received = lease.split(len(lacking), allocation.owner)
            for first, part in ((lacking.start, received), (self._pools.pages_for(prompt), lease)):
                allocation.tables[pool].put(first, part.indices, part.epochs)
                allocation.runs[pool].append(PageRun(first, part))
            known = page_digests(allocation.lock.on_device(pool), whole)
            for number, digest in digests.get(pool, {}).items():
                if number < whole:
                    known[number] = digest
            pages = allocation.tables[pool].pages[:whole]
            allocation.digests[pool] = [d if page != NULL_PAGE else None for d, page in zip(known, pages, strict=True)]
        for pool in self._kinds.states:
            allocation.slots[pool] = leases[pool]
            if not allocation.lacking[pool]:
                self._slots.start(allocation, pool)
