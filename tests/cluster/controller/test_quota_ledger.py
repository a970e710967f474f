"""The quota ledger by itself: who holds what of a tenant's limits, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.cluster.controller import quota_ledger
from twinpool.cluster.controller.quota_ledger import FORGET_S, MAX_TENANTS, MINUTE_S, VALID_S, QuotaLedger
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.messages.leases import QuotaAmounts, QuotaClaim, QuotaSlice

LIMITS = QuotaAmounts(60, 6000, 10)
NONE = QuotaAmounts()


class Ledger:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.ledger = QuotaLedger(self.clock)

    def lease(
        self, router: str, wanted: QuotaAmounts = NONE, used: QuotaAmounts = NONE, tenant: str = "acme"
    ) -> QuotaSlice:
        return self.ledger.lease(router, QuotaClaim(tenant, LIMITS, used, wanted))


def test_what_one_has_no_other_gets() -> None:
    scene = Ledger()
    assert scene.lease("a", QuotaAmounts(50, 1000, 6)).granted == QuotaAmounts(50, 1000, 6)
    assert scene.lease("b", QuotaAmounts(50, 1000, 6)) == QuotaSlice(
        "acme", QuotaAmounts(10, 1000, 4), QuotaAmounts(0, 4000, 0)
    )
    assert scene.lease("c", QuotaAmounts(1, 5000, 1), tenant="other").granted == QuotaAmounts(1, 5000, 1)


def test_a_claim_gives_back_what_wasnt_used_and_saying_it_twice_changes_nothing() -> None:
    scene = Ledger()
    scene.lease("a", QuotaAmounts(50, 5000, 6))
    for _ in range(3):
        assert scene.lease("a", used=QuotaAmounts(20, 2500)).left == QuotaAmounts(40, 3500, 10)


def test_a_word_that_comes_late_is_not_counted_a_second_time_by_the_next_one() -> None:
    scene = Ledger()
    for used in (0, 20, 5, 20):
        left = scene.lease("a", used=QuotaAmounts(used, 10 * used)).left
    assert left == QuotaAmounts(40, 5800, 10)


def test_what_was_used_of_a_slice_fills_again_from_the_time_at_which_it_was_leased() -> None:
    scene = Ledger()
    scene.lease("a", QuotaAmounts(60, 6000))
    scene.clock.advance(4.5)
    left = scene.lease("a", used=QuotaAmounts(30, 3000)).left
    assert (left.requests, left.tokens) == pytest.approx((34.5, 3450))


def test_answers_overdraw_and_the_next_minute_pays() -> None:
    scene = Ledger()
    scene.lease("a", QuotaAmounts(tokens=1000))
    assert scene.lease("a", used=QuotaAmounts(tokens=9000)).left.tokens == -3000
    assert scene.lease("b", QuotaAmounts(tokens=100)).granted.tokens == 0
    scene.clock.advance(MINUTE_S)
    assert scene.lease("b", QuotaAmounts(tokens=9000)).granted.tokens == 3000


def test_a_bucket_fills_within_a_minute_and_not_over_what_is_held() -> None:
    scene = Ledger()
    scene.lease("a", QuotaAmounts(60, 6000))
    scene.lease("a", used=QuotaAmounts(60, 6000))
    scene.clock.advance(MINUTE_S / 4)
    assert scene.lease("b").left == QuotaAmounts(15, 1500, 10)
    scene.clock.advance(MINUTE_S)
    assert scene.lease("b", QuotaAmounts(20, 2000)).left == QuotaAmounts(40, 4000, 10)
    scene.clock.advance(VALID_S - 0.1)
    assert scene.lease("c").left == QuotaAmounts(40, 4000, 10)


def test_the_slice_of_a_router_that_doesnt_come_again_is_taken_back() -> None:
    scene = Ledger()
    scene.lease("gone", QuotaAmounts(60, 6000, 10))
    scene.clock.advance(VALID_S - 0.1)
    assert scene.lease("b").left == QuotaAmounts(0, 0, 0)
    scene.clock.advance(0.2)
    assert scene.lease("b", QuotaAmounts(60, 6000, 10)).granted == QuotaAmounts(60, 6000, 10)
    late = scene.lease("gone", used=QuotaAmounts(10, 500))
    assert (late.left.requests, late.left.tokens) == (-10, -500), "what it says late counts"


def test_of_a_router_that_is_new_here_nothing_is_known_that_it_used_before() -> None:
    """So it is where the controller before has kept nothing."""
    scene = Ledger()
    assert scene.lease("a", used=QuotaAmounts(5000, 100_000)).left == LIMITS
    assert scene.lease("a", used=QuotaAmounts(5001, 100_010)).left == QuotaAmounts(59, 5990, 10)
    scene.clock.advance(FORGET_S)
    assert scene.lease("a", used=QuotaAmounts(9000, 200_000)).left == LIMITS


def test_a_limit_that_is_new_begins_full_and_one_that_sinks_holds_at_once() -> None:
    scene = Ledger()
    scene.ledger.lease("a", QuotaClaim("acme", NONE, NONE, NONE))
    assert scene.lease("a").left == LIMITS
    small = QuotaAmounts(6, 60, 2)
    part = scene.ledger.lease("a", QuotaClaim("acme", small, NONE, QuotaAmounts(60, 6000, 10)))
    assert part.granted == small


@pytest.mark.parametrize("before", [(NONE,), (LIMITS, NONE)])
def test_a_limit_begins_full_once_each_time_that_it_comes(before: tuple[QuotaAmounts, ...]) -> None:
    """A tenant that had none yet, and one whose limit was removed and comes back after all of it was used."""
    scene = Ledger()
    used = NONE
    for limits in before:
        granted = scene.ledger.lease("a", QuotaClaim("acme", limits, used, limits)).granted
        assert granted == limits
        used = QuotaAmounts(used.requests + granted.requests, used.tokens + granted.tokens)
    assert scene.lease("a", LIMITS, used).granted == LIMITS
    used = QuotaAmounts(used.requests + LIMITS.requests, used.tokens + LIMITS.tokens)
    for _ in range(2):
        again = scene.lease("a", LIMITS, used)
        assert (again.granted.requests, again.granted.tokens) == (0, 0), "no time has passed since it was used"
        assert (again.left.requests, again.left.tokens) == (0, 0)
    scene.clock.advance(MINUTE_S / 4)
    assert scene.lease("a", LIMITS, used).granted == QuotaAmounts(15, 1500, 10)


@pytest.mark.parametrize("first", [QuotaAmounts(requests=60), QuotaAmounts(tokens=6000)], ids=["tokens", "requests"])
def test_a_limit_that_comes_beside_another_begins_full_and_leaves_that_as_it_is(first: QuotaAmounts) -> None:
    scene = Ledger()
    scene.ledger.lease("a", QuotaClaim("acme", first, NONE, NONE))
    used = QuotaAmounts(first.requests / 2, first.tokens / 2)
    left = scene.ledger.lease("a", QuotaClaim("acme", LIMITS, used, NONE)).left
    assert left == QuotaAmounts(60 - used.requests, 6000 - used.tokens, 10)


def test_tenants_and_routers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Ledger()
    for number in range(MAX_TENANTS + 10):
        scene.lease("a", tenant=f"t{number}")
    assert len(scene.ledger) == MAX_TENANTS
    monkeypatch.setattr(quota_ledger, "MAX_ROUTERS", 3)
    for number in range(3):
        scene.lease(f"r{number}", QuotaAmounts(1, 1, 1))
    assert scene.lease("one too many", QuotaAmounts(1, 1, 1)).granted == NONE
    assert scene.lease("r2", QuotaAmounts(1, 1, 1)).granted == QuotaAmounts(1, 1, 1)


def test_the_next_controller_goes_on_with_buckets_and_slices_and_knows_what_was_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Ledger()
    assert not scene.ledger.changed
    scene.lease("a", QuotaAmounts(50, 1000, 6))
    scene.lease("b", used=QuotaAmounts(7, 70), tenant="other")
    assert scene.ledger.changed
    kept = scene.ledger.kept()
    assert not scene.ledger.changed
    scene.clock.advance(30.0)
    scene.ledger = QuotaLedger(scene.clock, kept)
    assert scene.lease("b", QuotaAmounts(50, 0, 6)) == QuotaSlice(
        "acme", QuotaAmounts(10, 0, 4), QuotaAmounts(0, 5000, 0)
    ), "the time without a controller fills no bucket"
    assert scene.lease("b", used=QuotaAmounts(8, 71), tenant="other").left == QuotaAmounts(59, 5999, 10)
    assert scene.lease("a", used=QuotaAmounts(20, 500)).left.tokens == 5500
    for broken in ("no JSON", "[1]", '{"acme": [1, 2]}', '{"acme": [[60, 6000, 10, 9], 1, 1, {}]}'):
        assert QuotaLedger(scene.clock, broken).lease("a", QuotaClaim("acme", LIMITS, NONE, NONE)).left == LIMITS
        assert "can't be read" in caplog.text
        caplog.clear()


def test_what_is_kept_is_bounded_and_of_who_was_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_ledger, "MAX_KEPT", 6)
    scene = Ledger()
    for number in range(10):
        scene.lease("a", QuotaAmounts(60), tenant=f"t{number}")
    scene.ledger = QuotaLedger(scene.clock, scene.ledger.kept())
    assert len(scene.ledger) == 3
    kept = scene.ledger.kept()
    assert QuotaLedger(scene.clock, kept).kept() == kept, "who was asked for last is so for the next one, too"
    assert scene.lease("b", tenant="t9").left.requests == 0
    assert scene.lease("b", tenant="t6").left.requests == 60


AMOUNTS = st.integers(-5, 80)


STEP = st.tuples(st.floats(0, 8), st.sampled_from("abc"), AMOUNTS, AMOUNTS, st.integers(0, 60), st.booleans())


@given(st.lists(STEP, max_size=60))
def test_what_routers_hold_and_what_is_left_is_never_more_than_the_limit(
    steps: list[tuple[float, str, int, int, int, bool]],
) -> None:
    """Nor where the next controller goes on in the middle of it."""
    scene, used, held = Ledger(), dict.fromkeys("abc", 0.0), dict[str, tuple[float, QuotaAmounts]]()
    replaced = False
    for later, router, requests, places, spent, next_controller in steps:
        scene.clock.advance(later)
        if next_controller:
            scene.ledger = QuotaLedger(scene.clock, scene.ledger.kept())
        used[router] += spent
        part = scene.lease(router, QuotaAmounts(requests, 0, places), QuotaAmounts(used[router]))
        held[router] = scene.clock.now(), part.granted
        valid = [amounts for at, amounts in held.values() if scene.clock.now() - at < VALID_S]
        assert all(amounts.requests >= 0 and amounts.concurrent >= 0 for amounts in valid)
        assert sum(amounts.requests for amounts in valid) + part.left.requests <= LIMITS.requests + 1e-6
        places_known = sum(amounts.concurrent for amounts in valid) + part.left.concurrent
        assert places_known <= LIMITS.concurrent
        replaced = replaced or next_controller  # Which counts slices as claimed again.
        assert replaced or places_known == LIMITS.concurrent
