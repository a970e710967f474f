"""Full attention: every page up to the anchor must be there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import DEVICE, NEITHER, TREE, Component, Level, Walked
from cache.nodes import Node


class Full(Component):
    def levels(self, path: Walked) -> list[Level]:
        name, level = self.name, DEVICE
        out: list[Level] = []
        for node, _ in path:
            device, host = node.parts
            if name not in device:
                if name not in host:
                    break
                level = TREE
            out.append(level)
        return out + [NEITHER] * (len(path) - len(out))

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        return path
