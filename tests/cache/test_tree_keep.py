"""A lock holds each part once, however often it is named."""

from __future__ import annotations

from cache.leases import Allocator
from cache.nodes import Offer, Tier
from cache.prefix import Prefix
from cache.tree import PrefixTree
from tests.poolsets import pool_sets


def test_a_part_named_twice_is_locked_once_and_unlocked_once() -> None:
    tree, allocator = PrefixTree(pool_sets()["full"]), Allocator("full pages", 9, first=1)
    prefix = Prefix.of(range(16), 4)
    tree.insert(prefix, {"full": [Offer(0, allocator.lease(4, "request"), (1, 2, 3, 4))]})
    (node,) = tree.nodes()
    part = node.parts[Tier.DEVICE]["full"]
    lock = tree.keep([part, part], "store")
    assert lock.parts == [part]
    assert tree.protected[Tier.DEVICE, "full"] == 4
    tree.unlock(lock)
    assert tree.protected[Tier.DEVICE, "full"] == 0
    assert tree.check() == []
