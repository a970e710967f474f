"""Recurrent state: a snapshot at exactly the anchor, copied on use and never shared for writing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import NEITHER, Component, Level, there
from cache.nodes import Node


class State(Component):
    point = True

    def levels(self, path: Sequence[Node], last: int) -> list[Level]:
        levels = [there(node, self.name) for node in path]
        if path and last < path[-1].pages:
            levels[-1] = NEITHER
        return levels

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        return path[-1:]
