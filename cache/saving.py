"""Device to host, host to storage: what the tree holds is copied down, parents before children.

A copy locks what it reads and becomes the node's part on the host once it is complete, not before. What is on the
host goes on to storage, page by page as it lies there; a write locks its pages too. Short of room, a copy is left
out and counted, and one that fails is given up: nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.device import DEVICE, HOST, Completion, Device, Op, Stream, attempt, failure, spans
from cache.leases import Lease
from cache.moves import Move
from cache.nodes import Lock, Node, Part, Tier
from cache.pools import PoolSet
from cache.shelf import Pending, Shelf
from cache.storage import Outcome
from cache.tree import PrefixTree
from contracts.errors import CapacityError
from contracts.orders import Kept

_WRITE_PAGES = 64
"""Pages in one write to storage, which has a deadline: long ones would let everything behind them wait."""


@dataclass(eq=False)
class _Save:
    """One copy to the host under way: `lock` keeps the parts that it reads, `leases` hold what it writes."""

    completions: list[Completion]
    lock: Lock
    above: Lock
    leases: dict[str, Lease]


@dataclass(eq=False)
class _Write:
    puts: list[tuple[Sequence[Kept], Pending[list[Outcome]]]]
    lock: Lock


class Saver:
    """Copies nodes of one tree to its host pools, and on to storage where there is one."""

    def __init__(
        self,
        tree: PrefixTree,
        pools: PoolSet,
        host: PoolSet,
        device: Device,
        shelf: Shelf | None,
        chunk_bytes: int,
    ) -> None:
        self._tree, self._pools, self._host, self._device = tree, pools, host, device
        self._shelf, self._chunk_bytes = shelf, chunk_bytes
        self._saves: list[_Save] = []
        self._writes: list[_Write] = []
        self.counters = {"pages_saved": 0.0, "saves_left_out": 0.0, "saves_failed": 0.0}
        self.counters |= {"pages_stored": 0.0, "stores_failed": 0.0}

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

    def save(self, nodes: Iterable[Node]) -> bool:
        """Copy what the host lacks of `nodes`, given parents first; False when there was no room for all of it.

        A node whose parent neither is nor comes to the host is left out, unless the host is written back to.
        """
        coming = {s.lock for s in self._saves}
        parts: list[Part] = []
        for node in nodes:
            if not self._may_come(node, coming, parts):
                continue
            here = node.parts[Tier.DEVICE]
            ordered = [here[c.name] for c in self._tree.components if c.name in here]
            parts += [p for p in ordered if p.component not in node.parts[Tier.HOST] and not (p.locks & coming)]
        return not parts or self._copy(parts)

    def _may_come(self, node: Node, coming: set[Lock], parts: Sequence[Part]) -> bool:
        full, parent = self._tree.full, node.parent
        if full not in node.parts[Tier.DEVICE] or not self._tree.linked(node):
            return False
        if self._tree.write_back or parent is None or parent.parent is None or full in parent.parts[Tier.HOST]:
            return True
        above = parent.parts[Tier.DEVICE].get(full)
        return above is not None and (bool(above.locks & coming) or above in parts)

    def _copy(self, parts: list[Part]) -> bool:
        above = self._tree.keep([p.node.parts[Tier.DEVICE][self._tree.full] for p in parts], "above a save")
        lock = self._tree.keep(parts, "save")
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
        move = Move.of(sources, targets)
        pieces = move.chunks(self._pools.spec, self._chunk_bytes)
        self._saves.append(_Save([self._submit(piece) for piece in pieces], lock, above, leases))
        self.poll()
        return True

    def _submit(self, piece: Move) -> Completion:
        ours, theirs = self._pools, self._host
        reads = spans(DEVICE, {part.pool: part.sources for part in piece.parts})
        writes = spans(HOST, {part.pool: part.targets for part in piece.parts})
        op = Op("save", Stream.SAVE, reads, writes)
        return attempt(self._device, op, lambda: ours.copy(piece, theirs))

    def lease(self, component: str, count: int) -> Lease:
        """Pages (or slots) of the host, for which the tree gives up what it can; raises `CapacityError`."""
        allocator = self._host.allocators[component]
        if count > allocator.free:
            self._tree.evict(Tier.HOST, component, count - allocator.free)
        return allocator.lease(count, f"save {component}")

    def _let_go(self, lock: Lock, above: Lock, leases: dict[str, Lease]) -> None:
        self._tree.unlock(lock)
        self._tree.unlock(above)
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
            results = [outcome for _, put in write.puts for outcome in put.result()]
            stored = sum(outcome.ok for outcome in results)
            self._tell(write, results)
            self.counters["pages_stored"] += stored
            self.counters["stores_failed"] += len(results) - stored
            self._tree.unlock(write.lock)

    def _tell(self, write: _Write, results: Sequence[Outcome]) -> None:
        """Full nodes that storage now has all of."""
        pages = [page for put_by, _ in write.puts for page in put_by]
        good = {page.key for page, outcome in zip(pages, results, strict=True) if outcome.ok}
        for part in write.lock.of(self._tree.full):
            if part.live and self._tree.linked(part.node) and good.issuperset(part.node.keys):
                self._tree.on_change(part.node, Tier.STORAGE, True)

    def _finish(self, save: _Save) -> None:
        tree, arrived = self._tree, []
        for part in save.lock.parts:
            lease = save.leases[part.component].split(len(part), f"host {part.component}")
            if self._wanted(part):
                arrived.append(tree.attach(part.node, part.component, Tier.HOST, lease, part.digests))
                self.counters["pages_saved"] += len(part) if part.component == tree.full else 0
            else:
                lease.release()
        if self._shelf is not None and arrived:
            self._store(self._shelf, arrived)

    def _wanted(self, part: Part) -> bool:
        """Whether the host has a place for it still: things may have changed since the copy began."""
        node, full = part.node, self._tree.full
        if part.component in node.parts[Tier.HOST] or not self._tree.linked(node):
            return False
        if part.component != full:
            return full in node.parts[Tier.HOST]
        parent = node.parent
        assert parent is not None
        return self._tree.write_back or parent.parent is None or full in parent.parts[Tier.HOST]

    def _store(self, shelf: Shelf, parts: Sequence[Part]) -> None:
        full = self._tree.full
        lock = self._tree.keep([*(p.node.parts[Tier.HOST][full] for p in parts), *parts], "store")
        pages = [page for part in parts for page in self._pages(part)]
        digests = [digest for part in parts for digest in part.digests]
        batches = [slice(at, at + _WRITE_PAGES) for at in range(0, len(pages), _WRITE_PAGES)]
        self._writes.append(_Write([(pages[b], shelf.put(pages[b], digests[b])) for b in batches], lock))

    def _pages(self, part: Part) -> list[Kept]:
        size, start = self._host.spec.page_tokens, self._tree.start(part.node)
        if self._tree.component(part.component).point:
            (at,), end = part.lease.indices, (start + len(part.node)) * size
            return [Kept(part.component, part.node.keys[-1], at, end, end)]
        return [
            Kept(part.component, key, at, first, first + size)
            for key, at, first in zip(
                part.node.keys, part.lease.indices, range(start * size, (start + len(part)) * size, size), strict=True
            )
        ]

    def check(self) -> list[str]:
        saves = {s.lock for s in self._saves}
        found = []
        for node in self._tree.nodes():
            for part in node.parts[Tier.DEVICE].values():
                if len(part.locks & saves) > 1:
                    found.append(f"tree: {part.component} of {len(part)} is saved twice at once")
        for save in self._saves:
            for name, lease in save.leases.items():
                if len(lease) != sum(len(p) for p in save.lock.of(name)):
                    found.append(f"save: {name}: {len(lease)} leased on the host for other parts than it reads")
        return found
