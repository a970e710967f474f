"""Which node goes first: policies, and the queues that keep them in order.

A policy is one expression over a node; smaller goes first. Its value may only grow while a node lives, so that the
queue can be lazy: an entry is looked at again when it comes up, and put back when it has become younger meanwhile. What
leaves the tree leaves the queue at once, and what was used again and let go changes its place. Places that became
empty are taken out when they come to the front, a few at a time, and all at once when they are a third of all.

Parts mostly come in the order in which they will go: what was used last is let go last. These stand in a line, where a
place costs the same however many there are; only what comes out of turn goes through a heap, whose every pop looks at
places all over memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from cache.prefix_cache.tree_components import TreeComponent
from cache.prefix_cache.tree_node import IN_TREE, NodePart, QueueEntry, Tier, TreeNode

__all__ = ["POLICIES", "EvictionPolicy", "EvictionRank"]

EvictionRank = float | tuple[float, ...]
"""A policy's are all numbers, or all tuples."""
EvictionPolicy = Callable[[TreeNode], EvictionRank]
"""Where a node stands in the order of eviction: the lowest goes first."""

POLICIES: dict[str, EvictionPolicy] = {
    "lru": lambda node: node.used,
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: node.created,
    "priority": lambda node: (node.priority, node.used),
    "slru": lambda node: (node.hits >= PROTECTED_HITS, node.used),
}
"""Least recently used, least frequently used, first in first out, lowest priority, and segmented LRU: what was hit
twice outlives what was seen once (Karedla et al. 1994)."""
PROTECTED_HITS = 2
"""So often hit, a node is protected by `slru`."""
_EMPTY = 64
"""Empty places that a queue may have however few others it has."""
_CLEARED = 4
"""Empty places that are taken off the front for each that becomes empty."""


class EvictionQueue:
    """Parts of one component in one tier that may be evicted, in the order of a policy.

    An entry is [rank, number, part or None], in the line or in the heap; the lower of their first ones is the next.
    Together they have at most half as many places again as there are parts, and some.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._line: deque[QueueEntry] = deque()
        """From the lowest to the highest."""
        self._heap: list[QueueEntry] = []
        self._live = 0
        self._number = 0

    def __len__(self) -> int:
        """Parts in it."""
        return self._live

    @property
    def places(self) -> int:
        """Places in it, the empty ones included."""
        return len(self._line) + len(self._heap)

    @property
    def _most(self) -> int:
        return self._live + self._live // 2 + _EMPTY

    def push(self, part: NodePart) -> None:
        """Queue `part`, once."""
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
        """Put a queued part where it belongs by now, so that it isn't left to whoever evicts."""
        entry = part.entry
        if entry is not None and entry[0] != self._policy(part.node):
            self.forget(part)
            self.push(part)

    def forget(self, part: NodePart) -> None:
        """It leaves the tree, and the queue if it is in it."""
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
        """The next part that may go. Those that may not leave the queue; their next release brings them back."""
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
        """The lowest entry, empty or not, which leaves its place."""
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
        """Recount the line and the heap."""
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
    """What may be evicted, in a queue for each component in each tier."""

    def __init__(self, components: Sequence[TreeComponent], policy: EvictionPolicy) -> None:
        """`components`: the full one first."""
        self._full = components[0].name
        self.queues = {(tier, c.name): EvictionQueue(policy) for tier in IN_TREE for c in components}

    def offer(self, node: TreeNode, tier: Tier) -> None:
        """Queue what may go of a node."""
        parts = node.parts[tier]
        if len(parts) == 1 and node.below[tier]:
            return  # Its full state, which something is built on.
        for part in parts.values():
            if part.entry is None and self.may_go(part):
                self.queues[tier, part.component].push(part)

    def refresh(self, node: TreeNode, tier: Tier) -> None:
        """Move what is queued of a node that was used: it goes later than its places say."""
        for part in node.parts[tier].values():
            if part.entry is not None:
                self.queues[tier, part.component].refresh(part)

    def forget(self, part: NodePart) -> None:
        """It has left the tree."""
        self.queues[part.tier, part.component].forget(part)

    def may_go(self, part: NodePart) -> bool:
        """Whether `part` is held by its node, and either it or all that its leaf holds there is nobody's."""
        if part.locks or not part.live:
            return False
        node, tier = part.node, part.tier
        if node.below[tier]:
            return part.component != self._full
        return not any(other.locks for other in node.parts[tier].values()) or self.goes_alone(part)

    def goes_alone(self, part: NodePart) -> bool:
        """Whether it goes without the rest of its node: the node has more below it, or its full state is kept."""
        if part.component == self._full:
            return False
        node, tier = part.node, part.tier
        return bool(node.below[tier] or node.parts[tier][self._full].locks)
