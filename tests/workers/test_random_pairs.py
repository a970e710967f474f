"""Whatever pools, tiers and policies two workers are given, every request of every burst ends in its exact answer, and
every page comes back. Two hangs of a full host tier were found so; ``make soak`` draws four hundred more."""

from __future__ import annotations

import pytest

from tests.support.random_pairs import run_seed
from twinpool.cache.device.cpu_device import AsyncCpuDevice


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_every_answer_is_exact_and_nothing_is_left(seed: int) -> None:
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_nor_does_anything_change_where_copies_and_sends_have_threads(seed: int) -> None:
    run_seed(seed, AsyncCpuDevice)
