"""A lock holds each part once, however often it is named, and names pages in the order of the sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, PageOffer, Tier, TokenPrefix, TreeNode


def test_a_part_named_twice_is_locked_once_and_unlocked_once() -> None:
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 9, first=1)
    prefix = TokenPrefix.of(range(16), 4)
    tree.insert(prefix, {"full": [PageOffer(0, allocator.lease(4, "request"), (1, 2, 3, 4))]})
    (node,) = tree.accounts.nodes()
    part = node.parts[Tier.DEVICE]["full"]
    lock = tree.locks.keep([part, part], "store")
    assert lock.parts == [part]
    assert tree.accounts.protected[Tier.DEVICE, "full"] == 4
    tree.locks.unlock(lock)
    assert tree.accounts.protected[Tier.DEVICE, "full"] == 0
    assert tree.check() == []


def test_pages_of_a_lock_that_were_loaded_in_front_of_others_come_first() -> None:
    """A window's part that is loaded later is locked behind those that follow it in the sequence."""

    def part(start: int, tier: Tier = Tier.DEVICE) -> Any:
        return SimpleNamespace(component="window", tier=tier, node=SimpleNamespace(start=start))

    behind, host, loaded = part(3), part(0, Tier.HOST), part(0)
    lock = NodeLock(1, "a request", [behind, host, loaded])
    assert lock.on_device("window") == [loaded, behind]


@pytest.mark.parametrize("way", ["lock", "hold"])
def test_of_a_node_that_is_used_in_part_the_other_part_was_not_used(way: str) -> None:
    """So the pages behind a prefix that many share are not kept as if they were as hot."""
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 9, first=1)
    prefix = TokenPrefix.of(range(16), 4)
    tree.insert(prefix, {"full": [PageOffer(0, allocator.lease(4, "request"), (1, 2, 3, 4))]})
    (node,) = tree.accounts.nodes()
    before = node.hits, node.used
    if way == "lock":
        lock = tree.lock(tree.match(prefix.head(3)), "request")
    else:
        lock, _ = tree.hold(prefix.head(3), {"full": range(3)}, "request", host=False)
    upper, lower = sorted(tree.accounts.nodes(), key=lambda n: n.start)
    assert (upper.pages, lower.pages) == (3, 1)
    assert (lower.hits, lower.used) == before
    assert (upper.hits, upper.used > before[1]) == (before[0] + 1, True)
    assert [hot.hits for hot in tree.hottest("full", 9)] == [before[0]]
    tree.locks.unlock(lock)


def test_a_match_from_before_something_was_invalidated_is_not_locked() -> None:
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 30, first=1)
    first, second = (TokenPrefix.of(range(n, n + 8), 4) for n in (0, 50))
    for prefix in (first, second):
        tree.insert(prefix, {"full": [PageOffer(0, allocator.lease(2, "request"), (1, 2))]})
    match = tree.match(first)
    tree.invalidate(second)
    with pytest.raises(AssertionError, match="match again, then lock"):
        tree.lock(match, "a request")


def test_what_is_cut_off_a_leaf_before_storage_had_it_is_counted_as_missed() -> None:
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 30, first=1)
    prefix = TokenPrefix.of(range(40), 4)
    tree.insert(prefix, {"full": [PageOffer(0, allocator.lease(10, "request"), range(10))]}, Tier.HOST)
    (node,) = tree.accounts.nodes()
    part = node.parts[Tier.HOST]["full"]
    assert tree.eviction.evict(Tier.HOST, "full", 1) == 1
    assert tree.accounts.missed == 0, "nobody was to store it"
    tree.accounts.unstored[part], part.stored = (0, 0.0), 7
    assert tree.eviction.evict(Tier.HOST, "full", 4) == 4
    assert tree.accounts.missed == 2, "pages 5 to 8 went, and storage had seven"
    part.stored = 1
    assert tree.eviction.evict(Tier.HOST, "full", 2) == 2
    assert tree.accounts.missed == 4, "pages 3 and 4 went: page 2 isn't stored, but it is still here"
    assert tree.check() == []


