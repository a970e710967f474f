"""Schedules of everything that runs at once, on the lazy device. A failing seed says how to replay it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.cache_random_schedule import play

MET = (
    "forward behind a gate",
    "forward one step ahead",
    "left with a step launched",
    "left with a load under way",
    "sent",
    "found on host",
    "found in storage",
    "prefetched whole",
    "prefetched in part",
    "spilled before it went",
    "split of a locked node",
    "split under a load",
    "split under a save",
    "snapshot used",
    "tombstone healed",
    "retracted",
    "resumed",
    "retracted beside the tree's own pages",
    "resumed beside the tree's own pages",
    "swapped out on storage",
)


@pytest.mark.slow
def test_no_interleaving_of_loads_saves_prefetches_passes_and_sends_shows_a_wrong_byte() -> None:
    """Eighty seeds, and more until everything was met."""
    met: Counter[str] = Counter()
    for seed in range(200):
        met.update(play(seed))
        if seed >= 79 and all(met[event] for event in MET):
            break
    assert all(met[event] for event in MET), [event for event in MET if not met[event]]


def test_a_seed_is_one_schedule() -> None:
    assert play(7) == play(7)
    assert play(7) != play(8)
