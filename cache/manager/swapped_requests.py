"""Swapped out requests: their state off the device to leased host memory, on to storage, and back into other pages.

    swap_out       begin to copy the state of the committed positions, in every pool; its allocation may be freed then
    settle         take in the end of the copy: check that every page is there and is what was sealed on the device
    to_storage     move the state on to storage, to free its host memory; `from_storage` fetches it back to the host
    swap_in        begin to bring it back into newly leased pages and slots of every pool; the request runs again when
                   everything has arrived and matches its tags
    drop           give back the host memory: the only end of swapped out state

Nothing here waits. `cache.swap.offload` makes the copies, both ends pinned until they are complete (A6): so the
allocation can be freed as soon as they are submitted, and its pages wait in quarantine until no copy reads them any
more. Digests are taken from the device's bytes as they are copied, and compared with the seals that whole pages got
when they were produced. Host pages that only the tree holds are evicted for swapped out state, not the other way round.

The registry says which state is due, pool by pool, and no pool is named here (`cache.memory.kv_cache_spec`): all pages
of the full pool, those that a window still reaches, one state slot. The committed length decides (hazard A4): the last
token drawn has no state yet, and steps under way are still writing, so the caller lets these steps land first.

A prefix that many requests share isn't copied for each of them. Pages that the tree has with the digests that the
allocation has for them stay the tree's, on the way out and back, so sharing survives a retraction on both tiers; those
that the tree has on the host alone are loaded on the way back as for any other request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.allocation import NULL_PAGE, Allocation, BlockTable, CachedTokens, PageRun
from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.allocations import Allocations, LoadPlanner
from twinpool.cache.manager.running_pages import PageSupply
from twinpool.cache.manager.tier_set import TierSet
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec, due, extents
from twinpool.cache.pool.page_allocator import InFlightPins, Lease
from twinpool.cache.pool.pool_set import PageExtent, PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodePart, Tier, TokenPrefix, TreeNode
from twinpool.cache.swap.offload import RestoredPages, offload, restore
from twinpool.cache.swap.swap_storage import SwapEvent, SwappedState, SwapPlace
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import CapacityError, StaleLease
from twinpool.contracts.ids import Epoch


@dataclass(frozen=True, slots=True)
class SwapInProgress:
    """A swap-in under way: `allocation` is whole once `restored` is complete and `Allocations.ready` agrees."""

    swapped: SwappedState
    allocation: Allocation
    restored: RestoredPages


class SwappedRequests:
    """Swaps requests out and in, and owns their swapped out state until it is dropped."""

    def __init__(
        self,
        device: Device,
        supply: PageSupply,
        planner: LoadPlanner,
        allocations: Allocations,
        tiers: TierSet,
        in_flight: InFlightPins,
        config: CacheConfig,
    ) -> None:
        self._device, self._planner, self._allocations = device, planner, allocations
        self._pools, self._kinds, self._tree = supply.pools, supply.kinds, supply.tree
        self._tiers, self._in_flight = tiers, in_flight
        self._chunk_bytes, self._verify = config.copy_chunk_bytes, config.verify
        self._swapped: list[SwappedState] = []

    # ------------------------------------------------------------ out

    def __len__(self) -> int:
        """Requests with swapped out state that isn't dropped yet."""
        return len(self._swapped)

    def swap_out(self, allocation: Allocation, prefix: TokenPrefix, committed: int) -> SwappedState:
        """Begin to copy the state of `committed` positions, whose whole pages are `prefix`, to host memory.

        Steps that name the allocation must have landed. The caller frees the allocation, at once if it likes.
        Raises `CapacityError` without enough host memory, and `RuntimeError` where the device refuses; nothing is
        taken then.
        """
        assert not allocation.released, "what was given back isn't kept"
        assert not allocation.invalid, "what can't be trusted isn't kept"
        host, full, spec = self._tiers.host, self._kinds.full, self._pools.spec
        if host is None:
            raise CapacityError("there is no host tier to swap out in: set cache.host_bytes")
        owner = f"swapped out {allocation.owner}"
        whole = committed // spec.page_tokens
        digests = {pool: _known(allocation.digests[pool], whole) for pool in self._kinds.paged}
        # What a swap-in may load from the tree's host tier needn't be copied.
        here = same_parts(self._tree, prefix, digests[full], Tier.HOST) if self._planner.enabled else []
        above = self._tree.locks.keep(here, owner)
        kept = sum(map(len, here))
        numbers = due(spec, committed)
        numbers[full] = range(kept, numbers[full].stop)
        numbers = {pool: chosen for pool, chosen in numbers.items() if chosen}
        taken = {pool: page_extent(spec, allocation, pool, chosen, committed) for pool, chosen in numbers.items()}
        try:
            self._make_room(host, {pool: len(extent) for pool, extent in taken.items()})
            saved = offload(
                self._device,
                self._pools,
                host,
                taken,
                chunk_bytes=self._chunk_bytes,
                owner=owner,
                verify=self._verify,
            )
        except (CapacityError, RuntimeError):
            self._tree.locks.unlock(above)
            raise
        swapped = SwappedState(
            allocation.owner, prefix, committed, allocation.pages, kept, above, numbers, saved, digests
        )
        self._swapped.append(swapped)
        return swapped

    def _make_room(self, host: PoolSet, needs: Mapping[str, int]) -> None:
        for pool, count in needs.items():
            lacking = count - host.allocators[pool].free
            if lacking > 0:
                self._tree.eviction.evict(Tier.HOST, pool, lacking)

    def settle(self, swapped: SwappedState) -> None:
        """Take in a copy that has ended: `place` becomes `HOST`, or `LOST` if a page is missing or not as sealed.

        Does nothing while the copy is under way.
        """
        if swapped.place is SwapPlace.SAVING and swapped.saved.done:
            if self._sound(swapped):
                swapped.turn(SwapEvent.SAVED)
                self._tiers.keeper.seal_swapped(swapped)
            else:
                swapped.turn(SwapEvent.FAILED)
                swapped.saved.release()

    def _sound(self, swapped: SwappedState) -> bool:
        if not swapped.saved.complete:
            return False
        sums = swapped.saved.digests
        if sums is None:
            return True
        whole = swapped.positions // self._pools.spec.page_tokens
        for pool in self._kinds.paged:
            sealed = swapped.digests[pool]
            found = dict(zip(swapped.numbers.get(pool, ()), sums.get(pool, ()), strict=True))
            bad = sorted(n for n in found.keys() & sealed.keys() if found[n] != sealed[n])
            if bad:
                swapped.damage[pool] = bad
                return False
            swapped.digests[pool] = sealed | {n: digest for n, digest in found.items() if n < whole}
        return True

    def to_storage(self, swapped: SwappedState, tokens: Sequence[int]) -> bool:
        """Begin to move the state on to storage, to free its host memory; `tokens` are those of its positions.

        Returns False without storage, without digests to verify the state by on the way back, or where storage has
        refused it before.
        """
        if not self._tiers.swap_storage.takes(swapped):
            return False
        self._tiers.swap_storage.store(swapped, self._keys(swapped, tokens))
        return True

    def from_storage(self, swapped: SwappedState, tokens: Sequence[int]) -> None:
        """Begin to fetch stored state back to the host; `tokens` as for `to_storage`.

        Raises `CapacityError` without room there, with nothing taken.
        """
        self._tiers.swap_storage.fetch(swapped, self._keys(swapped, tokens))

    def _keys(self, swapped: SwappedState, tokens: Sequence[int]) -> Sequence[bytes]:
        return block_hashes(tokens, self._pools.spec.page_tokens, swapped.prefix.salt)

    # ------------------------------------------------------------ in

    def swap_in(self, swapped: SwappedState, positions: int) -> SwapInProgress | None:
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
        self._enter_tables(allocation, swapped, leases)
        self._allocations.open(allocation)
        try:
            return SwapInProgress(swapped, allocation, self._restore(swapped, allocation))
        except BaseException:
            self._allocations.free(allocation)
            raise

    def _needs(self, swapped: SwappedState, depth: int, positions: int) -> dict[str, int]:
        """Pages and slots to lease, by pool: of windows, as many as the request ever holds at once."""
        numbers, pages = due(self._pools.spec, swapped.positions), self._pools.pages_for(swapped.positions)
        needs = {self._kinds.full: max(self._pools.pages_for(positions), pages) - depth}
        for pool, most in self._kinds.windows.items():
            needs[pool] = max(len(numbers[pool]), min(most, len(numbers[pool]) + swapped.pages - pages))
        return needs | dict.fromkeys(self._kinds.states, 1)

    def _enter_tables(self, allocation: Allocation, swapped: SwappedState, leases: Mapping[str, Lease]) -> None:
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
        """Digests of the whole pages up to the first unknown one; `FinishedPages.seal` takes those from there on."""
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

    # ------------------------------------------------------------ the end

    def drop(self, swapped: SwappedState) -> None:
        """Give back the host memory. Idempotent. Pages that an operation still touches are free once it has ended."""
        if swapped.place is SwapPlace.GONE:
            return
        swapped.turn(SwapEvent.DISCARD)
        self._swapped.remove(swapped)
        self._tree.locks.unlock(swapped.above)
        if not swapped.saved.done:
            self._in_flight.hold(swapped.saved)
        swapped.saved.release()

    def leased(self, pool: str) -> int:
        """Host pages (or slots) of `pool` that swapped out state holds."""
        return sum(swapped.leased(pool) for swapped in self._swapped)

    def check(self) -> list[str]:
        return [line for swapped in self._swapped for line in swapped.check()]


