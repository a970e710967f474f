"""A KV cache manager's state: pools, tree and tiers, as the workers see them.

A request's way through it:

    prefetch   queued: what storage has of its prefix starts to come to the host
    allocate   admitted: lock what the tiers have, lease the rest, all pools or none; loads are planned
    launch     the loads of all allocations of this round begin, layer by layer; forward passes wait at the gates
    seal       a step was committed: finished pages get their digests
    share      finished pages go into the tree, and from there down the tiers
    grow       pools get pages for the positions of the next step
    slide      pages that the window has left are used again further on, or go back
    snapshot   the recurrent state is copied aside at a page boundary, for the tree
    swap out   off the device, to leased host memory; `swap_in` brings it back (`cache.manager.swapping`)
    release    the one way out: locks, pages, slots and snapshots go back, whatever happened

`poll` takes in what has completed; it never waits. Only committed positions may be sealed, shared or snapshotted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from cache.allocation.allocation import Allocation, CachedTokens, StateSnapshot, numbers, spread
from cache.allocation.block_table import NO_PAGE, BlockTable, PageRun
from cache.device.device_port import DEVICE, PageSpanUse, failure
from cache.manager.swapping import SwapOut
from cache.memory.required_pages import due, missing
from cache.pool.page_allocator import Lease
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.prefix_cache.tree_node import NodePart, PageOffer, Tier, TreeNode, digests_of
from cache.tiers.prefetch_request import PrefetchRequest

SNAPSHOTS = 2
"""Snapshots of a request that aren't in the tree yet: they alternate."""


