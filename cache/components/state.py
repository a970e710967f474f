"""Recurrent state: a snapshot at exactly the anchor, copied on use and never shared for writing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import NEITHER, Accepts, Component, Walk, there
from cache.nodes import Node


class State(Component):
    point = True

    def walk(self) -> Walk:
        return _Walk(self.name)

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        return path[-1:]


class _Walk(Walk):
    def __init__(self, name: str) -> None:
        self._name = name

    def step(self, node: Node, pages: int) -> Accepts:
        return there(node, self._name) if pages == len(node) else NEITHER
