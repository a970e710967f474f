"""Sliding windows: the last pages before the anchor must be there; what lies further up may be gone.

A node without a part is a *tombstone*: its window pages were given back as the window moved on, or evicted. Inserting
the same tokens again heals it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import Accepts, Component, Walk, accepts, there
from cache.nodes import Node


class Window(Component):
    """`reach`: the pages before a page boundary that a window reaches back into."""

    def __init__(self, name: str, reach: int) -> None:
        super().__init__(name)
        self.reach = reach

    def walk(self) -> Walk:
        return _Walk(self.name, self.reach)

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        needed: list[Node] = []
        pages = 0
        for node in reversed(path):
            if pages >= self.reach:
                break
            needed.append(node)
            pages += len(node)
        return reversed(needed)


class _Walk(Walk):
    """Counts the pages since the last tombstone."""

    def __init__(self, name: str, reach: int) -> None:
        self._name, self._reach = name, reach
        self._depth = self._device = self._tree = 0

    def step(self, node: Node, pages: int) -> Accepts:
        here = there(node, self._name)
        self._depth += pages
        self._device = self._device + pages if here.device else 0
        self._tree = self._tree + pages if here.tree else 0
        enough = min(self._reach, self._depth)
        return accepts(self._device >= enough, self._tree >= enough)
