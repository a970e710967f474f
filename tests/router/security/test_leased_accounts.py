"""Accounts of tenants whose limits are leased, by themselves: whose slice is whose, and which number is of what."""

from __future__ import annotations

import pytest

from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import QuotaAmounts, QuotaClaim, QuotaSlice
from twinpool.router.security.tenant_accounts import HeldQuota, TenantAccounts, TenantLimited

LIMITS = TenantLimits(requests_per_minute=60, tokens_per_minute=6000, concurrent=7)
A, B = "acme", "other"


def lacking(*tenants: str, now: float = 100.0) -> tuple[TenantAccounts, list[QuotaClaim]]:
    """Accounts in which a request of each tenant waits for a slice, and their claims."""
    accounts = TenantAccounts(leased=True)
    for tenant in tenants:
        assert accounts.lacks(tenant, LIMITS, 1, 50, now)
        accounts.wait_for(tenant, 1, 50)
    return accounts, accounts.claims(now)


def part(
    tenant: str, granted: tuple[float, float, int] = (5, 500, 3), left: tuple[float, float, int] = (11, 1100, 4)
) -> QuotaSlice:
    """A slice; amounts are of requests, tokens and answers in flight."""
    return QuotaSlice(tenant, QuotaAmounts(*granted), QuotaAmounts(*left))


def held(accounts: TenantAccounts, tenant: str) -> HeldQuota:
    found = accounts._accounts[tenant].held
    assert found is not None
    return found


def test_a_claim_says_of_each_tenant_what_it_may_has_used_and_waits_for() -> None:
    accounts, claims = lacking(A, B)
    assert [claim.tenant for claim in claims] == [A, B]
    assert {claim.limits for claim in claims} == {QuotaAmounts(60, 6000, 7)}
    accounts.granted(claims, [part(A), part(B)], 100.0)
    for tenant in (A, B):
        accounts.wait_for(tenant, 1, 50, -1)
    for _ in range(2):
        accounts.admit(A, LIMITS, 1, 50, 100.0)
    accounts.spend(A, 7)
    accounts.admit(B, LIMITS, 2, 30, 100.0)
    used = {claim.tenant: claim.used for claim in accounts.claims(102.0)}
    assert used == {A: QuotaAmounts(2, 107), B: QuotaAmounts(1, 30)}
    accounts.ended(A)
    assert accounts.places.total() == 3


def test_a_slice_is_the_tenants_that_it_names_and_one_in_anothers_place_is_nobodys() -> None:
    accounts, claims = lacking(A, B)
    accounts.granted(claims, [part(B, (9, 0, 0)), part(B, (8, 0, 0))], 100.0)
    assert (held(accounts, A).requests.level, held(accounts, A).told_at) == (0.0, None)
    assert held(accounts, B).requests.level == 8.0
    accounts.granted(claims, [part(A, (3, 0, 0))], 101.0)
    assert (held(accounts, A).requests.level, held(accounts, B).requests.level) == (3.0, 8.0)


def test_what_is_left_of_requests_tokens_and_places_is_each_its_own() -> None:
    accounts, claims = lacking(A)
    accounts.granted(claims, [part(A, (0, 0, 0), (0, 10, 2))], 100.0)
    quota = held(accounts, A)
    assert (quota.requests.left, quota.tokens.left, quota.places_left) == (0.0, 10.0, 2)
    with pytest.raises(TenantLimited, match="60 requests a minute") as limited:
        accounts.check(A, LIMITS, 1, 5, 100.0)
    assert limited.value.retry_after_s == 1
    accounts.granted(claims, [part(A, (0, 0, 0), (9, 10, 2))], 100.0)
    accounts.check(A, LIMITS, 1, 10, 100.0)
    with pytest.raises(TenantLimited, match="6000 tokens a minute") as limited:
        accounts.check(A, LIMITS, 1, 310, 100.0)
    assert limited.value.retry_after_s == 3
    with pytest.raises(TenantLimited, match="7 are allowed"):
        accounts.check(A, LIMITS, 3, 5, 100.0)


def test_a_controller_that_is_back_for_one_tenant_is_asked_for_the_others_before_they_are_refused() -> None:
    accounts, claims = lacking(A, B)
    accounts.granted(claims, [part(A), part(B)], 100.0)
    accounts.go_alone(101.0)
    assert accounts.alone
    assert not accounts.lacks(B, LIMITS, 1, 5000, 101.0), "nobody waits for one that is away"
    accounts.granted(claims[:1], [part(A)], 102.0)
    assert not accounts.alone
    assert held(accounts, B).alone, "it has not been heard of yet"
    assert accounts.lacks(B, LIMITS, 1, 5000, 102.0), "and now it is asked"
    assert not held(accounts, B).alone
    accounts.check(B, LIMITS, 1, 5000, 102.0)


def test_a_controller_that_is_back_is_asked_for_what_goes_beyond_more_than_a_slice() -> None:
    """Who has more than a slice lacked nothing while it was away; what others have had since, it doesn't know."""
    accounts, claims = lacking(A, B)
    accounts.granted(claims, [part(A), part(B, (5, 800, 3))], 100.0)
    accounts.go_alone(101.0)
    accounts.granted(claims[:1], [part(A)], 102.0)
    assert accounts.lacks(B, LIMITS, 1, 5000, 102.0)
    with pytest.raises(TenantLimited, match="6000 tokens a minute"):
        accounts.admit(B, LIMITS, 1, 5000, 102.0)
    assert not accounts.lacks(B, LIMITS, 1, 800, 102.0), "what is here is here"


def test_a_wait_is_claimed_for_as_long_as_it_lasts_and_no_tenant_waits_for_another() -> None:
    accounts, claims = lacking(A, A, B)
    assert {claim.tenant: claim.wanted.requests > 1 for claim in claims} == {A: True, B: True}
    assert held(accounts, A).pending == {"requests": 2, "tokens": 100, "concurrent": 2}
    accounts.wait_for(A, 1, 50, -1)
    assert held(accounts, A).pending == {"requests": 1, "tokens": 50, "concurrent": 1}
    accounts.wait_for(A, 1, 50, -1)
    accounts.wait_for(B, 1, 50, -1)
    assert accounts.claims(100.0) == [], "nobody waits, and nothing is here that could be given back"
