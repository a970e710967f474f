"""Device to host, host to storage: what the tree holds is copied down, parents before children.

A copy locks what it reads and becomes the node's part on the host once it is complete, not before. Short of room, a
copy is left out and counted, and one that fails is given up: nothing depends on it.

What is on the host goes on to storage, page by page as it lies there. The tree remembers of which parts storage lacks
something; of those as much is written at a time as storage's line has room for, and only that is locked. What is found
in storage is found from the first page on, so no page is written before the one above it: a node waits for the node
above, what is written together is one chain, and what storage didn't take is offered again, later and later, with all
that is below it waiting. What leaves the host before its turn is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from cache.device.device_port import DEVICE, HOST, Completion, Device, DeviceOp, DeviceStream, attempt, failure, spans
from cache.memory.page_moves import PageMove
from cache.pool.page_allocator import Lease
from cache.pool.pool_set import PoolSet
from cache.prefix_cache.radix_tree import RadixTree
from cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode
from cache.storage.io_queue import WriteChain
from cache.storage.page_store import PageStore, PendingResult
from cache.storage.storage_backend import ObjectOutcome
from contracts.block_hash import KEY_BYTES
from contracts.errors import CapacityError
from contracts.messages.rank_orders import StoredPage

_WRITE_PAGES = 64
"""Pages in one write to storage, which has a deadline: long ones would let everything behind them wait."""
_RUN_PAGES = 32 * _WRITE_PAGES
"""Pages of one path that are written one after the other without looking in between."""
_IN_LINE = 64
"""Writes that wait or run at once, of the 256 that a line takes."""
_LOOKED_AT = 64
"""Parts that are looked at for one that can be written now."""
_LONGEST_REST = 6
"""Times that a rest is doubled."""


@dataclass(eq=False)
class _Backup:
    """One copy to the host under way: `lock` keeps the parts that it reads, `leases` hold what it writes."""

    completions: list[Completion]
    lock: NodeLock
    above: NodeLock
    leases: dict[str, Lease]


@dataclass(eq=False)
class _StorageWrite:
    """Pages of one path on their way to storage, in the order in which they are written."""

    puts: list[tuple[Sequence[_Unit], PendingResult[list[ObjectOutcome]]]]
    lock: NodeLock


class _Unit(NamedTuple):
    """A page or a slot to be written."""

    page: StoredPage
    digest: int
    number: int
    """Of the page in the sequence; of a slot, that of the last page before it."""


class HostBackup:
    """Copies nodes of one tree to its host pools, and on to storage where there is one."""

    def __init__(
        self,
        tree: RadixTree,
        pools: PoolSet,
        host: PoolSet,
        device: Device,
        page_store: PageStore | None,
        chunk_bytes: int,
        now: Callable[[], float],
        retry_s: float,
    ) -> None:
        """`now` is in seconds."""
        self._tree, self._pools, self._host, self._device = tree, pools, host, device
        self._now, self._retry_s = now, retry_s
        self._page_store, self._chunk_bytes = page_store, chunk_bytes
        self._saves: list[_Backup] = []
        self._writes: list[_StorageWrite] = []
        self._in_line = 0
        """Writes to storage that wait or run."""
        self._ready: dict[TreeNode, None] = {}
        """Nodes of which storage lacks something, and has all above them; some that are gone may be among them."""
        self.counters = {"pages_saved": 0.0, "saves_left_out": 0.0, "saves_failed": 0.0}
        self.counters |= {"pages_stored": 0.0, "stores_failed": 0.0}

    @property
    def waiting(self) -> int:
        """Parts on the host of which storage lacks something still."""
        return len(self._tree.accounts.unstored)

    @property
    def busy(self) -> bool:
        return bool(self._saves or self._writes)

    @property
    def locks(self) -> int:
        """Locks in the tree that it holds."""
        return 2 * len(self._saves) + len(self._writes)

    def leased(self, component: str) -> int:
        """Host pages (or slots) of copies under way."""
        return sum(len(s.leases[component]) for s in self._saves if component in s.leases)

    def save(self, nodes: Iterable[TreeNode]) -> bool:
        """Copy what the host lacks of `nodes`, given parents first; False when there was no room for all of it.

        A node whose parent neither is nor comes to the host is left out, unless the host is written back to.
        """
        coming = {s.lock for s in self._saves}
        parts: dict[NodePart, None] = {}
        names = [c.name for c in self._tree.components]
        for node in nodes:
            device, host = node.parts
            if device.keys() <= host.keys() or not self._may_come(node, coming, parts):
                continue
            ordered = [device[name] for name in names if name in device and name not in host]
            parts |= dict.fromkeys(p for p in ordered if p.locks.isdisjoint(coming))
        return not parts or self._copy(list(parts))

    def _may_come(self, node: TreeNode, coming: set[NodeLock], parts: Container[NodePart]) -> bool:
        full, parent = self._tree.full, node.parent
        if full not in node.parts[Tier.DEVICE] or not node.linked:
            return False
        if self._tree.write_back or parent is None or parent.parent is None or full in parent.parts[Tier.HOST]:
            return True
        above = parent.parts[Tier.DEVICE].get(full)
        return above is not None and (above in parts or not above.locks.isdisjoint(coming))

    def _copy(self, parts: list[NodePart]) -> bool:
        above = self._tree.locks.keep([p.node.parts[Tier.DEVICE][self._tree.full] for p in parts], "above a save")
        lock = self._tree.locks.keep(parts, "save")
        leases: dict[str, Lease] = {}
        try:
            for component in self._tree.components:
                count = sum(len(p) for p in lock.of(component.name))
                if count:
                    leases[component.name] = self.lease(component.name, count)
        except CapacityError:
            self._let_go(lock, above, leases)
            if len(parts) > 1:
                # The beginning of a prefix is of use without its end.
                self._copy(parts[: len(parts) // 2])
            else:
                self.counters["saves_left_out"] += len(parts[0])
            return False
        sources = {name: [i for p in lock.of(name) for i in p.lease.indices] for name in leases}
        targets = {name: lease.indices for name, lease in leases.items()}
        move = PageMove.of(sources, targets)
        pieces = move.chunks(self._pools.spec, self._chunk_bytes)
        self._saves.append(_Backup([self._submit(piece) for piece in pieces], lock, above, leases))
        self.poll()
        return True

    def _submit(self, piece: PageMove) -> Completion:
        ours, theirs = self._pools, self._host
        reads = spans(DEVICE, {part.pool: part.sources for part in piece.parts})
        writes = spans(HOST, {part.pool: part.targets for part in piece.parts})
        op = DeviceOp("save", DeviceStream.SAVE, reads, writes)
        return attempt(self._device, op, lambda: ours.copy(piece, theirs))

    def lease(self, component: str, count: int) -> Lease:
        """Pages (or slots) of the host, for which the tree gives up what it can; raises `CapacityError`."""
        allocator = self._host.allocators[component]
        if count > allocator.free:
            self._tree.eviction.evict(Tier.HOST, component, count - allocator.free)
        return allocator.lease(count, f"save {component}")

    def _let_go(self, lock: NodeLock, above: NodeLock, leases: dict[str, Lease]) -> None:
        self._tree.locks.unlock(lock)
        self._tree.locks.unlock(above)
        for lease in leases.values():
            lease.release()

    def poll(self) -> None:
        """Take in what is complete."""
        # In order: a parent's copy was begun before its child's, and comes to the host before it.
        while self._saves and all(c.done for c in self._saves[0].completions):
            save = self._saves.pop(0)
            if not any(failure(c) for c in save.completions):
                self._finish(save)
            else:
                self.counters["saves_failed"] += 1
            self._let_go(save.lock, save.above, save.leases)
        for write in [w for w in self._writes if all(put.done for _, put in w.puts)]:
            self._writes.remove(write)
            self._in_line -= len(write.puts)
            self._take_in(write)
            self._tree.locks.unlock(write.lock)
        self._write()

    def _finish(self, save: _Backup) -> None:
        accounts, arrived = self._tree.accounts, []
        for part in save.lock.parts:
            lease = save.leases[part.component].split(len(part), f"host {part.component}")
            if self._wanted(part):
                arrived.append(accounts.attach(part.node, part.component, Tier.HOST, lease, part.digests))
                self.counters["pages_saved"] += len(part) if part.component == accounts.full else 0
            else:
                lease.release()
        if self._page_store is not None:
            for part in arrived:
                accounts.unstored[part] = 0, 0.0
                above = part.node.parent
                if above is None or above.parts[Tier.HOST].get(accounts.full) not in accounts.unstored:
                    self._ready[part.node] = None

    def _wanted(self, part: NodePart) -> bool:
        """Whether the host has a place for it still: things may have changed since the copy began."""
        node, full = part.node, self._tree.full
        if part.component in node.parts[Tier.HOST] or not node.linked:
            return False
        if part.component != full:
            return full in node.parts[Tier.HOST]
        parent = node.parent
        assert parent is not None
        return self._tree.write_back or parent.parent is None or full in parent.parts[Tier.HOST]

    # ------------------------------------------------------------ on to storage

    def _write(self) -> None:
        """Begin to write as much of what storage lacks as its line has room for."""
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
        """Parts of one path that may be written now, in order: nothing that they hang on is waiting, resting or under
        way. Empty where there are none among the first that are looked at."""
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
                # It has its turn again when the others have had theirs.
                self._ready[top] = None
        return []

    def _uppermost(self, node: TreeNode) -> TreeNode:
        """The uppermost of the nodes from `node` upwards of which storage lacks full pages; itself, if it is none."""
        full, unstored = self._tree.full, self._tree.accounts.unstored
        while node.parent is not None and node.parent.parts[Tier.HOST].get(full) in unstored:
            node = node.parent
        return node

    def _lacking(self, node: TreeNode) -> list[NodePart]:
        """What storage lacks of a node, the full part first."""
        here, unstored = node.parts[Tier.HOST], self._tree.accounts.unstored
        return [here[c.name] for c in self._tree.components if here.get(c.name) in unstored]

    def _complete(self, part: NodePart) -> bool:
        """Whether storage has all of a part by now: then nothing is left to be done for it."""
        accounts = self._tree.accounts
        if part.stored < len(part):
            return False
        del accounts.unstored[part]
        if part.component == accounts.full:
            accounts.on_change(part.node, Tier.STORAGE, True)
            for child in part.node.children.values():
                if child.parts[Tier.HOST].get(accounts.full) in accounts.unstored:
                    self._ready[child] = None
        return True

    def _run(self, node: TreeNode, parts: list[NodePart], busy: set[NodeLock]) -> list[NodePart]:
        """`parts` of `node`, and of those below it that nothing divides, as far as one run goes."""
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
        """What storage lacks of a part, in order."""
        size, node, pool = self._host.spec.page_tokens, part.node, part.component
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
        """A run has ended: its parts, halves of nodes that were split meanwhile included, know what storage has."""
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
        saves = {s.lock for s in self._saves}
        found = []
        for node in self._tree.accounts.nodes():
            for part in node.parts[Tier.DEVICE].values():
                if len(part.locks & saves) > 1:
                    found.append(f"tree: {part.component} of {len(part)} is saved twice at once")
        if len(self._ready) > 2 * len(self._tree.accounts.unstored) + 2 * _LOOKED_AT:
            found.append(f"save: {len(self._ready)} nodes are remembered for {self.waiting} parts to store")
        if self._in_line != sum(len(write.puts) for write in self._writes):
            found.append(f"save: {self._in_line} writes are counted and others are in line")
        for save in self._saves:
            for name, lease in save.leases.items():
                if len(lease) != sum(len(p) for p in save.lock.of(name)):
                    found.append(f"save: {name}: {len(lease)} leased on the host for other parts than it reads")
        return found
