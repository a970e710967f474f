"""Rooms in every order that can happen; see `tests/room_chaos.py`."""

from __future__ import annotations

from collections import Counter

import pytest

from cache.lazy import LazyDevice
from tests.poolsets import NAMES, pool_sets
from tests.room_chaos import play
from tests.rooms import PLANES, ends

SETS = pool_sets()
HAPPENS = {"opened", "given up", "Arrived", "Broken"}


def run(name: str, plane: str, seed: int, steps: int) -> Counter[str]:
    device = LazyDevice(seed)
    with ends(SETS[name], plane, seed=seed, count=20, slots=5, device=device) as both:
        return play(both, device, seed, steps)


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_who_arrives_has_what_was_sealed_and_everything_comes_back(name: str, plane: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += run(name, plane, seed, 600)
        # Where the machine is busy the sockets' threads don't keep up, and less happens in as many steps.
        if seed and seen.keys() >= HAPPENS:
            return
    raise AssertionError(f"not all of {HAPPENS} happened: {seen}")


@pytest.mark.soak
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_in_a_long_time(name: str, plane: str) -> None:
    for seed in range(100, 150):
        run(name, plane, seed, 600)
