"""Full attention: every page up to the anchor must be there.

A child is on the device only where its parent is, so what the device has of a path is found from the path's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import DEVICE, NEITHER, TREE, Component, Level
from cache.nodes import Node, Tier


class Full(Component):
    def levels(self, path: Sequence[Node], last: int) -> list[Level]:
        device = tree = len(path)
        while device and self.name not in path[device - 1].parts[Tier.DEVICE]:
            device -= 1
        for number in range(device, len(path)):
            if self.name not in path[number].parts[Tier.HOST]:
                tree = number
                break
        return [DEVICE] * device + [TREE] * (tree - device) + [NEITHER] * (len(path) - tree)

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        return path
