"""Which pages of a request a swap copies: those of its block tables, except pages that the tree has itself.

The registry says which state is due, pool by pool, and no pool is named here (`cache.memory.required_pages`): all pages
of the full pool, those that a window still reaches, one state slot. The committed length decides (hazard A4): the last
token drawn has no state yet, and steps under way are still writing, so the caller lets these steps land first.

A prefix that many requests share isn't copied for each of them. Pages that the tree has with the digests that the
allocation has for them stay the tree's, on the way out and back, so sharing survives a retraction on both tiers.
"""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.cache.allocation.allocation import Allocation
from twinpool.cache.allocation.block_table import NULL_PAGE
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.required_pages import extents
from twinpool.cache.pool.page_extent import PageExtent
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import NodePart, Tier, TreeNode
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.contracts.ids import Epoch


def page_extent(spec: PoolSetSpec, allocation: Allocation, pool: str, numbers: range, committed: int) -> PageExtent:
    """The extent of pages (or the slot) `numbers` of an allocation, with the committed positions in each."""
    firsts, ends = extents(spec, pool, numbers, committed)
    if pool in allocation.slots:
        slot = allocation.slots[pool]
        return PageExtent(slot.indices, slot.epochs, tuple(firsts), tuple(ends))
    indices = allocation.tables[pool].pages[numbers.start : numbers.stop]
    whole = len(indices) == len(numbers) and NULL_PAGE not in indices
    assert whole, f"{pool} lacks state of committed positions"
    epochs = tuple(Epoch(e) for e in allocation.tables[pool].epochs[numbers.start : numbers.stop])
    return PageExtent(tuple(indices), epochs, tuple(firsts), tuple(ends))


def same_parts(
    tree: RadixTree, prefix: TokenPrefix, digests: Mapping[int, int], tier: Tier | None = None
) -> list[NodePart]:
    """The full parts of the leading nodes of `prefix` whose digests equal `digests`, in `tier` or in the fastest one.

    `digests` are by page number. The first node that differs or isn't wholly matched ends the list. Two computations
    of the same tokens need not have the same bits; only pages with equal digests can replace a request's own.
    """
    out: list[NodePart] = []
    start = 0
    for node, pages in tree.walked(prefix):
        part = _part(node, tree.full, tier)
        mine = tuple(digests.get(start + i, -1) for i in range(len(node)))
        if part is None or pages != len(node) or part.digests != mine:
            break
        out.append(part)
        start += pages
    return out


def _part(node: TreeNode, component: str, tier: Tier | None) -> NodePart | None:
    return node.part(component) if tier is None else node.parts[tier].get(component)
