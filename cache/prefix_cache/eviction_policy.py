"""Eviction, invalidation and locks: how state leaves the prefix tree, in which order, and what keeps it there.

A policy is one expression over a node, its rank; the lowest rank is evicted first. The rank may only grow while a node
lives, so that the queue can be lazy: an entry's rank is computed again when the entry comes up, and the entry is put
back when its rank has grown. A part that leaves the tree leaves the queue at once; a part that was used again and
unlocked changes its place. Entries that became empty are removed when they come to the front, a few at a time, and all
at once when they are more than a third of all.

Parts are mostly queued in the order in which they will be evicted: the part that was used last is unlocked last. These
stand in a line (a deque), where an entry costs the same however many there are. Only parts that come out of order go
through a heap, whose every pop looks at entries all over memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from twinpool.cache.prefix_cache.tree_accounts import TreeAccounts
from twinpool.cache.prefix_cache.tree_components import TreeComponent
from twinpool.cache.prefix_cache.tree_node import (
    IN_TREE,
    NO_LOCKS,
    NodeLock,
    NodePart,
    QueueEntry,
    Tier,
    TreeNode,
    subtree,
)

__all__ = ["POLICIES", "EvictionPolicy", "EvictionRank"]

EvictionRank = float | tuple[float, ...]
"""The value of a policy. All ranks of one policy are numbers, or all are tuples."""
EvictionPolicy = Callable[[TreeNode], EvictionRank]
"""Returns a node's rank in the order of eviction: the lowest is evicted first."""

POLICIES: dict[str, EvictionPolicy] = {
    "lru": lambda node: node.used,
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: node.created,
    "priority": lambda node: (node.priority, node.used),
    "slru": lambda node: (node.hits >= PROTECTED_HITS, node.used),
}
"""By name: least recently used, least frequently used, first in first out, lowest priority, and segmented LRU: nodes
that were hit twice outlive nodes that were hit less (Karedla et al. 1994)."""
PROTECTED_HITS = 2
"""The hits from which on `slru` protects a node."""
_EMPTY = 64
"""Empty entries that a queue may have however few parts it has."""
_CLEARED = 4
"""Empty entries that are taken off the front, at most, for each that becomes empty."""


