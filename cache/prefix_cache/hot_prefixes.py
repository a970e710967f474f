"""The hot prefixes of a tree, which other workers have most use for: most hits first, then latest use."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.cache.prefix_cache.nodes.token_prefix import token_ids
from twinpool.cache.prefix_cache.nodes.tree_node import Tier, TreeNode
from twinpool.cache.prefix_cache.radix_tree import RadixTree


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A hot prefix, with all its tokens from the first on."""

    tokens: tuple[int, ...]
    salt: str
    hits: int
    """The hits of the prefix's last node: how often the whole prefix was used."""


def hottest(tree: RadixTree, component: str, pages: int) -> list[HotPrefix]:
    """Returns the hottest prefixes on the device, of at most `pages` pages of `component` in all, hottest first.

    Shared pages are counted once. A node is chosen only below a chosen one, and is never hotter than it, so that
    chosen nodes always make up whole prefixes.
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
