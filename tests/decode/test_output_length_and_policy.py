"""How long answers are expected to get, who leaves the device, and what copying is weighed against."""

from __future__ import annotations

import random

import pytest

from twinpool.decode.retraction.memory_pressure import KNOWN, REMEMBERED, OutputLengths
from twinpool.decode.retraction.retraction_policy import RetractionCandidate, RetractionRates, cheaper_to_copy, victims


def seen(quantile: float, *lengths: int) -> OutputLengths:
    growth = OutputLengths(quantile, 64)
    for length in lengths:
        growth.ended(length)
    return growth


def candidate(
    name: str, *, priority: int = 0, generated: int = 5, prompt: int = 10, arrived: float = 0.0, pages: int = 2
) -> RetractionCandidate[str]:
    return RetractionCandidate(name, priority, generated, prompt, arrived, pages)


# ------------------------------------------------------------ growth


def test_before_anything_is_known_an_answer_is_expected_to_come_to_what_was_configured() -> None:
    growth = seen(0.5, *[3] * (KNOWN - 1))
    assert growth.expected(0, 100_000) == 64, "and not to the rest of the context"
    assert growth.expected(0, 50) == 50
    assert growth.expected(40, 100_000) == 80
    assert growth.expected(90_000, 100_000) == 100_000


def test_an_answer_is_expected_to_be_what_a_share_of_recent_ones_stayed_within() -> None:
    growth = seen(0.75, *range(1, 101))
    assert growth.expected(0, 1000) == 76
    assert growth.expected(60, 1000) == 91, "of those that came so far"
    assert growth.expected(0, 50) == 50, "never more than it may be"


def test_what_is_longer_than_all_that_were_seen_may_be_half_done() -> None:
    growth = seen(0.75, *[10] * 50)
    assert growth.expected(40, 1000) == 80
    assert growth.expected(40, 60) == 60


def test_what_is_longer_than_nearly_all_comes_to_the_longest_that_was_seen_at_least() -> None:
    growth = seen(0.75, *[10] * 50, 300)
    assert growth.expected(40, 1000) == 300
    assert growth.expected(200, 1000) == 400


def test_as_many_answers_as_make_a_rule_are_enough_and_those_of_the_same_length_are_not_longer() -> None:
    growth = seen(0.5, *[3] * KNOWN)
    assert growth.expected(0, 1000) == 3, "the last of them made it known"
    growth = seen(0.5, *[20] * 100, *[30] * KNOWN)
    assert growth.expected(20, 1000) == 30, "as many have come further than this one"
    growth = seen(0.5, *[20] * 100, *[30] * (KNOWN - 1))
    assert growth.expected(20, 1000) == 40, "and here one less"


def test_an_estimate_never_falls_behind_what_is_there() -> None:
    rng = random.Random(3)
    growth = seen(0.75, *(rng.randint(1, 200) for _ in range(300)))
    for generated in range(400):
        assert generated <= growth.expected(generated, 500) <= 500


def test_old_answers_are_forgotten() -> None:
    growth = seen(0.75, *[500] * 300, *[10] * REMEMBERED)
    assert growth.expected(0, 1000) == 10


def test_retractions_raise_the_estimate_and_ends_let_it_come_back() -> None:
    growth = seen(0.5, *range(1, 101))
    before = growth.expected(0, 1000)
    for _ in range(4):
        growth.retracted()
    raised = growth.expected(0, 1000)
    assert raised > before + 30
    assert growth.quantile <= 1
    for _ in range(100):
        growth.ended(50)
    assert growth.quantile == pytest.approx(0.5, abs=0.01)


def test_each_retraction_raises_the_share_half_of_the_way_to_all_and_each_end_takes_a_tenth_of_it_back() -> None:
    growth = OutputLengths(0.5, 64)
    growth.retracted()
    assert growth.quantile == pytest.approx(0.75)
    growth.retracted()
    assert growth.quantile == pytest.approx(0.875)
    growth.ended(5)
    assert growth.quantile == pytest.approx(0.5 + 0.9 * 0.375)


def test_what_answers_came_to_bounds_what_is_still_expected() -> None:
    growth = seen(0.5, *[10] * (KNOWN - 1))
    assert growth.to_come(500) == 500
    growth.ended(18)
    assert growth.to_come(500) == pytest.approx(11)
    assert growth.to_come(3) == 3


# ------------------------------------------------------------ who leaves


def test_the_fewest_tokens_go_first_then_the_longest_prompt() -> None:
    young = candidate("young", generated=1)
    long = candidate("long", generated=5, prompt=90)
    old = candidate("old", generated=50, prompt=90)
    short = candidate("short", generated=5, prompt=9)
    assert victims([old, short, long, young], 100) == ["young", "long", "short", "old"]


def test_of_those_that_are_alike_the_one_that_came_last_goes_first() -> None:
    assert victims([candidate("early", arrived=1.0), candidate("late", arrived=2.0)], 1) == ["late"]


def test_lower_priority_goes_before_anything_else() -> None:
    assert victims([candidate("urgent", priority=1, generated=0), candidate("idle", generated=900)], 1) == ["idle"]


def test_as_few_leave_as_make_room_and_one_at_least() -> None:
    many = [candidate(str(n), generated=n, pages=2) for n in range(5)]
    assert victims(many, 3) == ["0", "1"]
    assert victims(many, 0) == ["0"]
    assert victims([], 3) == []


# ------------------------------------------------------------ copied or computed again


def test_until_all_rates_are_known_state_is_copied() -> None:
    rates = RetractionRates()
    assert cheaper_to_copy(1 << 40, 1, rates)
    rates.saw_out(1, 10.0)
    rates.saw_prefill(1000, 1.0)
    assert cheaper_to_copy(1 << 40, 1, rates)


def test_the_quicker_of_the_two_is_taken_by_what_was_measured() -> None:
    rates = RetractionRates()
    rates.saw_out(1000, 1.0)
    rates.saw_back(1000, 1.0)
    rates.saw_prefill(10, 1.0)
    assert cheaper_to_copy(4000, 100, rates), "8 s there and back, 10 s to compute"
    assert not cheaper_to_copy(6000, 100, rates), "12 s there and back"
    for _ in range(30):
        rates.saw_prefill(1000, 1.0)
    assert not cheaper_to_copy(4000, 100, rates), "prefill is quick now"


def test_what_took_no_time_says_nothing() -> None:
    rates = RetractionRates()
    rates.saw_out(1000, 0.0)
    rates.saw_back(0, 1.0)
    assert rates == RetractionRates()


def test_each_new_figure_counts_for_three_tenths_and_nothing_counts_for_nothing() -> None:
    rates = RetractionRates()
    rates.saw_out(1000, 2.0)
    assert rates.out_bytes_per_s == 500
    rates.saw_out(3000, 2.0)
    assert rates.out_bytes_per_s == pytest.approx(0.7 * 500 + 0.3 * 1500)
    rates.saw_out(0, 1.0)
    rates.saw_out(1000, 0.0)
    assert rates.out_bytes_per_s == pytest.approx(800)
    rates.saw_back(100, 1.0)
    rates.saw_prefill(10, 1.0)
    assert rates == RetractionRates(pytest.approx(800), 100, 10), "each figure is its own"  # type: ignore[arg-type]


def test_state_that_is_as_soon_there_and_back_as_computed_is_copied() -> None:
    rates = RetractionRates(1000, 1000, 10)
    assert cheaper_to_copy(5000, 100, rates)
    assert not cheaper_to_copy(5001, 100, rates)
