"""What the prefix tree holds: nodes, their parts by tier, the locks on them, and what may be evicted.

The tree (`cache.tree`) decides where state hangs; this keeps the books. Every part is counted, every lock names what it
keeps, and every part that may go is in the queue of its tier and component: each is kept right where it changes, and
recomputed from scratch by `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cache.components import Component, components_of
from cache.eviction import POLICIES, Policy, Queue
from cache.leases import Lease
from cache.nodes import IN_TREE, Lock, Node, Part, Tier
from cache.prefix import KEY_BYTES
from cache.registry import PoolSetSpec

Spill = Callable[[Node], bool]
"""Asked before a node that is on the device alone would go; True: it is being written elsewhere, leave it."""


class TreeState:
    """The books of one tree; see the module's prose."""

    def __init__(self, spec: PoolSetSpec, policy: Policy = POLICIES["lru"], *, write_back: bool = False) -> None:
        self.spec = spec
        self.components = components_of(spec)
        self.full = self.components[0].name
        self.write_back = write_back
        self.roots: dict[str, Node] = {}
        self.locked: set[Lock] = set()
        self.condemned: list[Node] = []
        self.queues = {(t, c.name): Queue(policy) for t in IN_TREE for c in self.components}
        self.sizes = dict.fromkeys(self.queues, 0)
        """Pages (or slots) held, by tier and component."""
        self.protected = dict.fromkeys(self.queues, 0)
        """Those of them that locks keep."""
        self.on_change: Callable[[Node, Tier, bool], None] = lambda node, tier, there: None
        """Told when full state that can be matched has come to a tier (True), parents first, or gone from it: also
        when it was condemned, whether or not it is locked still. Splits change nothing and aren't told."""
        self.on_part: Callable[[Part, bool], None] = lambda part, there: None
        """Told of every part of every tier that was hung on a node (True), and of each that was condemned (False)."""
        self._by_name = {c.name: c for c in self.components}
        self._tick = 0
        self._version = 0
        self._number = 0

    # ------------------------------------------------------------ what hangs where

    def component(self, name: str) -> Component:
        return self._by_name[name]

    def linked(self, node: Node) -> bool:
        """Whether `node` can be matched: it hangs on a root, and nothing above it was condemned."""
        while node.parent is not None:
            if node.parent.children.get(node.raw[: self._page_bytes]) is not node:
                return False
            node = node.parent
        return True

    def salt(self, node: Node) -> str:
        """Under which salt it was inserted."""
        while node.parent is not None:
            node = node.parent
        return node.salt

    def start(self, node: Node) -> int:
        """The page number of its first page."""
        pages = 0
        while node.parent is not None:
            node = node.parent
            pages += len(node)
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, condemned ones included."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from subtree(child)
        for top in self.condemned:
            yield from subtree(top)

    # ------------------------------------------------------------ locks

    def keep(self, parts: Sequence[Part], owner: str) -> Lock:
        """Lock exactly these parts: for moves, which must not lose what they read or write."""
        self._number += 1
        lock = Lock(self._number, owner, [])
        self.locked.add(lock)
        for part in parts:
            self.add(lock, part)
        return lock

    def add(self, lock: Lock, part: Part) -> None:
        """Keep `part` too, once: it was loaded for whom the lock is."""
        if lock in part.locks:
            return
        if lock in part.locks:
            return
        if not part.locks:
            self.protected[part.tier, part.component] += len(part)
        part.locks.add(lock)
        lock.parts.append(part)
        if len(part.node.parts[part.tier]) > 1:
            # Where full state is kept, the rest of the node may go alone.
            self._queue(part.node, part.tier)

    def unlock(self, lock: Lock) -> None:
        """Give back what `lock` keeps. Idempotent."""
        if lock not in self.locked:
            return
        self.locked.remove(lock)
        for part in lock.parts:
            part.locks.discard(lock)
            if not part.locks:
                self.protected[part.tier, part.component] -= len(part)
        for part in lock.parts:
            self._queue(part.node, part.tier)
            if self.write_back:
                self._queue_above(part.node)
        lock.parts.clear()
        self.condemned = [node for node in self.condemned if not self._bury(node)]

    @property
    def locks(self) -> int:
        return len(self.locked)

    # ------------------------------------------------------------ parts

    def attach(self, node: Node, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> Part:
        """Hang a part on a node that has none there, and tell."""
        part = self._hang(node, name, tier, lease, digests)
        if name == self.full:
            self.on_change(node, tier, True)
        return part

    def _hang(self, node: Node, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> Part:
        assert name not in node.parts[tier], f"{name} is there already"
        self._version += 1
        part = node.parts[tier][name] = Part(node, name, tier, lease, digests)
        self.sizes[tier, name] += len(lease)
        if name == self.full:
            assert node.parent is not None
            node.parent.below[tier] += 1
            self._queue(node.parent, tier)
        for there in IN_TREE:
            self._queue(node, there)
        self.on_part(part, True)
        return part

    def _detach(self, part: Part) -> None:
        node, tier = part.node, part.tier
        assert not part.locks, "a locked part stays"
        self._version += 1
        if part.component == self.full:
            parent = node.parent
            assert parent is not None
            if parent.children.get(node.raw[: self._page_bytes]) is node:
                parent.below[tier] -= 1
                self._queue(parent, tier)
            # What was condemned is told as gone by then, and the same pages may have come anew since.
            if not self.condemned or self.linked(node):
                self.on_change(node, tier, False)
        del node.parts[tier][part.component]
        self.sizes[tier, part.component] -= len(part)
        part.lease.release()

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages`; returns the new upper half. The lower half stays the object it was."""
        parent, size = node.parent, pages * self._page_bytes
        assert parent is not None
        self._version += 1
        upper = Node(node.raw[:size], node.chain[: pages * KEY_BYTES], parent)
        upper.used, upper.created, upper.hits, upper.priority = node.used, node.created, node.hits, node.priority
        upper.children[node.raw[size : size + self._page_bytes]] = node
        if parent.children.get(node.raw[: self._page_bytes]) is node:
            parent.children[node.raw[: self._page_bytes]] = upper
        else:
            self.condemned[self.condemned.index(node)] = upper
        node.raw, node.chain, node.parent = node.raw[size:], node.chain[pages * KEY_BYTES :], upper
        for tier in IN_TREE:
            for component in self.components:
                part = node.parts[tier].get(component.name)
                head = None if part is None else component.split(part, upper, pages)
                if part is None or head is None:
                    continue
                upper.parts[tier][component.name] = head
                for lock in part.locks:
                    lock.parts.insert(lock.parts.index(part), head)
            upper.below[tier] = int(self.full in node.parts[tier])
        for tier in IN_TREE:
            self._queue(upper, tier)
            self._queue(node, tier)
        return upper

    @property
    def _page_bytes(self) -> int:
        return 4 * self.spec.page_tokens

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.children.get(node.raw[: self._page_bytes]) is node:
            del parent.children[node.raw[: self._page_bytes]]
            if parent.parent is None and not parent.children:
                self.roots = {salt: root for salt, root in self.roots.items() if root.children}

    # ------------------------------------------------------------ eviction

    def evict(self, tier: Tier, component: str, count: int, spill: Spill | None = None) -> int:
        """Free up to `count` pages (or slots) of `component` from `tier`; returns how many. Locked parts stay.

        A full part goes with everything that its leaf holds there; a window or a state alone where its node has more
        below it. `spill` is asked before a node that is nowhere else goes.
        """
        freed = coming = 0
        queue = self.queues[tier, component]
        spared: list[Part] = []
        while freed + coming < count:
            part = queue.pop(self.may_go)
            if part is None:
                break
            node = part.node
            if self._alone(part):
                freed += len(part)
                self._detach(part)
                continue
            last = tier is Tier.DEVICE and self.full not in node.parts[Tier.HOST]
            if last and spill is not None and spill(node):
                spared.append(part)
                coming += len(part)
                continue
            spare = len(node) - (count - freed)
            if spare > 0 and component == self.full and not self._has_point(node):
                self._queue(self._split(node, spare), tier)
            freed += len(part)
            self._drop_leaf(node, tier)
        for part in spared:
            self._queue(part.node, tier)
        return freed

    def evictable(self, component: str, tier: Tier = Tier.DEVICE) -> int:
        """Pages (or slots) that no lock keeps."""
        return self.sizes[tier, component] - self.protected[tier, component]

    def may_go(self, part: Part) -> bool:
        """Whether `part` is held by its node, and either it or its whole leaf is nobody's."""
        if not part.live or part.locks:
            return False
        return self._alone(part) or (self._leaf(part.node, part.tier) and self._free(part.node, part.tier))

    def _alone(self, part: Part) -> bool:
        """Whether it goes without the rest of its node: the node has more below it, or its full state is kept."""
        if part.component == self.full:
            return False
        full = part.node.parts[part.tier][self.full]
        return not self._leaf(part.node, part.tier) or bool(full.locks)

    def _leaf(self, node: Node, tier: Tier) -> bool:
        return not node.below[tier]

    def _free(self, node: Node, tier: Tier) -> bool:
        """Whether no lock keeps anything of it there, nor of what would go with it."""
        if any(p.locks for p in node.parts[tier].values()):
            return False
        orphans = node.children if tier is Tier.DEVICE and self.full not in node.parts[Tier.HOST] else {}
        return not any(
            p.locks for top in orphans.values() for n in subtree(top) for t in IN_TREE for p in n.parts[t].values()
        )

    def _has_point(self, node: Node) -> bool:
        return any(self._by_name[name].point for parts in node.parts for name in parts)

    def _queue(self, node: Node, tier: Tier) -> None:
        """Let what may go of a node be found by `evict`."""
        for part in node.parts[tier].values():
            if not part.queued and self.may_go(part):
                self.queues[tier, part.component].push(part)

    def _queue_above(self, node: Node) -> None:
        """A node that is on the device alone takes what hangs below it along, so it waits for that to be nobody's."""
        above = node
        while above.parent is not None and above.parent.parent is not None:
            above = above.parent
            self._queue(above, Tier.DEVICE)

    def _drop_leaf(self, node: Node, tier: Tier) -> None:
        """Take everything of a leaf out of `tier`, and the node with it if it is nowhere else."""
        for part in list(node.parts[tier].values()):
            self._detach(part)
        if not any(node.parts):
            for child in list(node.children.values()):
                self._drop_subtree(child)
            self._unlink(node)

    def _drop_subtree(self, top: Node) -> None:
        for node in reversed(list(subtree(top))):
            for tier in IN_TREE:
                for part in list(node.parts[tier].values()):
                    self._detach(part)
            self._unlink(node)

    # ------------------------------------------------------------ condemnation

    def condemn_node(self, node: Node) -> int:
        """`condemn` from the first page of `node` on; nothing happens when it is condemned already."""
        parent, first = node.parent, node.raw[: self._page_bytes]
        if not self.linked(node) or parent is None:
            return 0
        self._version += 1
        for gone in reversed(list(subtree(node))):
            for tier in IN_TREE:
                if self.full in gone.parts[tier]:
                    self.on_change(gone, tier, False)
                for part in gone.parts[tier].values():
                    self.on_part(part, False)
        del parent.children[first]
        for tier in IN_TREE:
            parent.below[tier] -= int(self.full in node.parts[tier])
            self._queue(parent, tier)
        count = sum(map(len, subtree(node)))
        self.condemned.append(node)
        self.condemned = [n for n in self.condemned if not self._bury(n)]
        return count

    def clear(self) -> int:
        """Condemn everything; returns the number of pages."""
        count = 0
        for root in list(self.roots.values()):
            count += sum(self.condemn_node(child) for child in list(root.children.values()))
        return count

    def _bury(self, top: Node) -> bool:
        """Free what nobody locks of a condemned node and below; whether that was all."""
        for node in reversed(list(subtree(top))):
            for tier in IN_TREE:
                if not any(p.locks for p in node.parts[tier].values()):
                    for part in list(node.parts[tier].values()):
                        self._detach(part)
            if not node.children and not any(node.parts) and node is not top:
                self._unlink(node)
        return not top.children and not any(top.parts)


def subtree(top: Node) -> Iterator[Node]:
    """`top` and all its descendants, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
