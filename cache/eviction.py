"""Which node goes first: policies, and the queue that keeps them in order.

A policy is one expression over a node; smaller goes first. Its value may only grow while a node lives, so that the
queue can be lazy: an entry is looked at again when it comes up, and put back when it has become younger meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.nodes import Node, Part

Rank = tuple[float, ...]
Policy = Callable[["Node"], Rank]

POLICIES: dict[str, Policy] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.created,),
    "priority": lambda node: (node.priority, node.used),
    "slru": lambda node: (node.hits >= PROTECTED_HITS, node.used),
}
"""Least recently used, least frequently used, first in first out, lowest priority, and segmented LRU: what was hit
twice outlives what was seen once (Karedla et al. 1994)."""
PROTECTED_HITS = 2


class Queue:
    """Parts of one component in one tier that may be evicted, in the order of a policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, int, Part]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, part: Part) -> None:
        """Queue `part`, once."""
        if not part.queued:
            part.queued = True
            self._number += 1
            heapq.heappush(self._heap, (self._policy(part.node), self._number, part))

    def pop(self, may_go: Callable[[Part], bool]) -> Part | None:
        """The next part that may go. Those that may not leave the queue; their next release brings them back."""
        while self._heap:
            rank, number, part = heapq.heappop(self._heap)
            if not may_go(part):
                part.queued = False
            elif (now := self._policy(part.node)) > rank:
                heapq.heappush(self._heap, (now, number, part))
            else:
                part.queued = False
                return part
        return None

    def parts(self) -> Iterator[Part]:
        return (part for _, _, part in self._heap)