class EvictionQueue:
    """The queue of parts of one component in one tier that may be evicted, in the order of a policy.

    An entry is [rank, number, part or None], in the line or in the heap; None marks an empty entry. The lower of the
    two first entries comes next. Line and heap together have at most 1.5 times as many entries as there are parts, and
    `_EMPTY` more.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._line: deque[QueueEntry] = deque()
        """Entries from the lowest to the highest."""
        self._heap: list[QueueEntry] = []
        self._live = 0
        self._number = 0

    def __len__(self) -> int:
        """The number of queued parts."""
        return self._live

    @property
    def places(self) -> int:
        """The number of entries, empty ones included."""
        return len(self._line) + len(self._heap)

    @property
    def _most(self) -> int:
        return self._live + self._live // 2 + _EMPTY

    def push(self, part: NodePart) -> None:
        """Queue `part`; does nothing if it is queued already."""
        if part.entry is None:
            self._number += 1
            part.entry = [self._policy(part.node), self._number, part]
            self._live += 1
            self._place(part.entry)

    def _place(self, entry: QueueEntry) -> None:
        if not self._line or self._line[-1] < entry:
            self._line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def refresh(self, part: NodePart) -> None:
        """Move a queued part to where its present rank belongs, so that `pop` needn't. A part that isn't queued is
        left alone."""
        entry = part.entry
        if entry is not None and entry[0] != self._policy(part.node):
            self.forget(part)
            self.push(part)

    def forget(self, part: NodePart) -> None:
        """Remove `part` from the queue, if it is queued."""
        entry = part.entry
        if entry is not None:
            entry[2] = None
            self._leave(part)
            for _ in range(_CLEARED):
                if self._line and self._line[0][2] is None:
                    self._line.popleft()
                if self._heap and self._heap[0][2] is None:
                    heapq.heappop(self._heap)

    def pop(self, may_go: Callable[[NodePart], bool]) -> NodePart | None:
        """Remove and return the next part for which `may_go` holds; None when there is none.

        Parts for which it doesn't hold leave the queue too: they are queued again when they are unlocked.
        """
        while self._line or self._heap:
            entry = self._take()
            part: NodePart | None = entry[2]
            if part is None:
                continue
            if not may_go(part):
                self._leave(part)
            elif (now := self._policy(part.node)) > entry[0]:
                entry[0] = now
                self._place(entry)
            else:
                self._leave(part)
                return part
        return None

    def _take(self) -> QueueEntry:
        """Remove and return the lowest entry, empty or not."""
        if not self._heap or (self._line and self._line[0] < self._heap[0]):
            return self._line.popleft()
        return heapq.heappop(self._heap)

    def _leave(self, part: NodePart) -> None:
        part.entry = None
        self._live -= 1
        if self.places > self._most:
            self._line = deque(entry for entry in self._line if entry[2] is not None)
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapq.heapify(self._heap)

    def _entries(self) -> Iterator[QueueEntry]:
        yield from self._line
        yield from self._heap

    def parts(self) -> Iterator[NodePart]:
        return (part for _, _, part in self._entries() if part is not None)

    def check(self) -> list[str]:
        """Recount the line and the heap; returns a line for each thing that is wrong."""
        found = []
        if sum(entry[2] is not None for entry in self._entries()) != self._live:
            found.append(f"it counts {self._live} parts and has others")
        if any(entry[2] is not None and entry[2].entry is not entry for entry in self._entries()):
            found.append("a part in it has its place elsewhere")
        if any(entry > following for entry, following in pairwise(self._line)):
            found.append("its line is out of order")
        if self.places > self._most:
            found.append(f"{self.places} places for {self._live} parts")
        return found


class EvictionOrder:
    """The parts of one tree that may be evicted, in a queue for each component in each tier."""

    def __init__(self, components: Sequence[TreeComponent], policy: EvictionPolicy) -> None:
        """`components`: the full one first."""
        self._full = components[0].name
        self.queues = {(tier, c.name): EvictionQueue(policy) for tier in IN_TREE for c in components}

    def offer(self, node: TreeNode, tier: Tier) -> None:
        """Queue the parts of `node` in `tier` that may be evicted."""
        parts = node.parts[tier]
        if len(parts) == 1 and node.below[tier]:
            return  # The one part is its full state, on which its children are built.
        for part in parts.values():
            if part.entry is None and self.may_go(part):
                self.queues[tier, part.component].push(part)

    def refresh(self, node: TreeNode, tier: Tier) -> None:
        """Move the queued parts of a node that was used: they are evicted later than their entries say."""
        for part in node.parts[tier].values():
            if part.entry is not None:
                self.queues[tier, part.component].refresh(part)

    def forget(self, part: NodePart) -> None:
        """Remove a part that has left the tree from its queue."""
        self.queues[part.tier, part.component].forget(part)

    def may_go(self, part: NodePart) -> bool:
        """Whether `part` may be evicted: its node holds it, and neither it nor any part that must go with it is
        locked."""
        if part.locks or not part.live:
            return False
        node, tier = part.node, part.tier
        if node.below[tier]:
            return part.component != self._full
        return not any(other.locks for other in node.parts[tier].values()) or self.goes_alone(part)

    def goes_alone(self, part: NodePart) -> bool:
        """Whether `part` is evicted without the rest of its node: the node has children in the tier, or its full
        state is locked. Never true of a full part."""
        if part.component == self._full:
            return False
        node, tier = part.node, part.tier
        return bool(node.below[tier] or node.parts[tier][self._full].locks)


SpillNode = Callable[[TreeNode], bool]
"""Called before a node that is on the device alone is dropped. True: it is being saved to the host, so keep it for
now."""


class TreeEviction:
    """Evicts state of one tree to make room, and invalidates damaged state. `order` says which part goes next."""

    def __init__(self, accounts: TreeAccounts, order: EvictionOrder) -> None:
        self._accounts = accounts
        self.order = order
        self._points = any(c.point for c in accounts.components)

    def evictable(self, component: str, tier: Tier = Tier.DEVICE) -> int:
        """Returns how many pages (or slots) of `component` in `tier` are not locked."""
        return self._accounts.sizes[tier, component] - self._accounts.protected[tier, component]

    def evict(self, tier: Tier, component: str, count: int, spill: SpillNode | None = None) -> int:
        """Free about `count` pages (or slots) of `component` in `tier`; returns how many. Locked parts stay.

        The result is higher than `count` where a part had to go whole, and lower where too little may go or is being
        spilled. A full part goes with everything that its leaf holds in `tier`; a window's or state's part goes alone
        where its node has children there, or full state that is locked. `spill` is called before a node that is on the
        device alone is dropped, with everything that hangs below it on the host. Where any of that is locked, the node
        stays until it has been spilled.
        """
        freed = coming = 0
        order, full = self.order, self._accounts.full
        queue = order.queues[tier, component]
        spared: list[NodePart] = []
        while freed + coming < count:
            part = queue.pop(order.may_go)
            if part is None:
                break
            node = part.node
            if order.goes_alone(part):
                freed += len(part)
                self._detach(part)
                continue
            last = tier is Tier.DEVICE and full not in node.parts[Tier.HOST]
            if last and spill is not None and (spill(node) or not order.may_go(part)):
                # All of the node is being saved, or as much as there was room for: parts that the save locks go later.
                spared.append(part)
                coming += len(part)
                continue
            if last and node.busy_below:
                queue.forget(part)  # A save without room for it has queued it again.
                spared.append(part)
                continue
            if order.goes_alone(part):
                # A save that had room for some of the node keeps its full state.
                freed += len(part)
                self._detach(part)
                continue
            spare = node.pages - (count - freed)
            if spare > 0 and component == full and not (self._points and self._has_point(node)):
                freed += self._drop_end(node, tier, spare)
                order.offer(node, tier)
                continue
            freed += len(part)
            self._drop_leaf(node, tier)
        for part in spared:
            order.offer(part.node, tier)
        return freed

    def _has_point(self, node: TreeNode) -> bool:
        return any(self._accounts.by_name[name].point for parts in node.parts for name in parts)

    def _detach(self, part: NodePart) -> None:
        self._accounts.detach(part)
        self.order.forget(part)

    def _drop_end(self, node: TreeNode, tier: Tier, pages: int) -> int:
        """Take all but the first `pages` pages of a leaf out of `tier`; returns how many those were."""
        count = node.pages - pages
        if node.parts[Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE]:
            self._drop_leaf(self._accounts.split_end(node, pages), tier)
            return count
        if node.children:
            self._drop_children(node)
        self._accounts.cut(node, tier, pages)
        return count

    def _drop_leaf(self, node: TreeNode, tier: Tier) -> None:
        """Take every part of a leaf out of `tier`, and unlink the node if no tier has it any more."""
        for part in list(node.parts[tier].values()):
            self._detach(part)
        if not any(node.parts):
            if node.children:
                self._drop_children(node)
            self._accounts.unlink(node)

    def _drop_children(self, node: TreeNode) -> None:
        """Take every node below `node` out of every tier."""
        for below in list(subtree(node))[:0:-1]:
            for tier in IN_TREE:
                for part in list(below.parts[tier].values()):
                    self._detach(part)
            self._accounts.unlink(below)

    # ------------------------------------------------------------ invalidation

    def invalidate(self, node: TreeNode) -> int:
        """Never again match `node` or a node below it: its state was found damaged.

        Unlocked state is freed at once, locked state with its last lock. Returns the number of pages invalidated; 0
        where the node was invalidated already, or has left the tree.
        """
        if not node.linked or node.parent is None:
            return 0
        nodes = self._accounts.detach_subtree(node)
        count = sum(gone.pages for gone in nodes)
        for gone in nodes:
            self.drop_invalidated(gone)
        return count

    def clear(self) -> int:
        """Invalidate the whole tree; returns the number of pages."""
        roots = list(self._accounts.roots.values())
        return sum(self.invalidate(child) for root in roots for child in list(root.children.values()))

    def drop_invalidated(self, node: TreeNode) -> None:
        """Free the tiers of an invalidated node in which no part is locked.

        Where nothing is left of the node, it is unlinked, and so are the empty nodes above it.
        """
        for tier in IN_TREE:
            if not any(p.locks for p in node.parts[tier].values()):
                for part in list(node.parts[tier].values()):
                    self._detach(part)
        while not node.children and not any(node.parts) and node.parent is not None:
            self._accounts.unlink(node)
            node = node.parent


class TreeLocks:
    """The locks of one tree. A locked part isn't evicted; an invalidated part is freed with its last lock."""

    def __init__(self, accounts: TreeAccounts, eviction: TreeEviction) -> None:
        self._accounts, self._eviction = accounts, eviction
        self.locked: set[NodeLock] = set()
        self._number = 0

    def __len__(self) -> int:
        """The number of locks that weren't given back yet."""
        return len(self.locked)

    def keep(self, parts: Iterable[NodePart], owner: str) -> NodeLock:
        """Lock exactly these parts; returns the lock, which `unlock` gives back.

        Copies lock the parts that they read or write. A part that occurs twice is locked once. `owner` is for logs.
        """
        self._number += 1
        lock = NodeLock(self._number, owner, [])
        self.locked.add(lock)
        self._add(lock, parts)
        return lock

    def add(self, lock: NodeLock, part: NodePart) -> None:
        """Lock `part` with `lock` as well. Does nothing where `lock` keeps it already."""
        self._add(lock, (part,))

    def _add(self, lock: NodeLock, parts: Iterable[NodePart]) -> None:
        accounts, mine = self._accounts, lock.parts
        alone, first, shared = frozenset((lock,)), len(mine), False
        before = after = NO_LOCKS
        for part in parts:
            locks = part.locks
            if locks is NO_LOCKS:
                part.locks = alone
            else:
                if locks is not before:
                    if lock in locks:
                        continue
                    before, after = locks, locks | alone
                part.locks, shared = after, True
            mine.append(part)
        added = mine[first:]
        fresh = [part for part in added if part.locks is alone] if shared else added
        self._protect(fresh, 1)
        for part in fresh if accounts.write_back else ():
            part.node.count_locked()
        offer = self._eviction.order.offer
        for part in added if len(accounts.components) > 1 else ():
            # Where full state is locked, the other parts of the node may be evicted alone.
            if len(part.node.parts[part.tier]) > 1:
                offer(part.node, part.tier)

    def unlock(self, lock: NodeLock) -> None:
        """Give back the parts that `lock` keeps. Idempotent."""
        if lock not in self.locked:
            return
        self.locked.remove(lock)
        accounts, order = self._accounts, self._eviction.order
        write_back, several = accounts.write_back, len(accounts.components) > 1
        free, ends = list[NodePart](), list[NodePart]()
        before = after = NO_LOCKS
        for part in lock.parts:
            if part.locks is not before:
                before, after = part.locks, (part.locks - {lock}) or NO_LOCKS
            part.locks = after
            if not after:
                free.append(part)
                if write_back:
                    part.node.count_unlocked()
            if several or not part.node.below[part.tier]:
                ends.append(part)
        self._protect(free, -1)
        for part in ends:
            order.offer(part.node, part.tier)
            order.refresh(part.node, part.tier)
        gone = [part.node for part in lock.parts if not part.node.linked] if accounts.invalid_roots else ()
        lock.parts.clear()
        for node in gone:
            self._eviction.drop_invalidated(node)

    def _protect(self, parts: Sequence[NodePart], sign: int) -> None:
        """Count `parts` as locked (`sign` 1), or as no longer locked (-1)."""
        left, protected = len(parts), self._accounts.protected
        for tier, name in protected:
            if left:
                counts = [part.lease.count for part in parts if part.tier is tier and part.component == name]
                protected[tier, name] += sign * sum(counts)
                left -= len(counts)
