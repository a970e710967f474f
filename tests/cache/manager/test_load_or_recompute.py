"""Loads from the host: whether they are worth it, whether they fit, and when what was loaded may be used."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.manager.parts import PAGE_TOKENS, PAGES, Operation, Parts, Sized, match


@pytest.mark.parametrize(("policy", "worth"), [("always", True), ("never", False), ("auto", True)])
def test_without_rates_the_policy_says_whether_loading_is_worth_it(policy: str, worth: bool) -> None:
    planner = Parts(load_back=policy).planner
    assert planner.worth_loading(match(5, 2)) is worth
    assert not planner.worth_loading(match(5, 5)), "there is nothing to load"


def test_loading_is_skipped_where_computing_was_quicker_and_that_is_counted() -> None:
    parts = Parts(load_back="auto")
    parts.loads.bytes_per_s = 1.0
    parts.planner.computed(1000, 1.0)
    assert not parts.planner.worth_loading(match(5, 2))
    assert parts.planner.counters == {"loads_skipped": 1}
    parts.loads.bytes_per_s = 1e12
    assert parts.planner.worth_loading(match(5, 2))
    assert parts.planner.counters == {"loads_skipped": 1}


def test_a_load_is_weighed_with_the_pages_of_all_pools_that_it_brings() -> None:
    """Windows are loaded as well: a page of the prefix is a page of each."""
    parts = Parts("full+window")
    spec = parts.tree.spec
    page_bytes = spec.unit_bytes("full") + spec.unit_bytes("window")
    parts.loads.bytes_per_s = 100.0 * page_bytes
    for tokens_per_s, worth in ((100.0 * PAGE_TOKENS - 1, True), (100.0 * PAGE_TOKENS + 1, False)):
        planner = Parts("full+window").planner
        planner._load_back = parts.planner._load_back
        planner.computed(int(tokens_per_s), 1.0)
        assert planner.worth_loading(match(5, 2)) is worth
        assert planner.rates == {
            "compute_tokens_per_s": tokens_per_s,
            "load_tokens_per_s": pytest.approx(100.0 * PAGE_TOKENS),
        }


def test_pages_to_load_into_are_leased_with_the_request_s_own(parts: Parts) -> None:
    parts.loads.lacking = [Sized("full", 2), Sized("state", 1), Sized("full", 1)]
    lock = parts.tree.locks.keep((), "a request")
    loads = parts.planner.loads(lock)
    assert loads == {"full": 3, "state": 1}
    leases = parts.planner.lease(lock, loads, {"full": 4, "window": 2, "state": 1})
    assert leases is not None
    assert {pool: len(lease) for pool, lease in leases.items()} == {"full": 4, "window": 2, "state": 1}
    assert parts.loads.planned == [{"full": 3, "state": 1}]
    assert {lease.owner for lease in leases.values()} == {"a request"}


def test_without_room_nothing_is_planned_and_the_lock_is_given_back(parts: Parts) -> None:
    lock = parts.tree.locks.keep((), "a request")
    assert parts.planner.lease(lock, {"full": 2}, {"full": PAGES - 1}) is None
    assert len(parts.tree.locks) == 0
    assert parts.loads.planned == []
    assert set(parts.free().values()) == {PAGES}


def test_the_first_load_always_fits_and_the_next_one_only_within_the_limit() -> None:
    parts = Parts(load_bytes=1)
    keep = parts.tree.locks.keep
    assert parts.planner.lease(keep((), "first"), {"full": 1}, {"full": 1}) is not None
    parts.loads.nbytes = 1
    assert parts.planner.lease(keep((), "second"), {"full": 1}, {"full": 1}) is None
    assert parts.planner.lease(keep((), "third"), {}, {"full": 1}) is not None, "it loads nothing"


def test_an_allocation_is_ready_when_all_of_its_state_is_there_and_good(parts: Parts) -> None:
    ready = parts.allocations.ready
    allocation = parts.open()
    assert ready(allocation)
    parts.allocations.open(allocation, fresh=True)
    assert not ready(allocation), "its slot holds another's state still"
    parts.allocations.launch()
    parts.loads.loading = True
    assert not ready(allocation)
    parts.loads.loading = False
    operation: Any = Operation()
    allocation.started.append(operation)
    assert not ready(allocation)
    operation.done = True
    assert ready(allocation)
    operation.error = RuntimeError("it broke")
    assert not ready(allocation)
