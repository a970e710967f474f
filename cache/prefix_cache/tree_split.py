"""Cutting a node in two: keys, parts, children and locks go with the half that they belong to.

What the tree counts of its nodes is no matter of these functions: `TreeAccounts.split` and `split_end` call them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache.prefix_cache.tree_components import TreeComponent
from cache.prefix_cache.tree_node import IN_TREE, TreeNode
from contracts.block_hash import KEY_BYTES

Components = Mapping[str, TreeComponent]
"""By name."""


def new_upper(node: TreeNode, pages: int, page_bytes: int, components: Components) -> TreeNode:
    """Cut `node` after `pages`; returns the new upper half. The lower half stays the object it was."""
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
    """Cut `node` after `pages`; returns the new lower half, and costs what that has."""
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
    """Two halves were used alike."""
    half.used, half.created, half.hits, half.priority = node.used, node.created, node.hits, node.priority
