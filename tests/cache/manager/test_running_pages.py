"""Leases of the device's pages: all pools or none, at the cost of what only the tree holds."""

from __future__ import annotations

import pytest

from tests.cache.manager.parts import PAGE_TOKENS, PAGES, Parts
from twinpool.cache.prefix_cache.tree_node import PageOffer, Tier


def test_all_pools_are_leased_or_none(parts: Parts) -> None:
    leases = parts.supply.lease_all({"full": 3, "window": 1, "state": 1}, "a request")
    assert leases is not None
    assert {pool: len(lease) for pool, lease in leases.items()} == {"full": 3, "window": 1, "state": 1}
    before = parts.free()
    assert parts.supply.lease_all({"full": 1, "window": PAGES}, "another") is None
    assert parts.free() == before, "nothing was taken"


def test_what_only_the_tree_holds_makes_room_and_is_counted() -> None:
    parts = Parts("full")
    prefix = parts.prefix(6)
    parts.share(prefix)
    assert parts.supply.free_pages("full") == PAGES
    assert parts.supply.cached_pages(prefix) == 6
    assert parts.supply.lease_all({"full": 8}, "a request") is not None
    assert parts.supply.counters["pages_evicted"] == 4
    assert parts.supply.cached_pages(prefix) == 2


def test_where_evicted_pages_are_still_being_read_others_are_evicted_too() -> None:
    parts = Parts("full")
    sent, other = parts.prefix(4), parts.prefix(5, first=100)
    parts.share(sent)
    pages = [i for node, _ in parts.tree.walked(sent) for i in node.parts[Tier.DEVICE]["full"].lease.indices]
    pin = parts.pools.allocators["full"].pin(pages, "a send")
    parts.share(other)
    assert parts.supply.lease_all({"full": 5}, "a request") is not None, "the oldest pages are of no use yet"
    assert parts.pools.allocators["full"].quarantined
    assert parts.supply.coming_back
    pin.release()
    assert not parts.supply.coming_back


def test_what_was_leased_of_one_pool_is_given_back_where_another_one_turns_out_too_small() -> None:
    """By the count there is room, but a copy still reads what is evicted."""
    parts = Parts("full+window")
    prefix = parts.prefix(6)
    parts.share(prefix)
    full, window = parts.pools.allocators["full"], parts.pools.allocators["window"]
    pages = [i for node, _ in parts.tree.walked(prefix) for i in node.parts[Tier.DEVICE]["full"].lease.indices]
    pin = full.pin(pages, "a copy")
    needs = {"window": 1, "full": full.free + 1}
    assert parts.supply.free_pages("full") >= needs["full"]
    before = window.free, window.leases
    assert parts.supply.lease_all(needs, "a request") is None
    assert (window.free, window.leases) == before
    pin.release()
    assert parts.supply.lease_all(needs, "a request") is not None


def test_nothing_is_evicted_for_what_it_makes_no_room_for() -> None:
    parts = Parts("full")
    prefix = parts.prefix(6)
    parts.share(prefix)
    lock = parts.tree.lock(parts.tree.match(prefix.head(1)), "a request")
    assert parts.supply.lease_all({"full": PAGES}, "another") is None
    assert parts.supply.cached_pages(prefix) == 6
    assert parts.supply.counters["pages_evicted"] == 0
    assert parts.supply.coming_back, "the page that is locked"
    parts.tree.locks.unlock(lock)
    assert not parts.supply.coming_back


@pytest.mark.parametrize("back", [True, False])
def test_a_prefix_is_given_up_for_room_only_where_no_page_is_about_to_come_back(back: bool) -> None:
    """Pages that an operation still reads come back by themselves, and a prefix would have to be computed again."""
    parts = Parts("full+window")
    prefix, window = parts.prefix(3), parts.pools.allocators["window"]
    leases = {pool: parts.pools.allocators[pool].lease(3, "whoever computed it") for pool in ("full", "window")}
    parts.tree.insert(prefix, {pool: [PageOffer(0, lease, (1, 2, 3))] for pool, lease in leases.items()})
    others = window.lease(PAGES - parts.kinds.windows["window"], "others")
    pin = others.pin("a send")
    if back:
        others.release()
    allocation = parts.allocations.allocate(prefix, 6 * PAGE_TOKENS, "a request", reusable=3)
    assert parts.supply.cached_pages(prefix) == (3 if back else 0)
    pin.release()
    if back:
        assert allocation is None
        allocation = parts.allocations.allocate(prefix, 6 * PAGE_TOKENS, "a request", reusable=3)
    assert allocation is not None
    assert allocation.depth == (3 if back else 0)


def test_kept_pages_are_those_that_somebody_locks() -> None:
    parts = Parts("full")
    prefix = parts.prefix(6)
    parts.share(prefix)
    assert parts.supply.kept_pages(prefix) == 0
    lock = parts.tree.lock(parts.tree.match(prefix.head(4)), "a request")
    assert parts.supply.kept_pages(prefix) == 4
    assert parts.supply.free_pages("full") == PAGES - 4
    parts.tree.locks.unlock(lock)
    assert parts.supply.kept_pages(prefix) == 0


def test_positions_of_a_request_are_bounded_by_the_smallest_pool_that_it_fills() -> None:
    parts = Parts("full+window")
    assert parts.supply.max_positions == PAGES * PAGE_TOKENS
    assert parts.supply.fits({"full": PAGES, "window": PAGES})
    assert not parts.supply.fits({"full": 1, "window": PAGES + 1})


def test_check_says_which_pages_nobody_accounts_for(parts: Parts) -> None:
    assert parts.supply.check(dict.fromkeys(parts.pools.allocators, 0)) == []
    parts.pools.allocators["window"].lease(2, "a thief")
    assert parts.supply.check(dict.fromkeys(parts.pools.allocators, 0)) == ["window pages: 2 in use, 0 accounted for"]
