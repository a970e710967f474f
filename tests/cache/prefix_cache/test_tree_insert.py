"""What a tree takes of what it is offered: in each tier a chain from the first page on, without a gap."""

from __future__ import annotations

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import PageOffer, Tier, TokenPrefix

PAGE_TOKENS = 4


@pytest.mark.parametrize("write_back", [False, True])
def test_pages_behind_ones_that_the_device_does_not_have_are_not_taken_for_the_device(write_back: bool) -> None:
    """Also where the pages before them are on the host, to which state is written back."""
    tree = RadixTree(pool_sets(PAGE_TOKENS)["full"], write_back=write_back)
    device, host = (PageAllocator(f"{tier} pages", 9, first=1) for tier in ("device", "host"))
    prefix = TokenPrefix.of(range(4 * PAGE_TOKENS), PAGE_TOKENS)
    tree.insert(prefix.head(2), {"full": [PageOffer(0, device.lease(2, "a request"), (1, 2))]}, Tier.DEVICE)
    tree.insert(prefix.head(2), {"full": [PageOffer(0, host.lease(2, "a request"), (1, 2))]}, Tier.HOST)
    assert tree.eviction.evict(Tier.DEVICE, "full", 2) == 2
    behind = device.lease(2, "another request")
    tree.insert(prefix, {"full": [PageOffer(2, behind, (3, 4))]}, Tier.DEVICE)
    assert len(behind) == 2, "they stay the request's own"
    assert tree.check() == []
    whole = device.lease(4, "a third")
    tree.insert(prefix, {"full": [PageOffer(0, whole, (1, 2, 3, 4))]}, Tier.DEVICE)
    assert len(whole) == 0
    assert tree.match(prefix).device_depth == 4
    assert tree.check() == []


def test_of_the_nodes_of_one_insertion_parents_are_told_of_first() -> None:
    """Whoever keeps an index of them hangs each below the one before it."""
    tree, pages, told = RadixTree(pool_sets(PAGE_TOKENS)["full"]), PageAllocator("pages", 9, first=1), list[int]()
    tree.accounts.observe_nodes(lambda node, tier, there: told.append(node.start))
    offers = [PageOffer(first, pages.lease(2, "a request"), (first, first + 1)) for first in (0, 2)]
    tree.insert(TokenPrefix.of(range(4 * PAGE_TOKENS), PAGE_TOKENS), {"full": offers})
    assert told == [0, 2]
