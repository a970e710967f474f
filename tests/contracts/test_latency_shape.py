"""Histograms of seconds: their percentiles against sorted values, and what adding and differences keep."""

from __future__ import annotations

import math
import random

import pytest

from twinpool.contracts.messages.router_report import BOUNDS_S, BUCKETS, STEPS, LatencyShape, added, grown, percentile


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("middle_s", [0.002, 0.08, 3.0])
def test_a_percentile_is_within_a_bucket_of_the_sorted_value(share: float, middle_s: float) -> None:
    rng, shape = random.Random(int(middle_s * 1000)), LatencyShape()
    values = sorted(middle_s * math.exp(rng.gauss(0, 0.8)) for _ in range(2_000))
    for value in values:
        shape.observe(value)
    found = percentile(shape.counts, share)
    exact = values[math.ceil(share * len(values)) - 1]
    assert found is not None
    assert exact / 2 ** (1 / STEPS) <= found <= exact * 2 ** (1 / STEPS)


def test_without_values_there_is_no_percentile_and_what_is_too_long_counts_as_the_last_bound() -> None:
    shape = LatencyShape()
    assert percentile(shape.counts, 0.5) is None
    shape.observe(10_000.0)
    assert percentile(shape.counts, 0.5) == BOUNDS_S[-1]
    assert sum(shape.counts) == 1


def test_a_bound_belongs_to_its_bucket_and_nothing_is_lost() -> None:
    shape = LatencyShape()
    for bound in BOUNDS_S:
        shape.observe(bound)
    shape.observe(0.0)
    assert shape.counts[:-1] == [2, *[1] * (BUCKETS - 2)]


def test_sums_and_growth_are_bucket_by_bucket_and_a_restart_takes_nothing_off() -> None:
    one, other = [0] * BUCKETS, [0] * BUCKETS
    one[3], other[3], other[7] = 2, 5, 1
    assert added([one, other]) == [a + b for a, b in zip(one, other, strict=True)]
    assert grown(other, one)[3] == 3
    assert sum(grown(one, other)) == 0
