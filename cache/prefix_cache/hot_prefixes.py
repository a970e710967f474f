"""Which prefixes of a tree are worth most to others: those that were used most, newest first."""

from __future__ import annotations

from dataclasses import dataclass

from cache.prefix_cache.radix_tree import RadixTree
from cache.prefix_cache.token_prefix import token_ids
from cache.prefix_cache.tree_node import Tier, TreeNode


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix from its first token on."""

    tokens: tuple[int, ...]
    salt: str
    hits: int
    """How often the last pages of it were used again."""


def hottest(tree: RadixTree, component: str, pages: int) -> list[HotPrefix]:
    """Prefixes of at most `pages` pages of `component` on the device in all, what they share counted once.

    A node is never hotter than the one above it, so what is chosen hangs together.
    """
    nodes = [n for n in tree.accounts.list if component in n.parts[Tier.DEVICE]]
    chosen: dict[int, TreeNode] = {}
    for node in sorted(nodes, key=lambda n: (n.hits, n.used), reverse=True):
        if len(node) <= pages and (_top(node) or id(node.parent) in chosen):
            chosen[id(node)] = node
            pages -= len(node)
    inner = {id(node.parent) for node in chosen.values()}
    ends = [node for key, node in chosen.items() if key not in inner]
    return [HotPrefix(*_path(node), node.hits) for node in ends]


def _top(node: TreeNode) -> bool:
    return node.parent is not None and node.parent.parent is None


def _path(node: TreeNode) -> tuple[tuple[int, ...], str]:
    raw = []
    while node.parent is not None:
        raw.append(node.raw)
        node = node.parent
    return tuple(token_ids(b"".join(reversed(raw)))), node.salt
