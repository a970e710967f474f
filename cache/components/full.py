"""Full attention: every page up to the anchor must be there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.components.base import Accepts, Component, Walk, accepts, there
from cache.nodes import Node


class Full(Component):
    def walk(self) -> Walk:
        return _Walk(self.name)

    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        return path


class _Walk(Walk):
    def __init__(self, name: str) -> None:
        self._name = name
        self._so_far = accepts(True, True)

    def step(self, node: Node, pages: int) -> Accepts:
        here, before = there(node, self._name), self._so_far
        if here is not before:
            self._so_far = accepts(before.device and here.device, before.tree and here.tree)
        return self._so_far
