"""Backup, host to storage: parts of the tree on the host are written to storage, page by page.

The tree remembers the parts of which storage lacks pages (`TreeAccounts.unstored`). Of these, as many are written at a
time as the storage queue has room for, and only these are locked. A prefix is found in storage from its first page on,
so no page is written before the page above it: a node waits for the node above, and pages that are written together are
one `WriteChain`. Pages that storage didn't take are offered again after rests that get longer, and all nodes below them
wait. Pages that leave the host before their turn are counted (`TreeAccounts.missed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode
from twinpool.cache.storage.io_queue import WriteChain
from twinpool.cache.storage.page_store import PageStore, PendingResult
from twinpool.cache.storage.storage_backend import ObjectOutcome
from twinpool.contracts.block_hash import KEY_BYTES
from twinpool.contracts.messages.rank_orders import StoredPage

_WRITE_PAGES = 64
"""Pages in one write to storage, which has a deadline: long ones would let everything behind them wait."""
_RUN_PAGES = 32 * _WRITE_PAGES
"""Pages of one path, about, that are locked and submitted together."""
_IN_LINE = 64
"""Writes that wait or run at once, of the 256 that may wait in the storage queue."""
_LOOKED_AT = 64
"""Nodes that are looked at for one that can be written now."""
_LONGEST_REST = 6
"""How often a rest is doubled at most."""


@dataclass(eq=False)
class _StorageWrite:
    """Pages of one path that are being written to storage, in the order in which they are written."""

    puts: list[tuple[Sequence[_Unit], PendingResult[list[ObjectOutcome]]]]
    lock: NodeLock


class _Unit(NamedTuple):
    """A page or a slot to be written."""

    page: StoredPage
    digest: int
    number: int
    """The page's number in the sequence; for a slot, the number of the last page before it."""


