"""Swap-in: the state of swapped out requests back onto the device, into newly leased pages and slots.

Pages of the prefix that the tree has with equal digests are used as they are; those that the tree has on the host alone
are loaded as for any other request. The rest is restored from the request's own copy. Pages and slots of every pool are
leased, or none. The request runs again when everything has arrived and matches its tags. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.cache.allocation.allocation import Allocation, CachedTokens
from twinpool.cache.allocation.block_table import NULL_PAGE, BlockTable, PageRun
from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.allocation_table import AllocationTable
from twinpool.cache.manager.pages.load_planner import LoadPlanner
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.manager.swap.swap_pages import page_extent, same_parts
from twinpool.cache.memory.required_pages import due
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.tree_node import Tier
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.swap.restore import RestoredPages, restore
from twinpool.cache.swap.swapped_state import SwappedState, SwapPlace
from twinpool.contracts.errors import StaleLease


@dataclass(frozen=True, slots=True)
class SwapInProgress:
    """A swap-in under way: `allocation` is whole once `restored` is complete and `LoadPlanner.ready` agrees."""

    swapped: SwappedState
    allocation: Allocation
    restored: RestoredPages


class SwapIn:
    """Allocates for swapped out requests, and restores their state there, `chunk_bytes` at a time."""

    def __init__(
        self,
        pools: PoolSet,
        kinds: PoolKinds,
        device: Device,
        tree: RadixTree,
        table: AllocationTable,
        planner: LoadPlanner,
        chunk_bytes: int,
    ) -> None:
        self._pools, self._kinds, self._device, self._tree = pools, kinds, device, tree
        self._table, self._planner, self._chunk_bytes = table, planner, chunk_bytes

    def start(self, swapped: SwappedState, positions: int) -> SwapInProgress | None:
        """Lease pages and slots for `positions` positions in every pool, and begin to restore the state there.

        `swapped` must be in host memory. Returns None without room. Raises `StaleLease` when pages that the tree kept
        for the request were invalidated, and `RuntimeError` where the device refuses. Nothing is taken in these cases.
        """
        assert swapped.place is SwapPlace.HOST, f"{swapped.owner} is {swapped.place}"
        full = self._kinds.full
        here = same_parts(self._tree, swapped.prefix, swapped.digests[full]) if self._planner.enabled else []
        depth = sum(map(len, here))
        if depth < swapped.kept:
            raise StaleLease(f"{swapped.owner}: pages that the tree kept for it were invalidated")
        lock, _ = self._tree.hold(swapped.prefix.head(depth), {full: range(depth)}, swapped.owner, host=True)
        leases = self._planner.lease(lock, self._planner.loads(lock), self._needs(swapped, depth, positions))
        if leases is None:
            return None
        allocation = Allocation(swapped.owner, swapped.prefix, swapped.pages, lock, depth, CachedTokens())
        self._enter(allocation, swapped, leases)
        self._table.open(allocation)
        try:
            return SwapInProgress(swapped, allocation, self._restore(swapped, allocation))
        except BaseException:
            self._table.free(allocation)
            raise

    def _needs(self, swapped: SwappedState, depth: int, positions: int) -> dict[str, int]:
        """Pages and slots to lease, by pool: of windows, as many as the request ever holds at once."""
        numbers, pages = due(self._pools.spec, swapped.positions), self._pools.pages_for(swapped.positions)
        needs = {self._kinds.full: max(self._pools.pages_for(positions), pages) - depth}
        for pool, most in self._kinds.windows.items():
            needs[pool] = max(len(numbers[pool]), min(most, len(numbers[pool]) + swapped.pages - pages))
        return needs | dict.fromkeys(self._kinds.states, 1)

    def _enter(self, allocation: Allocation, swapped: SwappedState, leases: Mapping[str, Lease]) -> None:
        """Fill the tables of `allocation`: pages that the tree has, then pages to restore, then pages to grow into."""
        numbers = due(self._pools.spec, swapped.positions)
        numbers[self._kinds.full] = range(allocation.depth, allocation.depth)
        for pool in self._kinds.paged:
            first = numbers[pool].start
            table = allocation.tables[pool] = BlockTable()
            for part in allocation.lock.of(pool):
                if part.tier is Tier.DEVICE:
                    table.put(part.node.start, part.lease.indices, part.lease.epochs)
            table.put(first, leases[pool].indices, leases[pool].epochs)
            allocation.runs[pool] = [PageRun(first, leases[pool])]
            allocation.digests[pool] = self._seals(allocation, pool, swapped)
        allocation.slots = {pool: leases[pool] for pool in self._kinds.states}

    def _seals(self, allocation: Allocation, pool: str, swapped: SwappedState) -> list[int | None]:
        """Digests of the whole pages up to the first unknown one; `PageSealer.seal` takes that one and later ones."""
        known, table = swapped.digests[pool], allocation.tables[pool].pages
        out: list[int | None] = []
        for n in range(swapped.positions // self._pools.spec.page_tokens):
            if table[n] != NULL_PAGE and n not in known:
                break
            out.append(known[n] if table[n] != NULL_PAGE else None)
        return out

    def _restore(self, swapped: SwappedState, allocation: Allocation) -> RestoredPages:
        into, only = {}, {}
        for pool, numbers in swapped.numbers.items():
            first = max(numbers.start, allocation.depth) if pool == self._kinds.full else numbers.start
            chosen = range(first, numbers.stop)
            only[pool] = [n - numbers.start for n in chosen]
            into[pool] = page_extent(self._pools.spec, allocation, pool, chosen, swapped.positions)
        return restore(self._device, swapped.saved, self._pools, into, chunk_bytes=self._chunk_bytes, only=only)

    def finished(self, returning: SwapInProgress) -> bool:
        """Whether a restore that is `done` brought back every page undamaged."""
        assert returning.restored.done
        return returning.restored.complete
