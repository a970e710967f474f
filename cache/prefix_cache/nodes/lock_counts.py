"""Counts of locked parts, at a node and below it.

They are kept for trees that are written back only, where a node that is on the device alone is evicted together with
everything that the host has below it.
"""

from __future__ import annotations

from twinpool.cache.prefix_cache.nodes.tree_node import TreeNode


def locked_parts(node: TreeNode) -> int:
    """Returns how many parts of `node` are locked, counted anew, in all tiers."""
    return sum(bool(part.locks) for parts in node.parts for part in parts.values())


def count_locked(node: TreeNode) -> None:
    """Count one more locked part of `node`, in it and in the nodes above it. The caller has locked the part."""
    node.busy += 1
    above = node.parent
    fresh = node.busy == 1 and not node.busy_below
    while fresh and above is not None:
        above.busy_below += 1
        fresh = above.busy_below == 1 and not above.busy
        above = above.parent


def count_unlocked(node: TreeNode) -> None:
    """Count one locked part of `node` less, in it and in the nodes above it. The caller has unlocked the part."""
    node.busy -= 1
    above = node.parent
    idle = not (node.busy or node.busy_below)
    while idle and above is not None:
        above.busy_below -= 1
        idle = not (above.busy or above.busy_below)
        above = above.parent
