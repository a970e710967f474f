"""Limits of tenants over several routers of one controller, and while that is away."""

from __future__ import annotations

import random

import pytest

from tests.router.security.leasing_routers import LeasingRouter, company, rounds
from twinpool.cluster.controller.quota_ledger import VALID_S
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import slice_of
from twinpool.router.security.tenant_accounts import RENEW_S, TenantLimited


def admitted(router: LeasingRouter, limits: TenantLimits, tokens: int = 1, choices: int = 1) -> bool:
    try:
        router.admit("acme", limits, choices, tokens)
    except TenantLimited:
        return False
    return True


def until_refused(router: LeasingRouter, limits: TenantLimits, tokens: int = 1) -> int:
    return next(count for count in range(10_000) if not admitted(router, limits, tokens))


@pytest.mark.parametrize("seed", range(5))
def test_routers_together_let_no_more_through_than_one_would(seed: int) -> None:
    """Whoever asks which, in any minute: a bucket, and what fills it meanwhile."""
    rng, limits = random.Random(seed), TenantLimits(requests_per_minute=40, tokens_per_minute=1000)
    clock, routers = company(4)
    let: list[tuple[float, int]] = []
    for now in rounds(clock, routers, 180):
        for _ in range(rng.choice((0, 1, 5))):
            tokens = rng.randint(1, 60)
            if admitted(rng.choice(routers), limits, tokens):
                let.append((now, tokens))
                routers[0].ended("acme") if routers[0].places else None
    for start, _ in let:
        minute = [tokens for at, tokens in let if start <= at < start + 60]
        assert len(minute) <= 2 * 40
        assert sum(minute) <= 2 * 1000
    steady = [tokens for at, tokens in let if 60 <= at < 180]
    assert sum(steady) > 0.9 * 2000 or len(steady) > 0.9 * 80, "and nothing of it is lost"


def test_a_slice_that_isnt_used_goes_to_whoever_asks() -> None:
    limits = TenantLimits(requests_per_minute=16)
    clock, (one, other) = company(2)
    assert admitted(one, limits)
    one.ended("acme")
    assert until_refused(other, limits) == 16 - 1 - 2, "a slice of two is the one's"
    for _ in rounds(clock, [one, other], 3 * RENEW_S):
        pass
    assert until_refused(other, limits) == 2, "and was given back"


def test_a_router_that_goes_gives_its_slice_back_by_its_end() -> None:
    limits = TenantLimits(tokens_per_minute=8000)
    clock, (gone, other) = company(2)
    assert admitted(gone, limits, 10)
    for _ in rounds(clock, [other], VALID_S):
        pass
    assert admitted(other, limits, 7900), "more than there would be without its slice"


def test_answers_in_flight_are_counted_over_all_routers() -> None:
    limits = TenantLimits(concurrent=8)
    clock, routers = company(3)
    assert sum(admitted(routers[number % 3], limits) for number in range(30)) >= 8 - 2
    assert sum(router.places.total() for router in routers) <= 8
    for _ in rounds(clock, routers, 3 * RENEW_S):
        pass
    busy = next(router for router in routers if router.places)
    while sum(router.places.total() for router in routers) < 8:
        assert any(admitted(router, limits) for router in routers), "no place is lost"
    with pytest.raises(TenantLimited, match="acme has 8 answers in flight; 8 are allowed at a time"):
        busy.admit("acme", limits, 1, 1)
    while busy.places:
        busy.ended("acme")
    for _ in rounds(clock, routers, 3 * RENEW_S):
        pass
    assert admitted(next(router for router in routers if router is not busy), limits)


@pytest.mark.parametrize(
    ("before", "after", "let"),
    [
        (TenantLimits(), TenantLimits(concurrent=6), 6),
        (TenantLimits(concurrent=12), TenantLimits(concurrent=6), 6),
        (TenantLimits(concurrent=3), TenantLimits(concurrent=6), 6),
        (TenantLimits(concurrent=6), TenantLimits(), 40),
        (TenantLimits(), TenantLimits(requests_per_minute=6), 6),
        (TenantLimits(requests_per_minute=60), TenantLimits(requests_per_minute=6), 6),
        (TenantLimits(requests_per_minute=6), TenantLimits(), 40),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.concurrent}-{value.requests_per_minute}",
)
def test_a_limit_that_changes_while_routers_run_is_kept_from_then_on(
    before: TenantLimits, after: TenantLimits, let: int
) -> None:
    """The key file is read anew, and an operator who adds a limit doesn't restart anything for it."""
    clock, routers = company(2)
    for router in routers:
        assert admitted(router, before)
        router.ended("acme")
    for _ in rounds(clock, routers, 3 * RENEW_S):
        pass
    assert sum(admitted(routers[number % 2], after) for number in range(40)) == let


