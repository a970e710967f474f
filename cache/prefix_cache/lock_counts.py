"""Counts of locked parts, at a node and below it: kept for trees that are written back, where a node on the device may
only go together with what the host has below it."""

from __future__ import annotations

from cache.prefix_cache.tree_node import TreeNode


def locked_parts(node: TreeNode) -> int:
    """Parts of `node` that are locked, counted anew."""
    return sum(bool(part.locks) for parts in node.parts for part in parts.values())


def count_locked(node: TreeNode) -> None:
    """One part more of `node` is locked."""
    node.busy += 1
    above = node.parent
    fresh = node.busy == 1 and not node.busy_below
    while fresh and above is not None:
        above.busy_below += 1
        fresh = above.busy_below == 1 and not above.busy
        above = above.parent


def count_unlocked(node: TreeNode) -> None:
    """One part less of `node` is locked."""
    node.busy -= 1
    above = node.parent
    idle = not (node.busy or node.busy_below)
    while idle and above is not None:
        above.busy_below -= 1
        idle = not (above.busy or above.busy_below)
        above = above.parent
