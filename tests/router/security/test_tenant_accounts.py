"""Budgets of a minute, beside a plain count of what was let through in any minute: of a router that has them to itself,
and of one that leases them of a controller, alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.security.leasing_routers import LeasingRouter
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import slice_of
from twinpool.router.security.tenant_accounts import LeasedBudget, TenantAccounts, TenantLimited

Kind = Callable[[], TenantAccounts | LeasingRouter]
KINDS = pytest.mark.parametrize("kind", [TenantAccounts, LeasingRouter])


def admitted(
    accounts: TenantAccounts | LeasingRouter, limits: TenantLimits, tokens: int, now: float, choices: int = 1
) -> bool:
    try:
        accounts.admit("acme", limits, choices, tokens, now)
    except TenantLimited:
        return False
    return True


@KINDS
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 60)), max_size=60), st.integers(1, 8), st.integers(60, 200))
def test_no_two_minutes_see_more_than_two_allowances(
    kind: Kind, asked: list[tuple[float, int]], requests: int, tokens: int
) -> None:
    accounts, limits = kind(), TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens)
    let: list[tuple[float, int]] = []
    now = 0.0
    for later, amount in asked:
        now += later
        if admitted(accounts, limits, amount, now):
            let.append((now, amount))
    for start, _ in let:
        minute = [amount for at, amount in let if start <= at < start + 60]
        assert len(minute) <= 2 * requests
        assert sum(minute) <= 2 * tokens


@KINDS
def test_who_waits_as_long_as_it_was_told_is_let_in_and_not_before(kind: Kind) -> None:
    accounts, limits = kind(), TenantLimits(requests_per_minute=3)
    assert all(admitted(accounts, limits, 1, 100.0) for _ in range(3))
    with pytest.raises(TenantLimited) as caught:
        accounts.admit("acme", limits, 1, 1, 100.0)
    assert caught.value.retry_after_s == 20
    assert not admitted(accounts, limits, 1, 119.0)
    assert admitted(accounts, limits, 1, 120.1)


@KINDS
def test_tokens_of_answers_are_paid_by_the_next_request(kind: Kind) -> None:
    accounts, limits = kind(), TenantLimits(tokens_per_minute=60)
    accounts.admit("acme", limits, 1, 10, 0.0)
    accounts.spend("acme", 110)
    assert not admitted(accounts, limits, 1, 60.0)
    assert admitted(accounts, limits, 1, 61.1)


@KINDS
def test_a_prompt_above_a_minutes_tokens_waits_for_a_full_budget_and_is_let_in(kind: Kind) -> None:
    accounts, limits = kind(), TenantLimits(tokens_per_minute=60)
    assert admitted(accounts, limits, 500, 0.0)
    assert not admitted(accounts, limits, 1, 400.0)


@KINDS
def test_what_is_refused_is_not_booked_and_tenants_dont_pay_for_each_other(kind: Kind) -> None:
    accounts, limits = kind(), TenantLimits(requests_per_minute=5, tokens_per_minute=10, concurrent=2)
    assert not admitted(accounts, limits, 1, 0.0, choices=3)
    assert admitted(accounts, limits, 10, 0.0, choices=2)
    assert accounts.places.total() == 2
    accounts.admit("other", limits, 2, 10, 0.0)
    for _ in range(2):
        accounts.ended("acme")
        accounts.ended("other")
    assert accounts.places.total() == 0
    assert not admitted(accounts, limits, 1, 0.0), "its tokens are spent"
    assert admitted(accounts, limits, 1, 6.1)


def test_what_a_router_holds_beyond_a_slice_stays_its_own_while_the_controller_is_away() -> None:
    """It was granted. Only what is filled up by the router itself ends at a slice."""
    share = slice_of(80)
    budget = LeasedBudget(level=3.0 * share, alone=True)
    for minute in (1, 2):
        budget.refill(80, 60.0 * minute)
        assert budget.level == 3 * share
    budget.spend(2.5 * share)
    budget.refill(80, 150.0)
    assert budget.level == pytest.approx(share)
