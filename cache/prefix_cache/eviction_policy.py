"""The eviction order: policies, and the queues that keep parts in the order of a policy.

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
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from twinpool.cache.prefix_cache.tree_components import TreeComponent
from twinpool.cache.prefix_cache.tree_node import IN_TREE, NodePart, QueueEntry, Tier, TreeNode

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
