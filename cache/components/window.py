"""Sliding windows: the last pages before the anchor must be there; what lies further up may be gone.

A node without a part is a *tombstone*: its window pages were given back as the window moved on, or evicted. Inserting
the same tokens again heals it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import DEVICE, NEITHER, TREE, Component, Level, there
from cache.nodes import Node


class Window(Component):
    """`reach`: the pages before a page boundary that a window reaches back into."""

    def __init__(self, name: str, reach: int) -> None:
        super().__init__(name)
        self.reach = reach

    def levels(self, path: Sequence[Node], last: int) -> list[Level]:
        # The last two: pages since the last tombstone.
        depth = device = tree = 0
        out = []
        for number, node in enumerate(path, 1):
            here, pages = there(node, self.name), node.pages if number < len(path) else last
            depth += pages
            device = device + pages if here is DEVICE else 0
            tree = tree + pages if here else 0
            enough = min(self.reach, depth)
            out.append(DEVICE if device >= enough else TREE if tree >= enough else NEITHER)
        return out

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        needed: list[Node] = []
        pages = 0
        for node in reversed(path):
            if pages >= self.reach:
                break
            needed.append(node)
            pages += len(node)
        return reversed(needed)
