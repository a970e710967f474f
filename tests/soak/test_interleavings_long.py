"""Ten thousand schedules of everything that runs at once."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.cache_random_schedule import play

SEEDS = 10_000
_BATCHES = 10


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", range(_BATCHES))
def test_ten_thousand_interleavings_show_no_wrong_byte_and_no_unordered_access(batch: int) -> None:
    met: Counter[str] = Counter()
    seeds = range(batch * SEEDS // _BATCHES, (batch + 1) * SEEDS // _BATCHES)
    for seed in seeds:
        met.update(play(seed))
    print(f"\nseeds {seeds.start} to {seeds.stop - 1}: {dict(sorted(met.items()))}")
