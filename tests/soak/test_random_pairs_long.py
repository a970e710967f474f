"""Eight hundred pairs of workers drawn at random: ``make soak ARGS="tests/soak/test_random_pairs_long.py"``."""

from __future__ import annotations

import pytest

from tests.support.random_pairs import run_colocated_seed, run_seed
from twinpool.cache.device.cpu_device import AsyncCpuDevice

PORTION = 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(8, 408, PORTION))
def test_four_hundred_draws_violate_nothing(first: int) -> None:
    for seed in range(first, first + PORTION):
        run_seed(seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(12, 212, PORTION))
def test_two_hundred_colocated_draws_violate_nothing(first: int) -> None:
    for seed in range(first, first + PORTION):
        run_colocated_seed(seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1008, 1408, PORTION))
def test_four_hundred_draws_with_threads_for_copies_and_sends_violate_nothing(first: int) -> None:
    for seed in range(first, first + PORTION):
        run_seed(seed, AsyncCpuDevice)