def test_a_refusal_names_the_limit_and_when_the_cluster_has_room_again() -> None:
    limits = TenantLimits(requests_per_minute=12)
    _, (one, other) = company(2)
    assert until_refused(one, limits) == 12
    with pytest.raises(TenantLimited, match="acme may ask for 12 requests a minute") as caught:
        other.admit("acme", limits, 1, 1)
    assert caught.value.retry_after_s == 5


@pytest.mark.parametrize("tokens", [20, 500], ids=["slowly", "a slice in less than a second"])
def test_answers_overdraw_by_no_more_than_a_slice_a_router_before_all_know(tokens: int) -> None:
    limits = TenantLimits(tokens_per_minute=8000)
    clock, routers = company(4)
    for router in routers:
        assert admitted(router, limits, 10)
    spent = 40
    while True:
        clock.advance(0.1)
        for router in routers:
            router.spend("acme", tokens)
            spent += tokens
            router.claim()
        if not any(admitted(router, limits, 1) for router in routers):
            break
    assert spent <= 8000 + 8000 * clock.now() / 60 + 4 * (slice_of(8000) + tokens)
    assert spent > 0.9 * 8000


def test_who_is_beyond_its_limits_costs_the_controller_a_call_a_second() -> None:
    limits = TenantLimits(requests_per_minute=6)
    clock, (router,) = company(1)
    until_refused(router, limits)
    before = router.claims
    for _ in range(50):
        clock.advance(0.1)
        router.claim()
        admitted(router, limits)
    assert router.claims - before <= 5 / RENEW_S + 2


def test_who_is_idle_costs_it_nothing() -> None:
    limits = TenantLimits(requests_per_minute=6, tokens_per_minute=100, concurrent=2)
    clock, (router,) = company(1)
    assert admitted(router, limits)
    router.ended("acme")
    for _ in rounds(clock, [router], 5):
        pass
    before = router.claims
    for _ in rounds(clock, [router], 60):
        pass
    assert router.claims == before


def test_while_the_controller_is_away_a_router_goes_on_with_what_it_has_and_a_slice_a_minute() -> None:
    limits = TenantLimits(requests_per_minute=80)
    clock, (router,) = company(1)
    assert admitted(router, limits)
    router.controller = False
    for _ in rounds(clock, [router], 2):
        pass
    assert router.accounts.alone
    assert until_refused(router, limits) <= 2 * slice_of(80), "what it has"
    let = 0
    for _ in rounds(clock, [router], 120):
        let += admitted(router, limits)
    assert let == 2 * slice_of(80)


def test_and_with_as_many_answers_in_flight_as_it_had_places_or_a_slice_of_them() -> None:
    limits = TenantLimits(concurrent=16)
    clock, (router,) = company(1)
    assert admitted(router, limits, choices=5)
    router.controller = False
    for _ in rounds(clock, [router], 2):
        pass
    assert until_refused(router, limits) == slice_of(16), "it had claimed a slice beyond the five"
    while router.places:
        router.ended("acme")
    for _ in rounds(clock, [router], 60):
        pass
    assert until_refused(router, limits) == 5 + slice_of(16)


def test_what_went_through_meanwhile_is_told_when_it_is_back() -> None:
    limits = TenantLimits(requests_per_minute=80)
    clock, (router, other) = company(2)
    assert admitted(router, limits)
    router.controller = False
    for _ in rounds(clock, [router], 2):
        pass
    let = 1 + until_refused(router, limits)
    router.controller = True
    for _ in rounds(clock, [router], 3):
        pass
    assert not router.accounts.alone
    assert until_refused(other, limits) <= 80 - let + 80 * 5 / 60


def test_a_tenant_that_comes_while_the_controller_is_away_has_a_slice() -> None:
    limits = TenantLimits(requests_per_minute=80, tokens_per_minute=800, concurrent=8)
    _, (router,) = company(1)
    router.controller = False
    assert admitted(router, limits, 100)
    router.ended("acme")
    assert not admitted(router, limits, 1), "a slice of tokens"


def test_when_it_is_back_it_is_asked_before_anybody_is_refused() -> None:
    """Also for tenants that another one's claim brought it back for; and an idle router finds out by itself."""
    limits = TenantLimits(requests_per_minute=80)
    clock, (router,) = company(1)
    router.controller = False
    assert admitted(router, limits)
    router.admit("other", limits, 1, 1)
    router.controller = True
    assert router.accounts.alone
    for _ in rounds(clock, [router], 2):
        pass
    assert not router.accounts.alone
    for tenant in ("acme", "other"):
        for _ in range(2 * slice_of(80)):
            router.admit(tenant, limits, 1, 1)


def test_a_tenant_without_limits_needs_no_controller() -> None:
    _, (router,) = company(1)
    for _ in range(100):
        assert admitted(router, TenantLimits(), 1000)
        router.spend("acme", 100)
    router.claim()
    assert router.claims == 0
