"""Recurrent state: a snapshot at exactly the anchor, copied on use and never shared for writing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import NEITHER, Component, Level, Walked, there
from cache.nodes import Node


class State(Component):
    point = True

    def levels(self, path: Walked) -> list[Level]:
        return [there(node, self.name) if pages == node.pages else NEITHER for node, pages in path]

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        return path[-1:]
