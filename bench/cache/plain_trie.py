"""What the tree is measured beside: a plain trie of Python dictionaries, a node a page.

Keys are the bytes of a page's tokens. It does what anyone would write first: a walk page by page, a count of users on
every node of a path, and a heap of leaves by last use. It knows one pool, one tier and no digests.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from twinpool.cache.prefix_cache.tree_node import TokenPrefix


@dataclass(eq=False, slots=True)
class Leaf:
    """One page."""

    key: bytes
    page: int
    parent: Leaf | None
    children: dict[bytes, Leaf] = field(default_factory=dict)
    used: int = 0
    users: int = 0


class Trie:
    """See the module's prose."""

    def __init__(self) -> None:
        self.root = Leaf(b"", 0, None)
        self.pages = 0
        self._tick = 0
        self._number = 0
        self._heap: list[tuple[int, int, Leaf]] = []

    def match(self, prefix: TokenPrefix) -> list[Leaf]:
        """The path of the longest part of `prefix` that is there."""
        node, path, raw, size = self.root, [], prefix.raw, prefix.page_bytes
        for at in range(0, len(raw), size):
            child = node.children.get(raw[at : at + size])
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def lock(self, path: list[Leaf]) -> None:
        self._tick += 1
        for node in path:
            node.users += 1
            node.used = self._tick

    def unlock(self, path: list[Leaf]) -> None:
        for node in path:
            node.users -= 1
        if path and not path[-1].children:
            self._push(path[-1])

    def insert(self, prefix: TokenPrefix, pages: list[int]) -> int:
        """Add what is missing of `prefix`, from its own list of pages; returns how many were new."""
        path = self.match(prefix)
        self._tick += 1
        node, raw, size = path[-1] if path else self.root, prefix.raw, prefix.page_bytes
        for number in range(len(path), len(prefix)):
            key = raw[number * size : (number + 1) * size]
            child = node.children[key] = Leaf(key, pages[number], node, used=self._tick)
            node = child
        self._push(node)
        self.pages += len(prefix) - len(path)
        return len(prefix) - len(path)

    def evict(self, count: int) -> list[int]:
        """Free up to `count` pages, leaves used longest ago first; returns them."""
        freed: list[int] = []
        while self._heap and len(freed) < count:
            used, _, node = heapq.heappop(self._heap)
            parent = node.parent
            if parent is None or node.users or node.children or parent.children.get(node.key) is not node:
                continue
            if node.used > used:
                self._push(node)
                continue
            del parent.children[node.key]
            freed.append(node.page)
            if parent.parent is not None and not parent.children:
                self._push(parent)
        self.pages -= len(freed)
        return freed

    def _push(self, node: Leaf) -> None:
        self._number += 1
        heapq.heappush(self._heap, (node.used, self._number, node))
