"""Which tenants are expected to come again."""

from __future__ import annotations

from twinpool.worker.fair_shares import TenantReturns


def test_nobody_is_expected_where_one_tenant_comes_and_goes() -> None:
    returns = TenantReturns(60.0)
    for now in range(20):
        returns.follow({"a"} if now % 2 else set(), now)
        if now % 2:
            assert not returns.expected(now)


def test_another_is_from_its_coming_on_for_as_long_as_the_window_and_again() -> None:
    returns = TenantReturns(60.0)
    returns.follow({"a"}, 0.0)
    returns.follow({"a", "b"}, 100.0)
    assert returns.expected(100.0)
    returns.follow({"a"}, 101.0)
    assert returns.expected(159.9)
    assert not returns.expected(160.0)
    returns.follow({"a", "b"}, 200.0)
    assert returns.expected(200.0)


def test_two_that_stay_are_no_longer_news() -> None:
    returns = TenantReturns(60.0)
    for now in range(100):
        returns.follow({"a", "b"}, now)
    assert not returns.expected(99.0)


def test_of_two_that_take_turns_each_is_expected_while_the_other_has_work() -> None:
    returns = TenantReturns(60.0)
    returns.follow({"a"}, 0.0)
    for now in range(1, 20):
        returns.follow({"b"} if now % 2 else {"a"}, now)
        assert returns.expected(now)


def test_a_third_is_remembered_beside_the_only_one_that_has_work() -> None:
    returns = TenantReturns(60.0)
    for now, tenant in enumerate(["c", "b", "a", "a"]):
        returns.follow({tenant}, now)
    assert returns.expected(3.0)
    returns.follow({"a"}, 61.9)
    assert not returns.expected(62.0), "the last other one came 61 seconds ago"


def test_one_that_comes_again_and_again_is_remembered_once_and_leaves_the_place_of_another() -> None:
    returns = TenantReturns(60.0)
    for now, there in enumerate([{"b"}, {"a"}, set(), {"a"}, set(), {"a"}]):
        returns.follow(there, now)
    assert returns.expected(59.9), "the other one came within the window, and may come again"
    assert not returns.expected(60.0)
