"""Swapping: an allocation leaves the device with its state in host memory, and comes back into other pages.

    swap out   the state of the committed positions is copied to leased host memory, in every pool; the allocation ends
    settle     the copy has ended: whether all of it is there, and is what was sealed on the device
    store      host memory is wanted for others: it goes on to storage (`swap_storage`), `fetch` brings it back
    swap in    pages and slots of every pool are leased, or none; what the tree has is taken from there
    back       everything has come and matches its tags: the new allocation may be computed from
    discard    the one way out of host memory, whatever happened

What must go is said by the registry (`cache.memory.required_pages`), pool by pool, and no pool is named here: all pages
of the full pool, those that a window still reaches, one state. The committed length decides (hazard A4): the last token
that was drawn has no state yet, and what steps under way would write isn't there, so the caller lets them land first.

The copies are `cache.swap.offload`'s: both ends are pinned until they are complete (A6), so the allocation is released
as soon as they are submitted; its pages wait in limbo and are free when nobody reads them any more. Digests are taken
from the device's bytes as they are copied, compared with the seals that whole pages got when they were produced, and
compared again with what comes back.

A prefix that many requests share isn't copied for each of them. Pages that the tree's host tier has, under the very
digests that the allocation has for them, stay the tree's, under a lock. On the way back, what the tree has of the
prefix is taken from it, where the digests agree, and what it has on the host alone is loaded as for any other request;
the rest comes from the request's own copy. So sharing survives a retraction on both tiers.

Nothing here waits. Host memory that only the tree holds makes room for what is swapped out, not the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache.allocation.allocation import Allocation, CachedTokens
from cache.allocation.allocation import numbers as page_numbers
from cache.allocation.block_table import NO_PAGE, PageRun
from cache.manager.manager_books import TierSet
from cache.memory.required_pages import due, extents
from cache.pool.page_allocator import Lease
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.prefix_cache.tree_node import NodePart, Tier, TreeNode
from cache.swap.offload import offload
from cache.swap.restore import RestoredPages, restore
from cache.swap.swapped_state import SwapEvent, SwappedState, SwapPlace
from cache.tiers.tier_copy import PageExtent
from contracts.block_hash import block_hashes
from contracts.errors import CapacityError, StaleLease
from contracts.ids import Epoch


@dataclass(frozen=True, slots=True)
class SwapInProgress:
    """State on its way back to the device: `allocation` is whole once `restored` is complete."""

    swapped: SwappedState
    allocation: Allocation
    restored: RestoredPages


class SwapOut(TierSet):
    """See the module's prose. The part of `kv_cache_manager.Seat` that retracting and resuming is made of."""

    # ------------------------------------------------------------ to the host

    def swap_out(self, allocation: Allocation, prefix: TokenPrefix, committed: int) -> SwappedState:
        """Begin to copy the state of `committed` positions, whose whole pages are `prefix`, to host memory.

        Steps that name the allocation must have landed; it is the caller's to release, at once if it likes. Raises
        `CapacityError` without enough host memory, and `RuntimeError` where the device refuses; nothing is taken then.
        """
        assert not allocation.released, "what was given back isn't kept"
        assert not allocation.invalid, "what can't be trusted isn't kept"
        if self.host is None:
            raise CapacityError("there is no host tier to swap out in: set cache.host_bytes")
        digests = {pool: _known(allocation.digests[pool], committed // self.spec.page_tokens) for pool in self._runs}
        here = self._same(prefix, digests[self.full], Tier.HOST) if self._may_load_back else []
        above = self.tree.locks.keep(here, f"swapped out {allocation.owner}")
        kept = sum(map(len, here))
        numbers = due(self.spec, committed)
        numbers[self.full] = range(kept, numbers[self.full].stop)
        taken = {pool: self._extent(allocation, pool, chosen, committed) for pool, chosen in numbers.items() if chosen}
        try:
            self._make_room({pool: len(extent) for pool, extent in taken.items()})
            saved = offload(
                self._device, self.pools, self.host, taken,
                chunk_bytes=self.config.copy_chunk_bytes, owner=f"swapped out {allocation.owner}",
                verify=self.config.verify,
            )  # fmt: skip
        except (CapacityError, RuntimeError):
            self.tree.locks.unlock(above)
            raise
        swapped = SwappedState(
            allocation.owner, prefix, committed, allocation.pages, kept, above,
            {pool: numbers[pool] for pool in taken}, saved, digests,
        )  # fmt: skip
        self._swapped.append(swapped)
        return swapped

    def _extent(self, allocation: Allocation, pool: str, numbers: range, committed: int) -> PageExtent:
        firsts, ends = extents(self.spec, pool, numbers, committed)
        if pool in allocation.slots:
            slot = allocation.slots[pool]
            return PageExtent(slot.indices, slot.epochs, tuple(firsts), tuple(ends))
        indices = allocation.tables[pool][numbers.start : numbers.stop]
        whole = len(indices) == len(numbers) and NO_PAGE not in indices
        assert whole, f"{pool} lacks state of committed positions"
        epochs = tuple(Epoch(e) for e in allocation.epochs[pool][numbers.start : numbers.stop])
        return PageExtent(tuple(indices), epochs, tuple(firsts), tuple(ends))

    def _make_room(self, needs: Mapping[str, int]) -> None:
        assert self.host is not None
        for pool, count in needs.items():
            lacking = count - self.host.allocators[pool].free
            if lacking > 0:
                self.tree.eviction.evict(Tier.HOST, pool, lacking)

    def _same(self, prefix: TokenPrefix, digests: Mapping[int, int], tier: Tier | None) -> list[NodePart]:
        """Full parts of the nodes at the start of `prefix` that hold exactly what `digests` say, in `tier` or in any.

        Two computations of the same tokens need not have the same bits; only what has is as good as one's own.
        """
        out: list[NodePart] = []
        start = 0
        for node, pages in self.tree.walked(prefix):
            part = _part(node, self.full, tier)
            mine = tuple(digests.get(start + i, -1) for i in range(len(node)))
            if part is None or pages != len(node) or part.digests != mine:
                break
            out.append(part)
            start += pages
        return out

    # ------------------------------------------------------------ there

    def settle_swap_out(self, swapped: SwappedState) -> None:
        """Take in a copy that has ended: all of it is there and is what was sealed, or it is lost."""
        if swapped.place is SwapPlace.SAVING and swapped.saved.done:
            if self._sound(swapped):
                swapped.turn(SwapEvent.SAVED)
                if self.keeper is not None:
                    self.keeper.seal_swapped(swapped)
            else:
                swapped.turn(SwapEvent.FAILED)
                swapped.saved.release()

    def _sound(self, swapped: SwappedState) -> bool:
        if not swapped.saved.complete:
            return False
        sums = swapped.saved.digests
        if sums is None:
            return True
        whole = swapped.positions // self.spec.page_tokens
        for pool in self._runs:
            sealed = swapped.digests[pool]
            found = dict(zip(swapped.numbers.get(pool, ()), sums.get(pool, ()), strict=True))
            bad = sorted(n for n in found.keys() & sealed.keys() if found[n] != sealed[n])
            if bad:
                swapped.damage[pool] = bad
                return False
            swapped.digests[pool] = sealed | {n: digest for n, digest in found.items() if n < whole}
        return True

    def put_on_storage(self, swapped: SwappedState, tokens: Sequence[int]) -> bool:
        """Begin to move it on to storage, so that its host memory becomes free; `tokens` are those of its positions.

        False where there is no storage, or nothing to tell it by on the way back.
        """
        if self.shelver is None or swapped.saved.digests is None or not swapped.storable:
            return False
        self.shelver.store(swapped, block_hashes(tokens, self.spec.page_tokens, swapped.prefix.salt))
        return True

    def fetch_from_storage(self, swapped: SwappedState, tokens: Sequence[int]) -> None:
        """Begin to bring what is stored back to the host. Raises `CapacityError` without room there."""
        assert self.shelver is not None
        self.shelver.fetch(swapped, block_hashes(tokens, self.spec.page_tokens, swapped.prefix.salt))

    def drop(self, swapped: SwappedState) -> None:
        """Give back the host's memory. Idempotent; what an operation still touches is free when that has ended."""
        if swapped.place is SwapPlace.GONE:
            return
        swapped.turn(SwapEvent.DISCARD)
        self._swapped.remove(swapped)
        self.tree.locks.unlock(swapped.above)
        if not swapped.saved.done:
            self._launched.hold(swapped.saved)
        swapped.saved.release()

    # ------------------------------------------------------------ back

    def swap_in(self, swapped: SwappedState, positions: int) -> SwapInProgress | None:
        """Lease what `positions` positions take in every pool, and begin to bring the swapped out state there.

        None without room, and nothing is taken. Raises `StaleLease` when the tree has lost what it kept of it, and
        `RuntimeError` where the device refuses.
        """
        assert swapped.place is SwapPlace.HOST, f"{swapped.owner} is {swapped.place}"
        here = self._same(swapped.prefix, swapped.digests[self.full], None) if self._may_load_back else []
        depth = sum(map(len, here))
        if depth < swapped.kept:
            raise StaleLease(f"{swapped.owner}: pages that the tree kept for it were invalidated")
        wanted = {self.full: range(depth)}
        lock, _ = self.tree.hold(swapped.prefix.head(depth), wanted, swapped.owner, host=True)
        loads = self._loads(lock)
        needs = self._needs(swapped, depth, positions)
        leases = None
        if self._may_load(loads):
            leases = self._lease({pool: count + loads[pool] for pool, count in needs.items()}, swapped.owner)
        if leases is None:
            self.tree.locks.unlock(lock)
            return None
        self._plan(lock, loads, leases)
        allocation = Allocation(swapped.owner, swapped.prefix, swapped.pages, lock, depth, CachedTokens())
        self._enter(allocation, swapped, leases)
        self._allocations[lock] = allocation
        try:
            return SwapInProgress(swapped, allocation, self._bring(swapped, allocation))
        except RuntimeError:
            self.free(allocation)
            raise

    def _needs(self, swapped: SwappedState, depth: int, positions: int) -> dict[str, int]:
        """What is leased in each pool: of windows, as much as the request ever holds at once."""
        numbers, pages = due(self.spec, swapped.positions), self.pools.pages_for(swapped.positions)
        needs = {self.full: max(self.pools.pages_for(positions), pages) - depth}
        for pool, most in self._windows.items():
            needs[pool] = max(len(numbers[pool]), min(most, len(numbers[pool]) + swapped.pages - pages))
        return needs | dict.fromkeys(self._slots, 1)

    def _enter(self, allocation: Allocation, swapped: SwappedState, leases: Mapping[str, Lease]) -> None:
        """The tables of an allocation that comes back: what the tree has, then what is restored, then room to grow."""
        numbers = due(self.spec, swapped.positions) | {self.full: range(allocation.depth, allocation.depth)}
        for pool in self._runs:
            first = numbers[pool].start
            allocation.tables[pool], allocation.epochs[pool] = (
                page_numbers([NO_PAGE] * first),
                page_numbers([0] * first),
            )
            for part in allocation.lock.of(pool):
                if part.tier is Tier.DEVICE:
                    allocation.put(pool, part.node.start, part.lease.indices, part.lease.epochs)
            allocation.put(pool, first, leases[pool].indices, leases[pool].epochs)
            allocation.runs[pool] = [PageRun(first, leases[pool])]
            allocation.digests[pool] = self._seals(allocation, pool, swapped)
        allocation.slots = {pool: leases[pool] for pool in self._slots}

    def _seals(self, allocation: Allocation, pool: str, swapped: SwappedState) -> list[int | None]:
        """Digests of its whole pages, as far as all of them are known: `KVCacheManager.seal` takes the others again."""
        known, table = swapped.digests[pool], allocation.tables[pool]
        out: list[int | None] = []
        for n in range(swapped.positions // self.spec.page_tokens):
            if table[n] != NO_PAGE and n not in known:
                break
            out.append(known[n] if table[n] != NO_PAGE else None)
        return out

    def _bring(self, swapped: SwappedState, allocation: Allocation) -> RestoredPages:
        assert self.host is not None
        into, only = {}, {}
        for pool, numbers in swapped.numbers.items():
            first = max(numbers.start, allocation.depth) if pool == self.full else numbers.start
            chosen = range(first, numbers.stop)
            only[pool] = [n - numbers.start for n in chosen]
            into[pool] = self._extent(allocation, pool, chosen, swapped.positions)
        chunk = self.config.copy_chunk_bytes
        return restore(self._device, swapped.saved, self.pools, into, chunk_bytes=chunk, only=only)

    def finish_swap_in(self, returning: SwapInProgress) -> bool:
        """Of a restore that is `done`: whether all of it has come as it went."""
        assert returning.restored.done
        return returning.restored.complete


def _part(node: TreeNode, component: str, tier: Tier | None) -> NodePart | None:
    return node.part(component) if tier is None else node.parts[tier].get(component)


def _known(digests: Sequence[int | None], whole: int) -> dict[int, int]:
    return {n: digest for n, digest in enumerate(digests[:whole]) if digest is not None}
