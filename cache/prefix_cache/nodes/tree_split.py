"""Cutting a node in two: keys, parts, children and locks go with the half that they belong to.

Call `TreeAccounts.split` and `split_end` instead of these functions: they also update the tree's counts and its list of
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.cache.prefix_cache.nodes.tree_components import TreeComponent
from twinpool.cache.prefix_cache.nodes.tree_node import IN_TREE, TreeNode
from twinpool.contracts.block_hash import KEY_BYTES

Components = Mapping[str, TreeComponent]
"""Components by name."""


def new_upper(node: TreeNode, pages: int, page_bytes: int, components: Components) -> TreeNode:
    """Cut `node` after `pages`; returns the new upper half. `node` becomes the lower half."""
    parent = node.parent
    assert parent is not None
    raw, chain = node.raw, node.chain
    upper = TreeNode(raw[: pages * page_bytes], chain[: pages * KEY_BYTES], parent, start=node.start, salt=node.salt)
    _like(upper, node)
    parent.children[node.first(page_bytes)], parent.latest = upper, None
    node.drop_head(pages, page_bytes)
    node.parent = upper
    upper.children[node.first(page_bytes)] = node
    for tier in IN_TREE:
        for part in list(node.parts[tier].values()):
            head = components[part.component].split(part, upper, pages)
            if head is None:
                continue
            upper.parts[tier][part.component] = head
            for lock in part.locks:
                lock.parts.insert(lock.parts.index(part), head)
    return upper


def new_lower(node: TreeNode, pages: int, page_bytes: int, components: Components) -> TreeNode:
    """Cut `node` after `pages`; returns the new lower half. `node` becomes the upper half.

    The cost grows with the pages of the lower half, not with those that `node` keeps.
    """
    raw, chain = node.end(pages, page_bytes)
    lower = TreeNode(raw, chain, node, start=node.start + pages, salt=node.salt)
    _like(lower, node)
    lower.children, lower.below, lower.busy_below = node.children, node.below, node.busy_below
    for child in lower.children.values():
        child.parent = lower
    node.children, node.below = {lower.first(page_bytes): lower}, [0, 0]
    node.latest = None
    node.cut(pages)
    for tier in IN_TREE:
        for part in list(node.parts[tier].values()):
            end = components[part.component].split_end(part, lower, pages)
            if end is None:
                lower.parts[tier][part.component] = part
                part.node = lower
                del node.parts[tier][part.component]
                continue
            lower.parts[tier][part.component] = end
            for lock in part.locks:
                lock.parts.insert(lock.parts.index(part) + 1, end)
    return lower


def _like(half: TreeNode, node: TreeNode) -> None:
    """Copy what eviction policies look at: both halves of a node were used alike."""
    half.used, half.created, half.hits, half.priority = node.used, node.created, node.hits, node.priority
