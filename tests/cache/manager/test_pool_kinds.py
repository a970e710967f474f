"""What a request leases in each kind of pool."""

from __future__ import annotations

from tests.support.pool_sets import pool_sets
from twinpool.cache.manager.running_pages import PoolKinds


def test_pools_are_told_apart_by_what_they_hold() -> None:
    kinds = PoolKinds.of(pool_sets()["all"], stride=4)
    assert (kinds.full, kinds.paged, kinds.states) == ("full", ("full", "window"), ("state",))
    assert kinds.windows == {"window": pool_sets()["all"].window_hold("window", 4)}
    assert PoolKinds.of(pool_sets()["full"], 4) == PoolKinds("full", ("full",), {}, ())


def test_a_request_needs_no_more_of_a_window_than_it_holds_at_once_and_one_slot() -> None:
    kinds = PoolKinds("full", ("full", "window"), {"window": 5}, ("state",))
    assert kinds.needs({"full": 30, "window": 30}) == {"full": 30, "window": 5, "state": 1}
    assert kinds.needs({"full": 3, "window": 3}) == {"full": 3, "window": 3, "state": 1}
