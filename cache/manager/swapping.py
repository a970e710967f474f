"""Parking: a claim leaves the device with its state in host memory, and comes back into other pages.

    park       the state of the committed positions is copied to leased host memory, in every pool; the claim ends
    settle     the copy has ended: whether all of it is there, and is what was sealed on the device
    store      host memory is wanted for others: it goes on to storage (`swap_storage`), `fetch` brings it back
    unpark     pages and slots of every pool are leased, or none; what the tree has is taken from there
    back       everything has come and matches its tags: the new claim may be computed from
    discard    the one way out of host memory, whatever happened

What must go is said by the registry (`cache.memory.required_pages`), pool by pool, and no pool is named here: all pages
of the full pool, those that a window still reaches, one state. The committed length decides (hazard A4): the last token
that was drawn has no state yet, and what steps under way would write isn't there, so the caller lets them land first.

The copies are `cache.swap.offload`'s: both ends are pinned until they are complete (A6), so the claim is released as
soon as they are submitted; its pages wait in limbo and are free when nobody reads them any more. Digests are taken from
the device's bytes as they are copied, compared with the seals that whole pages got when they were produced, and
compared again with what comes back.

A prefix that many requests share isn't copied for each of them. Pages that the tree's host tier has, under the very
digests that the claim has for them, stay the tree's, under a lock. On the way back, what the tree has of the prefix is
taken from it, where the digests agree, and what it has on the host alone is loaded as for any other request; the rest
comes from the request's own copy. So sharing survives a retraction on both tiers.

Nothing here waits. Host memory that only the tree holds makes room for what is parked, not the other way round.
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
from contracts.block_hash import chain_keys
from contracts.errors import CapacityError, StaleLease
from contracts.ids import Epoch


@dataclass(frozen=True, slots=True)
class SwapInProgress:
    """State on its way back to the device: `claim` is whole once `restored` is complete."""

    parked: SwappedState
    claim: Allocation
    restored: RestoredPages


class SwapOut(TierSet):
    """See the module's prose. The part of `kv_cache_manager.Seat` that retracting and resuming is made of."""

    # ------------------------------------------------------------ to the host

    def park(self, claim: Allocation, prefix: TokenPrefix, committed: int) -> SwappedState:
        """Begin to copy the state of `committed` positions, whose whole pages are `prefix`, to host memory.

        Steps that name the claim must have landed; it is the caller's to release, at once if it likes. Raises
        `CapacityError` without enough host memory, and `RuntimeError` where the device refuses; nothing is taken then.
        """
        assert not claim.released, "what was given back isn't kept"
        assert not claim.betrayed, "what can't be trusted isn't kept"
        if self.host is None:
            raise CapacityError("there is no host tier to park in: set cache.host_bytes")
        digests = {pool: _known(claim.digests[pool], committed // self.spec.page_tokens) for pool in self._runs}
        here = self._same(prefix, digests[self.full], Tier.HOST) if self._may_load_back else []
        above = self.tree.keep(here, f"parked {claim.owner}")
        kept = sum(map(len, here))
        numbers = due(self.spec, committed)
        numbers[self.full] = range(kept, numbers[self.full].stop)
        taken = {pool: self._extent(claim, pool, chosen, committed) for pool, chosen in numbers.items() if chosen}
        try:
            self._make_room({pool: len(extent) for pool, extent in taken.items()})
            saved = offload(
                self._device, self.pools, self.host, taken,
                chunk_bytes=self.config.move_chunk_bytes, owner=f"parked {claim.owner}", verify=self.config.verify,
            )  # fmt: skip
        except (CapacityError, RuntimeError):
            self.tree.unlock(above)
            raise
        parked = SwappedState(
            claim.owner, prefix, committed, claim.pages, kept, above,
            {pool: numbers[pool] for pool in taken}, saved, digests,
        )  # fmt: skip
        self._parked.append(parked)
        return parked

    def _extent(self, claim: Allocation, pool: str, numbers: range, committed: int) -> PageExtent:
        firsts, ends = extents(self.spec, pool, numbers, committed)
        if pool in claim.slots:
            slot = claim.slots[pool]
            return PageExtent(slot.indices, slot.epochs, tuple(firsts), tuple(ends))
        indices = claim.tables[pool][numbers.start : numbers.stop]
        whole = len(indices) == len(numbers) and NO_PAGE not in indices
        assert whole, f"{pool} lacks state of committed positions"
        epochs = tuple(Epoch(e) for e in claim.epochs[pool][numbers.start : numbers.stop])
        return PageExtent(tuple(indices), epochs, tuple(firsts), tuple(ends))

    def _make_room(self, needs: Mapping[str, int]) -> None:
        assert self.host is not None
        for pool, count in needs.items():
            lacking = count - self.host.allocators[pool].free
            if lacking > 0:
                self.tree.evict(Tier.HOST, pool, lacking)

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

    def settle(self, parked: SwappedState) -> None:
        """Take in a copy that has ended: all of it is there and is what was sealed, or it is lost."""
        if parked.place is SwapPlace.SAVING and parked.saved.done:
            if self._sound(parked):
                parked.turn(SwapEvent.SAVED)
                if self.keeper is not None:
                    self.keeper.seal_parked(parked)
            else:
                parked.turn(SwapEvent.FAILED)
                parked.saved.release()

    def _sound(self, parked: SwappedState) -> bool:
        if not parked.saved.complete:
            return False
        sums = parked.saved.digests
        if sums is None:
            return True
        whole = parked.positions // self.spec.page_tokens
        for pool in self._runs:
            sealed = parked.digests[pool]
            found = dict(zip(parked.numbers.get(pool, ()), sums.get(pool, ()), strict=True))
            bad = sorted(n for n in found.keys() & sealed.keys() if found[n] != sealed[n])
            if bad:
                parked.damage[pool] = bad
                return False
            parked.digests[pool] = sealed | {n: digest for n, digest in found.items() if n < whole}
        return True

    def store(self, parked: SwappedState, tokens: Sequence[int]) -> bool:
        """Begin to move it on to storage, so that its host memory becomes free; `tokens` are those of its positions.

        False where there is no storage, or nothing to tell it by on the way back.
        """
        if self.shelver is None or parked.saved.digests is None or not parked.storable:
            return False
        self.shelver.store(parked, chain_keys(tokens, self.spec.page_tokens, parked.prefix.salt))
        return True

    def fetch(self, parked: SwappedState, tokens: Sequence[int]) -> None:
        """Begin to bring what is stored back to the host. Raises `CapacityError` without room there."""
        assert self.shelver is not None
        self.shelver.fetch(parked, chain_keys(tokens, self.spec.page_tokens, parked.prefix.salt))

    def discard(self, parked: SwappedState) -> None:
        """Give back the host's memory. Idempotent; what an operation still touches is free when that has ended."""
        if parked.place is SwapPlace.GONE:
            return
        parked.turn(SwapEvent.DISCARD)
        self._parked.remove(parked)
        self.tree.unlock(parked.above)
        if not parked.saved.done:
            self._launched.hold(parked.saved)
        parked.saved.release()

    # ------------------------------------------------------------ back

    def unpark(self, parked: SwappedState, positions: int) -> SwapInProgress | None:
        """Lease what `positions` positions take in every pool, and begin to bring the parked state there.

        None without room, and nothing is taken. Raises `StaleLease` when the tree has lost what it kept of it, and
        `RuntimeError` where the device refuses.
        """
        assert parked.place is SwapPlace.HOST, f"{parked.owner} is {parked.place}"
        here = self._same(parked.prefix, parked.digests[self.full], None) if self._may_load_back else []
        depth = sum(map(len, here))
        if depth < parked.kept:
            raise StaleLease(f"{parked.owner}: pages that the tree kept for it were condemned")
        wanted = {self.full: range(depth)}
        lock, _ = self.tree.hold(parked.prefix.head(depth), wanted, parked.owner, host=True)
        loads = self._loads(lock)
        needs = self._needs(parked, depth, positions)
        leases = None
        if self._may_load(loads):
            leases = self._lease({pool: count + loads[pool] for pool, count in needs.items()}, parked.owner)
        if leases is None:
            self.tree.unlock(lock)
            return None
        self._plan(lock, loads, leases)
        claim = Allocation(parked.owner, parked.prefix, parked.pages, lock, depth, CachedTokens())
        self._enter(claim, parked, leases)
        self._claims[lock] = claim
        try:
            return SwapInProgress(parked, claim, self._bring(parked, claim))
        except RuntimeError:
            self.release(claim)
            raise

    def _needs(self, parked: SwappedState, depth: int, positions: int) -> dict[str, int]:
        """What is leased in each pool: of windows, as much as the request ever holds at once."""
        numbers, pages = due(self.spec, parked.positions), self.pools.pages_for(parked.positions)
        needs = {self.full: max(self.pools.pages_for(positions), pages) - depth}
        for pool, most in self._windows.items():
            needs[pool] = max(len(numbers[pool]), min(most, len(numbers[pool]) + parked.pages - pages))
        return needs | dict.fromkeys(self._slots, 1)

    def _enter(self, claim: Allocation, parked: SwappedState, leases: Mapping[str, Lease]) -> None:
        """The tables of a claim that comes back: what the tree has, then what is restored, then room to grow."""
        numbers = due(self.spec, parked.positions) | {self.full: range(claim.depth, claim.depth)}
        for pool in self._runs:
            first = numbers[pool].start
            claim.tables[pool], claim.epochs[pool] = page_numbers([NO_PAGE] * first), page_numbers([0] * first)
            for part in claim.lock.of(pool):
                if part.tier is Tier.DEVICE:
                    claim.put(pool, self.tree.start(part.node), part.lease.indices, part.lease.epochs)
            claim.put(pool, first, leases[pool].indices, leases[pool].epochs)
            claim.runs[pool] = [PageRun(first, leases[pool])]
            claim.digests[pool] = self._seals(claim, pool, parked)
        claim.slots = {pool: leases[pool] for pool in self._slots}

    def _seals(self, claim: Allocation, pool: str, parked: SwappedState) -> list[int | None]:
        """Digests of its whole pages, as far as all of them are known: `KVCacheManager.seal` takes the others again."""
        known, table = parked.digests[pool], claim.tables[pool]
        out: list[int | None] = []
        for n in range(parked.positions // self.spec.page_tokens):
            if table[n] != NO_PAGE and n not in known:
                break
            out.append(known[n] if table[n] != NO_PAGE else None)
        return out

    def _bring(self, parked: SwappedState, claim: Allocation) -> RestoredPages:
        assert self.host is not None
        into, only = {}, {}
        for pool, numbers in parked.numbers.items():
            first = max(numbers.start, claim.depth) if pool == self.full else numbers.start
            chosen = range(first, numbers.stop)
            only[pool] = [n - numbers.start for n in chosen]
            into[pool] = self._extent(claim, pool, chosen, parked.positions)
        chunk = self.config.move_chunk_bytes
        return restore(self._device, parked.saved, self.pools, into, chunk_bytes=chunk, only=only)

    def back(self, returning: SwapInProgress) -> bool:
        """Of a restore that is `done`: whether all of it has come as it went."""
        assert returning.restored.done
        return returning.restored.complete


def _part(node: TreeNode, component: str, tier: Tier | None) -> NodePart | None:
    return node.part(component) if tier is None else node.parts[tier].get(component)


def _known(digests: Sequence[int | None], whole: int) -> dict[int, int]:
    return {n: digest for n, digest in enumerate(digests[:whole]) if digest is not None}
