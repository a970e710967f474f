"""A lock holds each part once, however often it is named, and names pages in the order of the sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cache.leases import Allocator
from cache.nodes import Lock, Offer, Tier
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


def test_pages_of_a_lock_that_were_loaded_in_front_of_others_come_first() -> None:
    """A window's part that is loaded later is locked behind those that follow it in the sequence."""

    def part(start: int, tier: Tier = Tier.DEVICE) -> Any:
        return SimpleNamespace(component="window", tier=tier, node=SimpleNamespace(start=start))

    behind, host, loaded = part(3), part(0, Tier.HOST), part(0)
    lock = Lock(1, "a request", [behind, host, loaded], added_to=True)
    assert lock.on_device("window") == [loaded, behind]