def on_device_with_more_on_the_host() -> tuple[RadixTree, TreeNode, TreeNode]:
    """A tree that is written back: a node of two pages on the device alone, and one below it on the host alone."""
    tree = RadixTree(pool_sets()["full"], write_back=True)
    device, host = (PageAllocator(f"{tier} pages", 30, first=1) for tier in ("device", "host"))
    prefix = TokenPrefix.of(range(16), 4)
    tree.insert(prefix.head(2), {"full": [PageOffer(0, device.lease(2, "request"), (1, 2))]})
    tree.insert(prefix, {"full": [PageOffer(2, host.lease(2, "prefetch"), (3, 4))]}, Tier.HOST)
    upper, lower = sorted(tree.accounts.nodes(), key=lambda node: node.start)
    return tree, upper, lower


def test_a_node_with_something_locked_below_it_goes_once_it_was_spilled() -> None:
    """Seed 8125 of the simulator: what a waiting request kept on the host kept the device full, and itself waiting."""
    tree, upper, lower = on_device_with_more_on_the_host()
    lock = tree.locks.keep([lower.parts[Tier.HOST]["full"]], "a prefetch")
    asked: list[TreeNode] = []

    def refuse(node: TreeNode) -> bool:
        asked.append(node)
        # As a save that finds no room on the host.
        tree.locks.unlock(tree.locks.keep([node.parts[Tier.DEVICE]["full"]], "save"))
        return False

    assert tree.eviction.evict(Tier.DEVICE, "full", 2, refuse) == 0, "it would take along what is locked"
    assert asked == [upper]
    assert tree.check() == []
    assert tree.eviction.evict(Tier.DEVICE, "full", 2, lambda node: True) == 0, "it is being saved"
    assert tree.check() == []
    tree.locks.unlock(lock)
    assert tree.eviction.evict(Tier.DEVICE, "full", 2, refuse) == 2
    assert tree.check() == []
    assert tree.accounts.sizes == dict.fromkeys(tree.accounts.sizes, 0)


def test_what_is_being_saved_in_part_stays_until_that_is_over() -> None:
    """Seed 9674: the host had room for a node's pages and none for its state, and the save had begun with the pages."""
    tree, upper, _ = on_device_with_more_on_the_host()
    saves: list[NodeLock] = []

    def begin(node: TreeNode) -> bool:
        saves.append(tree.locks.keep([node.parts[Tier.DEVICE]["full"]], "save"))
        return False

    assert tree.eviction.evict(Tier.DEVICE, "full", 2, begin) == 0
    assert upper.parts[Tier.DEVICE]
    assert tree.check() == []
    tree.locks.unlock(saves.pop())
    assert tree.eviction.evict(Tier.DEVICE, "full", 2, lambda node: False) == 2
    assert tree.check() == []


def test_a_lock_of_a_node_that_is_split_has_both_halves_in_order_before_what_follows() -> None:
    """Whoever reads its pages by number reads those of the sequence, one after the other."""
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 30, first=1)

    def insert(tokens: list[int], *digests: int) -> None:
        prefix = TokenPrefix.of(tokens, 4)
        lease = allocator.lease(len(prefix), "request")
        tree.insert(prefix, {"full": [PageOffer(0, lease, digests)]})
        lease.release()

    def found(depth: int, lock: NodeLock) -> list[int]:
        return [index for part in lock.on_device("full") for index in part.lease.indices][:depth]

    insert([*range(16)], 1, 2, 3, 4)
    insert([*range(24)], 1, 2, 3, 4, 5, 6)
    whole = TokenPrefix.of(range(24), 4)
    lock = tree.lock(tree.match(whole), "a request")
    before = found(6, lock)
    assert [part.node.start for part in lock.parts] == [0, 4]
    insert([*range(8), *[90] * 8], 1, 2, 7, 8)
    assert [part.node.start for part in lock.parts] == [0, 2, 4]
    assert found(6, lock) == before
    tree.locks.unlock(lock)
    assert tree.check() == []


def test_the_tree_has_no_more_of_a_prefix_than_was_offered() -> None:
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 9, first=1)
    prefix = TokenPrefix.of(range(16), 4)
    tree.insert(prefix, {"full": [PageOffer(0, allocator.lease(2, "request"), (1, 2))]})
    (node,) = tree.accounts.nodes()
    assert (node.raw, node.chain) == (prefix.raw[: 2 * 16], prefix.chain[: 2 * 16])
    assert tree.match(prefix).depth == 2
    assert tree.check() == []
