"""Observers of the prefix tree: they are called when state comes to a tier or goes."""

from __future__ import annotations

from typing import Protocol

from twinpool.cache.prefix_cache.nodes.tree_node import NodePart, Tier, TreeNode


class NodeObserver(Protocol):
    """An observer of nodes that can be matched, tier by tier (KV events are made from its calls)."""

    def node_changed(self, node: TreeNode, tier: Tier, there: bool) -> None:
        """The full state of `node` has come to `tier` (`there` True) or gone from it (False).

        State comes parents first. Invalidated state counts as gone at once, even while it is still locked. A split
        changes nothing and isn't reported. For `Tier.STORAGE` only True is reported.
        """


class PartObserver(Protocol):
    """An observer of the parts of every component in every tier of the tree."""

    def part_changed(self, part: NodePart, there: bool) -> None:
        """`part` was hung on its node (`there` True), or invalidated (False). An evicted part isn't reported."""


class NoObserver:
    """The observer of a tree that nobody observes."""

    def node_changed(self, node: TreeNode, tier: Tier, there: bool) -> None:
        pass

    def part_changed(self, part: NodePart, there: bool) -> None:
        pass
