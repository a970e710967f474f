"""Backup: parts of the tree are copied down, from the device to the host and from there to storage.

To the host, parents go before children. A copy locks the parts that it reads, and becomes the nodes' parts on the host
once it is complete, not before. When the host is full, a copy is left out and counted. A copy that fails is counted and
given up: nothing depends on it.

To storage, parts go page by page. The tree remembers the parts of which storage lacks pages (`TreeAccounts.unstored`).
Of these, as many are written at a time as the storage queue has room for, and only these are locked. A prefix is found
in storage from its first page on, so no page is written before the page above it: a node waits for the node above, and
pages that are written together are one `WriteChain`. Pages that storage didn't take are offered again after rests that
get longer, and all nodes below them wait. Pages that leave the host before their turn are counted
(`TreeAccounts.missed`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from twinpool.cache.device.device_port import Device, DeviceStream
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode
from twinpool.cache.storage.io_queue import WriteChain
from twinpool.cache.storage.page_store import PageStore, PendingResult
from twinpool.cache.storage.storage_backend import ObjectOutcome
from twinpool.cache.tiers.tier_copy import InFlightCopy, TierCopy
from twinpool.contracts.block_hash import KEY_BYTES
from twinpool.contracts.errors import CapacityError
from twinpool.contracts.messages.rank_orders import StoredPage


@dataclass(eq=False)
class _Backup:
    """One copy to the host in flight: `lock` keeps the parts that it reads, `above` the full parts of their nodes, and
    `leases` hold the host pages that it writes, by pool."""

    copy: InFlightCopy
    lock: NodeLock
    above: NodeLock
    leases: dict[str, Lease]


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
        """`now` is in seconds; `retry_s` is the first rest of a part that storage didn't take (`StorageBackup`)."""
        self._tree, self._host, self._chunk_bytes = tree, host, chunk_bytes
        self._copier = TierCopy(device, pools, host, DeviceStream.SAVE)
        self._storage = StorageBackup(tree, host.spec, page_store, now, retry_s)
        self._saves: list[_Backup] = []
        self._counters = {"pages_saved": 0.0, "saves_left_out": 0.0, "saves_failed": 0.0}

    @property
    def counters(self) -> dict[str, float]:
        return self._counters | self._storage.counters

    @property
    def busy(self) -> bool:
        return bool(self._saves) or self._storage.busy

    @property
    def locks(self) -> int:
        """The number of the tree's locks that copies to the host and writes to storage hold."""
        return 2 * len(self._saves) + self._storage.locks

    def leased(self, component: str) -> int:
        """Returns how many host pages (or slots) copies in flight hold."""
        return sum(len(s.leases[component]) for s in self._saves if component in s.leases)

    def save(self, nodes: Iterable[TreeNode]) -> bool:
        """Begin to copy the parts of `nodes` that the host lacks; False when the host had no room for all of them.

        `nodes` come parents first. A node whose parent neither is on the host nor being copied there is left out,
        unless the host is written back to.
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
                half = len(parts) // 2
                self._copy(parts[:half])
                parts = parts[half:]
            self._counters["saves_left_out"] += sum(map(len, parts))
            return False
        sources = {name: [i for p in lock.of(name) for i in p.lease.indices] for name in leases}
        targets = {name: lease.indices for name, lease in leases.items()}
        copy = self._copier.by_pieces("save", PageMove.of(sources, targets), self._chunk_bytes)
        self._saves.append(_Backup(copy, lock, above, leases))
        self.poll()
        return True

    def lease(self, component: str, count: int) -> Lease:
        """Lease host pages (or slots), evicting from the tree's host tier if need be; raises `CapacityError` if that
        isn't enough."""
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
        """Hang complete copies on their nodes, and go on with writes to storage. To be called once a round."""
        # In order: a parent's copy was begun before its child's, and comes to the host before it.
        while self._saves and self._saves[0].copy.done:
            save = self._saves.pop(0)
            if not save.copy.failed:
                self._finish(save)
            else:
                self._counters["saves_failed"] += 1
            self._let_go(save.lock, save.above, save.leases)
        self._storage.poll()

    def _finish(self, save: _Backup) -> None:
        accounts, arrived = self._tree.accounts, []
        for part in save.lock.parts:
            lease = save.leases[part.component].split(len(part), f"host {part.component}")
            if self._wanted(part):
                arrived.append(accounts.attach(part.node, part.component, Tier.HOST, lease, part.digests))
                self._counters["pages_saved"] += len(part) if part.component == accounts.full else 0
            else:
                lease.release()
        self._storage.offer(arrived)

    def _wanted(self, part: NodePart) -> bool:
        """Whether a copied part may still be hung on its node's host tier: the tree may have changed since the copy
        began."""
        node, full = part.node, self._tree.full
        if part.component in node.parts[Tier.HOST] or not node.linked:
            return False
        if part.component != full:
            return full in node.parts[Tier.HOST]
        parent = node.parent
        assert parent is not None
        return self._tree.write_back or parent.parent is None or full in parent.parts[Tier.HOST]

    def check(self) -> list[str]:
        saves = {s.lock for s in self._saves}
        found = []
        for node in self._tree.accounts.nodes():
            for part in node.parts[Tier.DEVICE].values():
                if len(part.locks & saves) > 1:
                    found.append(f"tree: {part.component} of {len(part)} is saved twice at once")
        for save in self._saves:
            for name, lease in save.leases.items():
                if len(lease) != sum(len(p) for p in save.lock.of(name)):
                    found.append(f"save: {name}: {len(lease)} leased on the host for other parts than it reads")
        return found + self._storage.check()


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
