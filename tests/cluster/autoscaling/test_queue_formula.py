"""Erlang's C formula, against a simulated queue and published values."""

from __future__ import annotations

import heapq
import random

import pytest

from twinpool.cluster.autoscaling.pool_need import waiting_share, workers_needed


def simulated(workers: int, offered: float, limit_s: float, count: int = 60_000) -> float:
    """The share that waits longer than `limit_s` in a queue of Poisson arrivals and exponential service of 1 s."""
    rng, free, now, late = random.Random(5), [0.0] * workers, 0.0, 0
    for _ in range(count):
        now += rng.expovariate(offered)
        begins = max(now, heapq.heappop(free))
        late += begins - now > limit_s
        heapq.heappush(free, begins + rng.expovariate(1.0))
    return late / count


@pytest.mark.parametrize(("workers", "offered", "limit_s"), [(1, 0.5, 0.0), (3, 2.1, 0.3), (8, 6.5, 0.5)])
def test_the_share_that_waits_is_that_of_a_queue(workers: int, offered: float, limit_s: float) -> None:
    assert waiting_share(workers, offered, 1.0, limit_s) == pytest.approx(
        simulated(workers, offered, limit_s), abs=0.03
    )


def test_the_share_that_waits_at_all_is_the_published_one() -> None:
    """One server: the load itself. Two: a^2 / (2 + a). (Kleinrock, Queueing Systems I, 3.4 and 3.5.)"""
    assert waiting_share(1, 0.7, 1.0, 0.0) == pytest.approx(0.7)
    assert waiting_share(2, 1.2, 1.0, 0.0) == pytest.approx(1.2**2 / (2 + 1.2))


def test_a_queue_that_only_grows_makes_everybody_wait_and_no_load_nobody() -> None:
    assert waiting_share(2, 2.0, 1.0, 100.0) == 1.0
    assert waiting_share(2, 0.0, 1.0, 0.0) == 0.0
    assert workers_needed(0.0, 1.0, 0.5, 0.05) == 0.0


@pytest.mark.parametrize("offered", [0.05, 0.6, 2.3, 7.9, 40.0])
def test_as_many_workers_as_are_needed_are_enough_and_one_fewer_is_not(offered: float) -> None:
    need = workers_needed(offered, 1.0, 0.5, 0.05)
    enough = -int(-need // 1)
    assert waiting_share(enough, offered, 1.0, 0.5) <= 0.05
    assert enough - 1 <= offered or waiting_share(enough - 1, offered, 1.0, 0.5) > 0.05
    assert need <= workers_needed(offered * 1.05, 1.0, 0.5, 0.05), "more load never needs fewer"
