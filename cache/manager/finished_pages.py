"""Finished pages: sealed with their digests, shared with the tree, copied down the tiers; damaged ones taken out.

Only pages and states of committed positions are sealed and shared, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from twinpool.cache.allocation import NULL_PAGE, Allocation, PageRun, numbers
from twinpool.cache.device.device_port import DEVICE, Device, PageSpanUse, failure
from twinpool.cache.manager.running_pages import PageSupply
from twinpool.cache.manager.tier_set import NoBackup
from twinpool.cache.prefix_cache.tree_node import PageOffer, Tier, TokenPrefix, TreeNode
from twinpool.cache.tiers.backup import HostBackup
from twinpool.contracts.config.cache_config import CacheConfig


class FinishedPages:
    """Takes digests from the device's bytes, and gives sealed pages and snapshots to the tree and to the host."""

    def __init__(self, device: Device, supply: PageSupply, backup: HostBackup | NoBackup, config: CacheConfig) -> None:
        self._device, self._backup = device, backup
        self._pools, self._kinds, self._tree = supply.pools, supply.kinds, supply.tree
        self._write_policy, self._write_hits = config.write_policy, config.write_hits
        self.counters = {"pages_invalidated": 0.0}

    # ------------------------------------------------------------ seal

    def seal(self, finished: Sequence[tuple[Allocation, int]]) -> None:
        """Digest the pages of each allocation that have become whole at its committed length (positions)."""
        size = self._pools.spec.page_tokens
        begun: list[tuple[str, list[tuple[Allocation, int]], Callable[[], list[int]]]] = []
        for pool in self._kinds.paged:
            todo: list[tuple[Allocation, int]] = []
            for allocation, committed in finished:
                digests, table = allocation.digests[pool], allocation.tables[pool].pages
                first = len(digests)
                digests += [None] * max(0, committed // size - first)
                todo += [(allocation, page) for page in range(first, len(digests)) if table[page] != NULL_PAGE]
            indices = [allocation.tables[pool].pages[page] for allocation, page in todo]
            firsts = [page * size for _, page in todo]
            self._device.touch("seal", reads=[PageSpanUse(DEVICE, pool, indices)])
            if todo:
                begun.append((pool, todo, self._pools.digesting(pool, indices, firsts, [at + size for at in firsts])))
        # A device takes those of all pools while the first are waited for.
        for pool, todo, read in begun:
            for (allocation, page), digest in zip(todo, read(), strict=True):
                allocation.digests[pool][page] = digest

    def end_digests(self, allocation: Allocation, committed: int) -> dict[str, int]:
        """Digests of the last, partly filled pages and of the recurrent states at `committed` positions, by pool.

        No step may have been launched beyond `committed`.
        """
        begun = self._tail_digests(allocation, committed) | self._state_digests(allocation, committed)
        return {pool: read()[0] for pool, read in begun.items()}

    def _tail_digests(self, allocation: Allocation, committed: int) -> dict[str, Callable[[], list[int]]]:
        """Begins digests of the last, partly filled page at `committed` positions, by pool; none at a page boundary."""
        size = self._pools.spec.page_tokens
        page = committed // size
        if committed % size == 0:
            return {}
        return {
            pool: self._pools.digesting(pool, [allocation.tables[pool].pages[page]], [page * size], [committed])
            for pool in self._kinds.paged
        }

    def _state_digests(self, allocation: Allocation, committed: int) -> dict[str, Callable[[], list[int]]]:
        """Begins digests of the recurrent states by pool; a slot has the state after all launched positions."""
        out = {}
        for pool, lease in allocation.slots.items():
            self._device.touch("seal state", reads=[PageSpanUse(DEVICE, pool, lease.indices)])
            out[pool] = self._pools.digesting(pool, lease.indices, [committed], [committed + 1])
        return out

    # ------------------------------------------------------------ share

    def cache_pages(
        self,
        allocation: Allocation,
        prefix: TokenPrefix,
        priority: int = 0,
        *,
        full_only: bool = False,
        windows: bool = True,
    ) -> None:
        """Give the tree the allocation's sealed pages of `prefix` and its snapshots, where the tree lacks them.

        The pages stay locked for the allocation. `full_only`: no window pages and no snapshots; a running allocation
        reuses pages that its windows leave, which it couldn't if the tree owned them. `windows`: whether window pages
        are given, too.
        """
        assert not allocation.invalid, "what was computed from damaged state is nobody's to share"
        full = self._kinds.full
        sealed = min(len(prefix), len(allocation.digests[full]))
        prefix = prefix.head(sealed)
        paged: Sequence[str] = (full,) if full_only or not windows else self._kinds.paged
        states: Sequence[str] = () if full_only else self._kinds.states
        offers: dict[str, list[PageOffer]] = {pool: _page_offers(allocation, pool, sealed) for pool in paged}
        offers |= {pool: self._snapshot_offers(allocation, pool, sealed) for pool in states}
        self._tree.insert(prefix, offers, Tier.DEVICE, priority)
        for pool in paged:
            runs, table = allocation.runs[pool], allocation.tables[pool].pages
            allocation.runs[pool] = [run for old in runs for run in _regroup(old, table)]
        for pool in states:
            held = allocation.snapshots.get(pool, [])
            allocation.snapshots[pool] = [s for s in held if len(s.lease)]
            for taken in (s for s in held if not len(s.lease)):
                taken.lease.release()
        walked = self._tree.walked(prefix)
        self._lock(allocation, walked)
        self._save([node for node, _ in walked])

    def _snapshot_offers(self, allocation: Allocation, pool: str, sealed: int) -> list[PageOffer]:
        """Offer complete snapshots: one under way waits for the next call, a failed one is never offered."""
        there = [s for s in allocation.snapshots.get(pool, ()) if s.completion.done and s.depth <= sealed]
        there = [s for s in there if failure(s.completion) is None]
        ends = [s.depth * self._pools.spec.page_tokens for s in there]
        slots = [s.lease.indices[0] for s in there]
        self._device.touch("seal slots", reads=[PageSpanUse(DEVICE, pool, slots)])
        found = self._pools.digest(pool, slots, ends, ends)
        return [PageOffer(s.depth, s.lease, (digest,)) for s, digest in zip(there, found, strict=True)]

    def _lock(self, allocation: Allocation, walked: Sequence[tuple[TreeNode, int]]) -> None:
        """Lock for the allocation the parts that the tree has taken over from its tables."""
        for node, pages in walked:
            start, here = node.start, node.parts[Tier.DEVICE]
            mine = [
                part
                for pool in self._kinds.paged
                if (part := here.get(pool)) is not None
                and allocation.lock not in part.locks
                and pages == node.pages
                and allocation.tables[pool].pages[start : start + pages] == numbers(part.lease.indices)
            ]
            full = here.get(self._kinds.full)
            if mine and full is not None and full not in mine and allocation.lock not in full.locks:
                mine.insert(0, full)
            for part in mine:
                self._tree.locks.add(allocation.lock, part)

    def _save(self, nodes: Sequence[TreeNode]) -> None:
        """Back up to the host the nodes that the write policy wants there by now."""
        if self._write_policy != "back":
            through = self._write_policy == "through"
            self._backup.save(node for node in nodes if through or node.hits >= self._write_hits)

    def invalidate(self, prefix: TokenPrefix, page: int = 0) -> int:
        """Invalidate page `page` of `prefix` and all pages below; returns the number of pages invalidated."""
        count = self._tree.invalidate(prefix, page)
        self.counters["pages_invalidated"] += count
        return count


def _page_offers(allocation: Allocation, pool: str, sealed: int) -> list[PageOffer]:
    """Offers of the allocation's own pages of `pool` among the first `sealed`, one a run."""
    offers = []
    for run in allocation.runs[pool]:
        digests = allocation.digests[pool][run.first : min(run.end, sealed)]
        whole = [d for d in digests if d is not None]
        assert len(whole) == len(digests), f"a page of {pool} is neither sealed nor given back"
        if whole:
            offers.append(PageOffer(run.first, run.lease, whole))
    return offers


def _regroup(run: PageRun, table: Sequence[int]) -> list[PageRun]:
    """The rest of a run, after the tree took parts of its lease, as runs without gaps."""
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