class KVCacheManager(SwapOut):
    """See the module's prose. Single-threaded."""

    # ------------------------------------------------------------ admission

    def prefetch(self, prefix: TokenPrefix, owner: str = "") -> PrefetchRequest | None:
        """Start to bring what storage has of `prefix` to the host; None where there is nothing to wait for."""
        if self.prefetcher is None or not len(prefix):
            return None
        if self.backup is not None:
            # What comes from storage hangs below what is there, so that must be on the host as well.
            self.backup.save(self.tree.match(prefix).path)
        return self.prefetcher.start(prefix, owner)

    def may_run(self, prefetch: PrefetchRequest) -> bool:
        """Whether a request need not wait for its prefetch any longer, by the stop policy."""
        return self.prefetcher is None or self.prefetcher.may_run(prefetch)

    def prefetch_deadline(self, prefetch: PrefetchRequest) -> float | None:
        """When `may_run` changes although nothing arrives."""
        return self.prefetcher.deadline(prefetch) if self.prefetcher is not None else None

    def stop_prefetch(self, prefetch: PrefetchRequest) -> None:
        """Its request is gone, or has taken what it wanted. Idempotent."""
        if self.prefetcher is not None:
            self.prefetcher.release(prefetch)

    def allocate(
        self, prefix: TokenPrefix, positions: int, owner: str, *, reusable: int, prefetch: PrefetchRequest | None = None
    ) -> Allocation | None:
        """Take state for `positions` positions: at most `reusable` pages of `prefix` from the tiers, the rest leased.

        All pools or none: None when there isn't room now, with nothing taken.
        """
        allocation = self._allocate(prefix, positions, owner, reusable, prefetch)
        if allocation is None and reusable and not self._allocations:
            # Alone, it may be its own prefix that leaves no room for the rest: then it does without.
            allocation = self._allocate(prefix, positions, owner, 0, prefetch)
        return allocation

    def _allocate(
        self, prefix: TokenPrefix, positions: int, owner: str, reusable: int, prefetch: PrefetchRequest | None
    ) -> Allocation | None:
        match = self.tree.match(prefix.head(reusable))
        tier = Tier.HOST if self._worth_loading(match) else Tier.DEVICE
        depth = match.depth if tier is Tier.HOST else match.device_depth
        pages = self.pools.pages_for(positions)
        own = self._own(dict.fromkeys(self._runs, pages - depth))
        if any(count > self.pools.allocators[pool].total for pool, count in own.items()):
            return None
        lock = self.tree.lock(match, owner, tier=tier)
        loads = self._loads(lock)
        if (
            not self._may_load(loads)
            or (leases := self._lease({pool: own[pool] + loads[pool] for pool in own}, owner)) is None
        ):
            self.tree.locks.unlock(lock)
            return None
        self._plan(lock, loads, leases)
        loaded = depth - match.device_depth
        stored = min(loaded, prefetch.gained) if prefetch is not None else 0
        if prefetch is not None:
            self.stop_prefetch(prefetch)
        size = self.spec.page_tokens
        cached = CachedTokens((depth - loaded) * size, (loaded - stored) * size, stored * size)
        self._count(cached)
        return self._open(Allocation(owner, prefix, pages, lock, depth, cached), leases)

    def _own(self, pages: Mapping[str, int]) -> dict[str, int]:
        """What a request leases for so many pages that nobody has: of windows, as many as it ever holds at once."""
        own = {pool: min(count, self._windows.get(pool, count)) for pool, count in pages.items()}
        return own | dict.fromkeys(self._slots, 1)

    def _open(self, allocation: Allocation, leases: Mapping[str, Lease]) -> Allocation:
        for pool in self._runs:
            held = allocation.lock.on_device(pool)
            allocation.enter(pool, held, allocation.depth)
            allocation.digests[pool] = self._digests(held, allocation.depth)
            allocation.put(pool, allocation.depth, leases[pool].indices, leases[pool].epochs)
            allocation.runs[pool] = [PageRun(allocation.depth, leases[pool])]
        allocation.slots = {pool: leases[pool] for pool in self._slots}
        self._allocations[allocation.lock] = allocation
        self._fresh.append(allocation)
        return allocation

    def launch(self) -> None:
        """Begin the loads of all allocations since the last call, and put their recurrent states into their slots."""
        if self.load_back is not None:
            self.load_back.launch()
        fresh, self._fresh = self._fresh, []
        for allocation in fresh:
            if not allocation.released:
                for pool in self._slots:
                    self._start_slot(allocation, pool)

    # ------------------------------------------------------------ hand-over to this worker

    def preallocate(
        self, prefix: TokenPrefix, prompt: int, positions: int, owner: str, most: int | None = None
    ) -> tuple[Allocation, dict[str, Lease]] | None:
        """Take state for a prompt of `prompt` positions that is handed over, and for `positions` in all.

        `most`: positions that it may come to, for which `grow` leases as they come; of windows and recurrent states
        all that it ever holds at once is leased now. What the tree has on the device is kept, component by component;
        the leases are for what `lacking` names and for what follows, in that order, and belong to whoever receives
        until `adopt`. None without room.
        """
        reserved = self._preallocate(prefix, prompt, positions, owner, most or positions)
        if reserved is None and len(prefix) and not self._allocations:
            reserved = self._preallocate(prefix.head(0), prompt, positions, owner, most or positions)
        return reserved

    def _preallocate(
        self, prefix: TokenPrefix, prompt: int, positions: int, owner: str, most: int
    ) -> tuple[Allocation, dict[str, Lease]] | None:
        wanted = due(self.spec, prompt)
        lock, held = self.tree.hold(prefix, wanted, owner, host=self.load_back is not None and self._may_load_back)
        loads = self._loads(lock)
        lacking = missing(wanted, held)
        pages, pages_here = self.pools.pages_for(most), self.pools.pages_for(prompt)
        needs = self._own({pool: len(lacking[pool]) + pages - pages_here for pool in self._runs})
        needs[self.full] = len(lacking[self.full]) + self.pools.pages_for(positions) - pages_here
        leases = (
            self._lease({pool: n + loads[pool] for pool, n in needs.items()}, owner) if self._may_load(loads) else None
        )
        if leases is None:
            self.tree.locks.unlock(lock)
            return None
        self._plan(lock, loads, leases)
        depth = lacking[self.full].start
        size = self.spec.page_tokens
        from_host = min(loads[self.full], depth) * size
        cached = CachedTokens(min(prompt, depth * size - from_host), from_host)
        self._count(cached)
        allocation = Allocation(owner, prefix, pages, lock, depth, cached, lacking=lacking)
        for pool in self._runs:
            self._enter_held(allocation, pool, wanted[pool])
        self._allocations[lock] = allocation
        return allocation, leases

    def _enter_held(self, allocation: Allocation, pool: str, wanted: range) -> None:
        allocation.enter(pool, allocation.lock.on_device(pool))
        allocation.digests[pool], allocation.runs[pool] = [], []
        lacking, table, marks = allocation.lacking[pool], allocation.tables[pool], allocation.epochs[pool]
        # What lies before what is wanted, behind it, and between what lacks isn't its.
        del table[wanted.stop :], marks[wanted.stop :]
        for gap in (range(min(wanted.start, len(table))), range(lacking.start, min(lacking.stop, len(table)))):
            table[gap.start : gap.stop] = marks[gap.start : gap.stop] = numbers([NO_PAGE] * len(gap))
        while table and table[-1] == NO_PAGE:
            del table[-1], marks[-1]

    def on_device(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` the tree has on the device."""
        there = 0
        for node, pages in self.tree.walked(prefix):
            if self.full not in node.parts[Tier.DEVICE]:
                break
            there += pages
        return there

    def commit_transfer(
        self, allocation: Allocation, prompt: int, leases: Mapping[str, Lease], digests: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Everything that was lacking has come into `leases`, verified, with these `digests` by pool and number."""
        whole = prompt // self.spec.page_tokens
        for pool in self._runs:
            lacking, lease = allocation.lacking[pool], leases[pool]
            received = lease.split(len(lacking), allocation.owner)
            for first, part in ((lacking.start, received), (self.pools.pages_for(prompt), lease)):
                allocation.put(pool, first, part.indices, part.epochs)
                allocation.runs[pool].append(PageRun(first, part))
            known = self._digests(allocation.lock.on_device(pool), whole)
            for number, digest in digests.get(pool, {}).items():
                if number < whole:
                    known[number] = digest
            pages = allocation.tables[pool][:whole]
            allocation.digests[pool] = [d if page != NO_PAGE else None for d, page in zip(known, pages, strict=True)]
        for pool in self._slots:
            allocation.slots[pool] = leases[pool]
            if not allocation.lacking[pool]:
                self._start_slot(allocation, pool)

    @staticmethod
    def _digests(parts: Sequence[NodePart], whole: int) -> list[int | None]:
        """Those of the first `whole` pages of a sequence, of which these parts are there."""
        known: list[int | None] = spread(parts, list(digests_of(parts)), None)
        del known[whole:]
        known += [None] * (whole - len(known))
        return known

    # ------------------------------------------------------------ from tree to tree

    def hold_for_push(self, prefix: TokenPrefix, owner: str) -> Allocation:
        """Keep what the device's tree has of the full pool's first pages, to be written to another worker.

        `depth` of the allocation says how many those are; nothing else is in it.
        """
        wanted = {self.full: range(len(prefix))}
        lock, held = self.tree.hold(prefix, wanted, owner, host=False)
        depth = len(held[self.full])
        allocation = self._pages_only(Allocation(owner, prefix, depth, lock, depth, CachedTokens()))
        allocation.lacking = {self.full: range(depth, len(prefix))}
        self._enter_held(allocation, self.full, wanted[self.full])
        allocation.digests[self.full] = self._digests(lock.on_device(self.full), depth)
        return allocation

    def reserve_for_pull(self, prefix: TokenPrefix, owner: str, *, spare: bool) -> tuple[Allocation, Lease] | None:
        """Room for what the device's tree lacks of these pages of the full pool, which another worker is to write.

        With `spare`, only pages that hold nothing. None without room, or where nothing lacks.
        """
        wanted = {self.full: range(len(prefix))}
        lock, held = self.tree.hold(prefix, wanted, owner, host=False)
        lacking = missing(wanted, held)[self.full]
        room = lacking and not (spare and len(lacking) > self.pools.allocators[self.full].free)
        leases = self._lease({self.full: len(lacking)}, owner) if room else None
        if leases is None:
            self.tree.locks.unlock(lock)
            return None
        allocation = self._pages_only(Allocation(owner, prefix, len(prefix), lock, lacking.start, CachedTokens()))
        allocation.lacking = {self.full: lacking}
        return allocation, leases[self.full]

    def _pages_only(self, allocation: Allocation) -> Allocation:
        for pool in self._runs:
            allocation.tables[pool], allocation.epochs[pool], allocation.digests[pool], allocation.runs[pool] = (
                numbers(),
                numbers(),
                [],
                [],
            )
        self._allocations[allocation.lock] = allocation
        return allocation

    def insert_pulled(self, allocation: Allocation, lease: Lease, digests: Mapping[int, int]) -> None:
        """What was borrowed has come, verified, with these digests by number: the tree's now. Ends the allocation."""
        lacking = allocation.lacking[self.full]
        offer = PageOffer(lacking.start, lease, [digests[n] for n in lacking])
        self.tree.insert(allocation.prefix, {self.full: [offer]}, Tier.DEVICE)
        lease.release()
        self.free(allocation)

    # ------------------------------------------------------------ steps

    def extend(self, allocation: Allocation, end: int) -> int:
        """Give it pages for positions up to `end`; returns how far they go by now, at most `end`.

        Less where a pool has none left that the tree could spare, and in a window where steps under way still have to
        be committed before it moves on.
        """
        for pool in self._runs:
            table = allocation.tables[pool]
            if len(table) * self.spec.page_tokens < end:
                self._extend_pool(allocation, pool, self.pools.pages_for(end) - len(table))
            end = min(end, len(table) * self.spec.page_tokens)
        return end

    def _extend_pool(self, allocation: Allocation, pool: str, lacking: int) -> None:
        """Up to `lacking` more pages: of a window, what it has set aside and what is left of its share."""
        spare = allocation.spare.get(pool)
        if spare is not None and len(spare):
            taken = spare.split(min(lacking, len(spare)), allocation.owner)
            lacking -= len(taken)
            self._append(allocation, pool, taken)
        if pool in self._windows:
            lacking = min(lacking, self._windows[pool] - allocation.own(pool))
        leases = self._lease({pool: lacking}, allocation.owner) if lacking > 0 else None
        if leases is not None:
            self._append(allocation, pool, leases[pool])

    def _append(self, allocation: Allocation, pool: str, lease: Lease) -> None:
        """Put these pages behind the table of `pool`."""
        runs, first = allocation.runs[pool], len(allocation.tables[pool])
        allocation.put(pool, first, lease.indices, lease.epochs)
        if runs and runs[-1].end == first:
            last = runs.pop()
            first, lease = last.first, self.pools.allocators[pool].join([last.lease, lease], allocation.owner)
        runs.append(PageRun(first, lease))

    def block_tables(self, allocation: Allocation, start: int, end: int) -> dict[str, BlockTable]:
        """What a pass over positions `start .. end-1` sees of each pool; of a window, from the first page it needs."""
        stop = self.pools.pages_for(end)
        out = {}
        for pool in self._runs:
            window = self.spec.by_name[pool].window_tokens
            first = max(0, start - window + 1) // self.spec.page_tokens if window else 0
            out[pool] = BlockTable(first, allocation.tables[pool][first:stop], allocation.epochs[pool][first:stop])
        return out | {pool: BlockTable(0, lease.indices, lease.epochs) for pool, lease in allocation.slots.items()}

    # ------------------------------------------------------------ what a committed step leaves

    def seal(self, finished: Sequence[tuple[Allocation, int]]) -> None:
        """Digest the pages that are whole at these committed lengths (positions) and weren't before."""
        size = self.spec.page_tokens
        for pool in self._runs:
            todo: list[tuple[Allocation, int]] = []
            for allocation, committed in finished:
                digests, table = allocation.digests[pool], allocation.tables[pool]
                first = len(digests)
                digests += [None] * max(0, committed // size - first)
                todo += [(allocation, page) for page in range(first, len(digests)) if table[page] != NO_PAGE]
            indices = [allocation.tables[pool][page] for allocation, page in todo]
            firsts = [page * size for _, page in todo]
            self._device.touch("seal", reads=[PageSpanUse(DEVICE, pool, indices)])
            found = self.pools.digest(pool, indices, firsts, [at + size for at in firsts])
            for (allocation, page), digest in zip(todo, found, strict=True):
                allocation.digests[pool][page] = digest

    def tail(self, allocation: Allocation, committed: int) -> dict[str, int]:
        """The digests of the last, partly filled page at `committed` positions, by pool; empty at a page boundary."""
        size = self.spec.page_tokens
        page = committed // size
        if committed % size == 0:
            return {}
        return {
            pool: self.pools.digest(pool, [allocation.tables[pool][page]], [page * size], [committed])[0]
            for pool in self._runs
        }

    def states(self, allocation: Allocation, committed: int) -> dict[str, int]:
        """The digests of the recurrent states after `committed` positions, by pool: of all that was launched."""
        out = {}
        for pool, lease in allocation.slots.items():
            self._device.touch("seal state", reads=[PageSpanUse(DEVICE, pool, lease.indices)])
            found = self.pools.digest(pool, lease.indices, [committed], [committed + 1])
            out[pool] = found[0]
        return out

    def cache_pages(
        self, allocation: Allocation, prefix: TokenPrefix, priority: int = 0, *, full_only: bool = False
    ) -> None:
        """Give the tree the sealed pages of `prefix` that it lacks, and its snapshots; they stay locked for it.

        `full_only`: no pages of windows and no snapshots. An allocation that goes on uses the pages again that its
        windows leave, and those that the tree has it couldn't.
        """
        assert not allocation.invalid, "what was computed from damaged state is nobody's to share"
        sealed = min(len(prefix), len(allocation.digests[self.full]))
        prefix = prefix.head(sealed)
        runs, slots = ([self.full], []) if full_only else (self._runs, self._slots)
        offers: dict[str, list[PageOffer]] = {pool: self._run_offers(allocation, pool, sealed) for pool in runs}
        offers |= {pool: self._snapshot_offers(allocation, pool, sealed) for pool in slots}
        self.tree.insert(prefix, offers, Tier.DEVICE, priority)
        for pool in runs:
            allocation.runs[pool] = [
                run for old in allocation.runs[pool] for run in _regroup(old, allocation.tables[pool])
            ]
        for pool in slots:
            held = allocation.snapshots.get(pool, [])
            allocation.snapshots[pool] = [s for s in held if len(s.lease)]
            for taken in (s for s in held if not len(s.lease)):
                taken.lease.release()
        walked = self.tree.walked(prefix)
        self._keep(allocation, walked)
        self._save([node for node, _ in walked])

    def _run_offers(self, allocation: Allocation, pool: str, sealed: int) -> list[PageOffer]:
        offers = []
        for run in allocation.runs[pool]:
            digests = allocation.digests[pool][run.first : min(run.end, sealed)]
            whole = [d for d in digests if d is not None]
            assert len(whole) == len(digests), f"a page of {pool} is neither sealed nor given back"
            if whole:
                offers.append(PageOffer(run.first, run.lease, whole))
        return offers

    def _snapshot_offers(self, allocation: Allocation, pool: str, sealed: int) -> list[PageOffer]:
        """Snapshots that are there: those under way wait for the next time, those that failed are nothing."""
        there = [s for s in allocation.snapshots.get(pool, ()) if s.completion.done and s.depth <= sealed]
        there = [s for s in there if failure(s.completion) is None]
        ends = [s.depth * self.spec.page_tokens for s in there]
        slots = [s.lease.indices[0] for s in there]
        self._device.touch("seal slots", reads=[PageSpanUse(DEVICE, pool, slots)])
        found = self.pools.digest(pool, slots, ends, ends)
        return [PageOffer(s.depth, s.lease, (digest,)) for s, digest in zip(there, found, strict=True)]

    def _keep(self, allocation: Allocation, walked: Sequence[tuple[TreeNode, int]]) -> None:
        """Lock what the tree has taken over from the allocation's tables."""
        for node, pages in walked:
            start, here = node.start, node.parts[Tier.DEVICE]
            mine = [
                part
                for pool in self._runs
                if (part := here.get(pool)) is not None and allocation.lock not in part.locks and pages == node.pages
                and allocation.tables[pool][start : start + pages] == numbers(part.lease.indices)
            ]  # fmt: skip
            full = here.get(self.full)
            if mine and full is not None and full not in mine and allocation.lock not in full.locks:
                mine.insert(0, full)
            for part in mine:
                self.tree.locks.add(allocation.lock, part)

    def free_window_pages(self, allocation: Allocation, committed: int) -> None:
        """Give back the window pages that no position from the last page boundary on can see.

        As many as are still to come are leased again at once, under new epochs.
        """
        for pool in self._runs:
            window = self.spec.by_name[pool].window_tokens
            if not window:
                continue
            boundary = committed // self.spec.page_tokens * self.spec.page_tokens
            first = max(0, boundary - window + 1) // self.spec.page_tokens
            kept = []
            for run in allocation.runs[pool]:
                gone = max(0, min(first, run.end) - run.first)
                run.lease.split(gone, allocation.owner).release()
                if len(run.lease):
                    kept.append(PageRun(run.first + gone, run.lease))
                else:
                    run.lease.release()
                for page in range(run.first, run.first + gone):
                    allocation.tables[pool][page], allocation.epochs[pool][page] = NO_PAGE, 0
                    if page < len(allocation.digests[pool]):
                        allocation.digests[pool][page] = None
            allocation.runs[pool] = kept
            self._set_aside(allocation, pool)

    def _set_aside(self, allocation: Allocation, pool: str) -> None:
        """Lease again what the allocation has still to come, up to what it may hold at once: what it gave back."""
        spare = allocation.spare.get(pool)
        to_come = allocation.pages - len(allocation.tables[pool]) - (len(spare) if spare is not None else 0)
        again = min(to_come, self._windows[pool] - allocation.own(pool), self.pools.allocators[pool].free)
        if again > 0:
            more = self.pools.allocators[pool].lease(again, allocation.owner)
            join = self.pools.allocators[pool].join
            allocation.spare[pool] = join([spare, more], allocation.owner) if spare is not None else more

    def snapshot(self, allocation: Allocation, committed: int) -> bool:
        """Copy the recurrent state aside, as it is after `committed` positions (whole pages): what was launched up to
        there and nothing more has been. False, and nothing happens, without a slot to spare."""
        assert committed % self.spec.page_tokens == 0, "snapshots are taken at page boundaries"
        leases = self._lease(dict.fromkeys(self._slots, 1), f"snapshot of {allocation.owner}")
        if leases is None:
            return False
        for pool, lease in leases.items():
            copied = self._copy_slot(pool, allocation.slots[pool].indices[0], lease.indices[0])
            held = allocation.snapshots.setdefault(pool, [])
            held.append(StateSnapshot(committed // self.spec.page_tokens, lease, copied))
            while len(held) > SNAPSHOTS:
                self._give_back(held.pop(0))
        return True


def _regroup(run: PageRun, table: Sequence[int]) -> list[PageRun]:
    """What is left of a run after parts of its lease were taken, as runs without gaps."""
    indices = numbers(run.lease.indices)
    if indices:
        first = table.index(indices[0], run.first)
        if table[first : first + len(indices)] == indices:
            return [PageRun(first, run.lease)]
    left = set(indices)
    pages = [page for page in range(run.first, len(table)) if table[page] in left]
    assert len(pages) == len(left), "a leased page is missing from its table"
    breaks = [i for i, (a, b) in enumerate(pairwise(pages), 1) if b != a + 1]
    out = []
    for begin, end in reversed(list(zip([0, *breaks], [*breaks, len(pages)], strict=True))):
        if begin < end:
            out.append(PageRun(pages[begin], run.lease.split(end - begin, run.lease.owner, start=begin)))
    run.lease.release()
    return out[::-1]