def page_extent(spec: PoolSetSpec, allocation: Allocation, pool: str, numbers: range, committed: int) -> PageExtent:
    """The extent of pages (or the slot) `numbers` of an allocation, with the committed positions in each."""
    firsts, ends = extents(spec, pool, numbers, committed)
    if pool in allocation.slots:
        slot = allocation.slots[pool]
        return PageExtent(slot.indices, slot.epochs, tuple(firsts), tuple(ends))
    indices = allocation.tables[pool].pages[numbers.start : numbers.stop]
    whole = len(indices) == len(numbers) and NULL_PAGE not in indices
    assert whole, f"{pool} lacks state of committed positions"
    epochs = tuple(Epoch(e) for e in allocation.tables[pool].epochs[numbers.start : numbers.stop])
    return PageExtent(tuple(indices), epochs, tuple(firsts), tuple(ends))


def same_parts(
    tree: RadixTree, prefix: TokenPrefix, digests: Mapping[int, int], tier: Tier | None = None
) -> list[NodePart]:
    """The full parts of the leading nodes of `prefix` whose digests equal `digests`, in `tier` or in the fastest one.

    `digests` are by page number. The first node that differs or isn't wholly matched ends the list. Two computations
    of the same tokens need not have the same bits; only pages with equal digests can replace a request's own.
    """
    out: list[NodePart] = []
    start = 0
    for node, pages in tree.walked(prefix):
        part = _part(node, tree.full, tier)
        mine = tuple(digests.get(start + i, -1) for i in range(len(node)))
        if part is None or pages != len(node) or part.digests != mine:
            break
        out.append(part)
        start += pages
    return out


def _part(node: TreeNode, component: str, tier: Tier | None) -> NodePart | None:
    return node.part(component) if tier is None else node.parts[tier].get(component)


def _known(digests: Sequence[int | None], whole: int) -> dict[int, int]:
    return {n: digest for n, digest in enumerate(digests[:whole]) if digest is not None}
