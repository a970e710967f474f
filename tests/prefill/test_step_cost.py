"""What steps cost, learned from steps whose cost is known."""

from __future__ import annotations

import random

import pytest

from twinpool.prefill.scheduler import MIN_STEPS, StepCost

FIXED_S, TOKEN_S, POSITION_S = 2e-3, 5e-5, 4e-8


def took(tokens: int, start: int) -> float:
    return FIXED_S + TOKEN_S * tokens + POSITION_S * summed(tokens, start)


def summed(tokens: int, start: int) -> int:
    return tokens * (2 * start + tokens) // 2


def learned(steps: int = 200, noise: float = 0.0) -> StepCost:
    rng, cost = random.Random(3), StepCost(512)
    for _ in range(steps):
        tokens, start = rng.randint(16, 512), rng.randrange(0, 1600, 16)
        cost.saw(tokens, summed(tokens, start), took(tokens, start) * rng.uniform(1 - noise, 1 + noise))
    return cost


def test_nothing_is_known_before_some_steps() -> None:
    cost = StepCost(512)
    for _ in range(MIN_STEPS):
        assert cost.tokens_within(0.01, 0) is None
        assert cost.seconds(64, 0) is None
        cost.saw(512, summed(512, 0), took(512, 0))
    assert cost.tokens_within(0.01, 0) is not None


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("start", [0, 800, 1500])
def test_as_many_tokens_are_found_as_add_so_much_to_a_step(start: int, noise: float) -> None:
    tokens = learned(noise=noise).tokens_within(0.01, start)
    assert tokens is not None
    assert took(round(tokens), start) - FIXED_S == pytest.approx(0.01, rel=0.15)


def test_steps_that_were_all_alike_are_taken_for_the_price_of_their_tokens() -> None:
    cost = StepCost(512)
    for _ in range(50):
        cost.saw(512, summed(512, 0), 0.05)
    assert cost.seconds(512, summed(512, 0)) == pytest.approx(0.05, rel=0.02)
    tokens = cost.tokens_within(0.01, 0)
    assert tokens is not None
    assert 60 < tokens < 200


def test_what_was_in_the_way_of_one_step_says_little_of_the_next() -> None:
    cost = learned()
    cost.saw(64, summed(64, 0), 3.0)
    assert cost.seconds(256, summed(256, 0)) == pytest.approx(took(256, 0), rel=0.3)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    cost, rng = learned(), random.Random(4)
    for _ in range(100):
        tokens, start = rng.randint(16, 512), rng.randrange(0, 1600, 16)
        cost.saw(tokens, summed(tokens, start), 4 * took(tokens, start))
    assert cost.seconds(256, summed(256, 0)) == pytest.approx(4 * took(256, 0), rel=0.1)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 0.1), (64, 0.0), (64, -1.0), (64, float("inf"))])
def test_what_tells_nothing_is_left_out(tokens: int, seconds: float) -> None:
    cost = learned()
    before = cost.seconds(256, 0)
    cost.saw(tokens, 0, seconds)
    assert cost.seconds(256, 0) == before


def test_no_price_is_negative_however_steps_were() -> None:
    cost, rng = StepCost(512), random.Random(5)
    for _ in range(300):
        tokens, start = rng.randint(1, 512), rng.randrange(2000)
        cost.saw(tokens, summed(tokens, start), rng.choice((1e-6, 0.3)) / tokens)
        within = cost.tokens_within(0.01, rng.randrange(4000))
        assert within is None or within > 0
        assert (cost.seconds(64, 0) or 0.0) <= (cost.seconds(128, 999) or 0.0)
