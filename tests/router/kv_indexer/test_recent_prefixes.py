"""What was sent lately, against a plain list of who was sent what and when."""

from __future__ import annotations

import random

import numpy as np
import pytest

from twinpool.router.kv_indexer.prefix_indexes import RECENT_S, RecentPrefixes

SLOTS = 24
TOKENS = 64


def prompt(rng: random.Random) -> list[int]:
    """One of few conversations, up to one of its turns: many begin alike."""
    chat = rng.randrange(6)
    length = rng.randrange(1, 9)
    return [1000 + block if block < 3 else 2000 + 50 * chat + block for block in range(length)]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_what_was_sent_in_the_last_seconds(seed: int) -> None:
    rng, now = random.Random(seed), 50.0
    recent, sent = RecentPrefixes(SLOTS), list[tuple[float, int, list[int]]]()
    for _ in range(400):
        now += rng.random()
        keys, slot = prompt(rng), rng.randrange(SLOTS)
        if rng.random() < 0.5:
            recent.sent(slot, np.array(keys, np.uint64), now)
            sent.append((now, slot, keys))
        if rng.random() < 0.02:
            gone = rng.sample(range(SLOTS), 2)
            recent.forget(gone)
            sent = [one for one in sent if one[1] not in gone]
        blocks = np.array(keys, np.uint64)
        found = recent.find(blocks, np.arange(1, len(keys) + 1, dtype=np.int32) * TOKENS, now).tolist()
        for other in range(SLOTS):
            mine = [(now - at, _alike(keys, one)) for at, to, one in sent if to == other]
            least = max((alike for ago, alike in mine if ago < RECENT_S), default=0)
            # A half is emptied with the first question after its time: they come a second apart at most.
            most = max((alike for ago, alike in mine if ago <= 2 * RECENT_S + 2), default=0)
            assert least <= found[other] <= most


def _alike(one: list[int], other: list[int]) -> int:
    """Positions that two prompts begin alike with."""
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    return alike * TOKENS


@pytest.mark.parametrize("pause", [2 * RECENT_S, 300.0])
def test_nothing_counts_as_there_after_a_pause_of_twice_the_time(pause: float) -> None:
    recent, keys, ends = RecentPrefixes(SLOTS), np.arange(4, dtype=np.uint64), np.arange(1, 5, dtype=np.int32)
    recent.sent(1, keys, 100.0)
    recent.sent(2, keys, 100.0 + RECENT_S)
    assert np.flatnonzero(recent.find(keys, ends, 100.0 + RECENT_S)).tolist() == [1, 2]
    assert not recent.find(keys, ends, 100.0 + RECENT_S + pause).any()
    assert len(recent) == 0


def test_there_is_a_bound_and_the_latest_is_kept() -> None:
    recent = RecentPrefixes(SLOTS, blocks=64)
    for number in range(500):
        keys = np.arange(8, dtype=np.uint64) + np.uint64(100 * number)
        recent.sent(number % SLOTS, keys, 1.0)
        assert len(recent) <= 128
        assert recent.find(keys, np.arange(1, 9, dtype=np.int32), 1.0)[number % SLOTS] == 8
    long = np.arange(1000, dtype=np.uint64)
    recent.sent(3, long, 1.0)
    assert len(recent) <= 128
    assert recent.find(long, np.arange(1, 1001, dtype=np.int32), 1.0)[3] == 1000, "who has a block has all before it"


def test_slots_that_are_forgotten_hold_nothing_and_others_what_they_had() -> None:
    recent, keys, ends = RecentPrefixes(SLOTS), np.arange(4, dtype=np.uint64), np.arange(1, 5, dtype=np.int32)
    for slot in (0, 5, 23):
        recent.sent(slot, keys[: slot % 3 + 2], 0.0)
    recent.forget([0])
    found = recent.find(keys, ends, 0.0)
    assert {slot: int(found[slot]) for slot in np.flatnonzero(found)} == {5: 4, 23: 4}
    recent.forget([5, 23])
    assert len(recent) == 0