class StorageBackup:
    """Writes the host tier of one tree to storage. Without storage (`page_store` None) it does nothing."""

    def __init__(
        self, tree: RadixTree, spec: PoolSetSpec, page_store: PageStore | None, now: Callable[[], float], retry_s: float
    ) -> None:
        """`now` is in seconds; `retry_s` is the first rest, in seconds, of a part that storage didn't take. It doubles
        with each further try that stores nothing of the part."""
        self._tree, self._spec, self._page_store = tree, spec, page_store
        self._now, self._retry_s = now, retry_s
        self._writes: list[_StorageWrite] = []
        self._in_line = 0
        """Writes to storage that wait or run."""
        self._ready: dict[TreeNode, None] = {}
        """Nodes of which storage lacks pages, and has all above them; nodes that have left the tree may be among
        them."""
        self.counters = {"pages_stored": 0.0, "stores_failed": 0.0}

    @property
    def busy(self) -> bool:
        return bool(self._writes)

    @property
    def locks(self) -> int:
        """The number of the tree's locks that writes hold."""
        return len(self._writes)

    def offer(self, parts: Iterable[NodePart]) -> None:
        """Remember `parts`, which have come to the host (given parents first), to be written when it is their turn."""
        if self._page_store is None:
            return
        unstored, full = self._tree.accounts.unstored, self._tree.full
        for part in parts:
            unstored[part] = 0, 0.0
            above = part.node.parent
            if above is None or above.parts[Tier.HOST].get(full) not in unstored:
                self._ready[part.node] = None

    def poll(self) -> None:
        """Take in the writes that have ended, and begin others. To be called once a round."""
        for write in [w for w in self._writes if all(put.done for _, put in w.puts)]:
            self._writes.remove(write)
            self._in_line -= len(write.puts)
            self._take_in(write)
            self._tree.locks.unlock(write.lock)
        self._write()

    def _write(self) -> None:
        """Begin to write as many of the pages that storage lacks as its queue has room for."""
        if len(self._ready) > 2 * len(self._tree.accounts.unstored) + _LOOKED_AT:
            self._ready = {node: None for node in self._ready if self._lacking(node)}
        while self._page_store is not None and self._in_line < _IN_LINE and (parts := self._next_run()):
            full, together = self._tree.full, WriteChain()
            lock = self._tree.locks.keep([*(p.node.parts[Tier.HOST][full] for p in parts), *parts], "store")
            units = list(islice(chain.from_iterable(map(self._units, parts)), _RUN_PAGES))
            write = _StorageWrite([], lock)
            for at in range(0, len(units), _WRITE_PAGES):
                some = units[at : at + _WRITE_PAGES]
                put = self._page_store.put([u.page for u in some], [u.digest for u in some], together)
                write.puts.append((some, put))
            self._in_line += len(write.puts)
            self._writes.append(write)

    def _next_run(self) -> list[NodePart]:
        """Returns parts of one path that may be written now, in order: no node above them lacks pages in storage, and
        none of them is resting or being written. Empty where the first `_LOOKED_AT` nodes have none."""
        unstored, now = self._tree.accounts.unstored, self._now()
        busy = {write.lock for write in self._writes}
        if not self._ready and not busy and unstored:
            self._ready[self._uppermost(next(iter(unstored)).node)] = None
        for node in list(islice(self._ready, _LOOKED_AT)):
            del self._ready[node]
            top = self._uppermost(node)
            mine = [part for part in self._lacking(top) if not self._complete(part)]
            if mine and all(p.locks.isdisjoint(busy) and unstored[p][1] <= now for p in mine):
                return self._run(top, mine, busy)
            if mine:
                # The node has its turn again when the others have had theirs.
                self._ready[top] = None
        return []

    def _uppermost(self, node: TreeNode) -> TreeNode:
        """Returns the uppermost of the nodes above `node` of which storage lacks full pages, as far as these follow
        each other without a gap; `node` itself if there is none."""
        full, unstored = self._tree.full, self._tree.accounts.unstored
        while node.parent is not None and node.parent.parts[Tier.HOST].get(full) in unstored:
            node = node.parent
        return node

    def _lacking(self, node: TreeNode) -> list[NodePart]:
        """Returns the host parts of a node of which storage lacks pages, the full part first."""
        here, unstored = node.parts[Tier.HOST], self._tree.accounts.unstored
        return [here[c.name] for c in self._tree.components if here.get(c.name) in unstored]

    def _complete(self, part: NodePart) -> bool:
        """Whether storage has all of a part by now. If so, the part is forgotten, observers are told (of a full part),
        and the nodes below become ready."""
        accounts = self._tree.accounts
        if part.stored < len(part):
            return False
        del accounts.unstored[part]
        if part.component == accounts.full:
            accounts.tell(part.node, Tier.STORAGE, True)
            for child in part.node.children.values():
                if child.parts[Tier.HOST].get(accounts.full) in accounts.unstored:
                    self._ready[child] = None
        return True

    def _run(self, node: TreeNode, parts: list[NodePart], busy: set[NodeLock]) -> list[NodePart]:
        """Returns `parts` of `node`, and the parts of the nodes below it up to the first branch, as far as one run
        goes."""
        out, pages = list(parts), node.pages
        while len(node.children) == 1 and pages < _RUN_PAGES:
            (node,) = node.children.values()
            more = self._lacking(node)
            if not more or not all(part.locks.isdisjoint(busy) for part in more):
                break
            self._ready.pop(node, None)
            out += more
            pages += node.pages
        return out

    def _units(self, part: NodePart) -> Iterator[_Unit]:
        """Yields the pages (or the slot) of a part that storage lacks, in order."""
        size, node, pool = self._spec.page_tokens, part.node, part.component
        if self._tree.component(pool).point:
            end = (node.start + node.pages) * size
            kept = StoredPage(pool, node.chain[-KEY_BYTES:], part.lease.indices[0], end, end)
            yield _Unit(kept, part.digests[0], node.start + node.pages - 1)
            return
        keys, indices, digests = node.chain, part.lease.indices, part.digests
        for i in range(part.stored, len(part)):
            number = node.start + i
            key = keys[KEY_BYTES * i : KEY_BYTES * (i + 1)]
            yield _Unit(StoredPage(pool, key, indices[i], number * size, (number + 1) * size), digests[i], number)

    def _take_in(self, write: _StorageWrite) -> None:
        """Record, in the parts of a run that has ended, which pages storage has now. Halves of nodes that were split
        meanwhile are among these parts."""
        unstored = self._tree.accounts.unstored
        good: set[tuple[str, int]] = set()
        bad: set[tuple[str, int]] = set()
        for units, put in write.puts:
            for unit, outcome in zip(units, put.result(), strict=True):
                (good if outcome.ok else bad).add((unit.page.pool, unit.number))
        self.counters["pages_stored"] += len(good)
        self.counters["stores_failed"] += len(bad)
        for part in write.lock.parts:
            if part not in unstored:
                continue
            point = self._tree.component(part.component).point
            start = part.node.start + (part.node.pages - 1 if point else 0)
            before = part.stored
            while part.stored < len(part) and (part.component, start + part.stored) in good:
                part.stored += 1
            if self._complete(part):
                continue
            if (part.component, start + part.stored) in bad:
                tries = unstored[part][0] if part.stored == before else 0
                rest = self._retry_s * 2 ** min(tries, _LONGEST_REST)
                unstored[part] = tries + 1, self._now() + rest
            self._ready[self._uppermost(part.node)] = None

    def check(self) -> list[str]:
        found, unstored = [], len(self._tree.accounts.unstored)
        if len(self._ready) > 2 * unstored + 2 * _LOOKED_AT:
            found.append(f"store: {len(self._ready)} nodes are remembered for {unstored} parts")
        if self._in_line != sum(len(write.puts) for write in self._writes):
            found.append(f"store: {self._in_line} writes are counted and others are in line")
        return found
