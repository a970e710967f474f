"""Histograms of seconds that can be added up: quarter octaves, from which any percentile can be read within 19 %.

`/metrics` has few buckets, as monitoring systems want them; these are for showing percentiles of the latest seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

FIRST_S = 0.00025
OCTAVES = 19
STEPS = 4
"""Buckets in which seconds double."""
BOUNDS_S = tuple(FIRST_S * 2 ** (i / STEPS) for i in range(OCTAVES * STEPS + 1))
"""Upper bounds of the buckets, each included, from 0.25 ms to 131 s; one more bucket has what is longer."""
BUCKETS = len(BOUNDS_S) + 1


class LatencyShape:
    """Counts of seconds by bucket."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The sum of histograms, bucket by bucket."""
    out = [0] * BUCKETS
    for counts in histograms:
        for bucket, count in enumerate(counts):
            if count:
                out[bucket] += count
    return out


def grown(later: Sequence[int], earlier: Sequence[int]) -> list[int]:
    """What has come to a histogram between two moments; a bucket that has shrunk, as after a restart, counts as 0."""
    return [max(0, b - a) for a, b in zip(earlier, later, strict=True)]


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The seconds that `share` (0 to 1) of the values don't exceed, within their bucket by proportion; None without
    values. What is longer than the last bound counts as the last bound."""
    total = sum(counts)
    if not total:
        return None
    wanted, below = max(share * total, 1e-9), 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            if bucket >= len(BOUNDS_S):
                break
            high = BOUNDS_S[bucket]
            low = BOUNDS_S[bucket - 1] if bucket else 0.0
            return low + (high - low) * (wanted - below) / count
        below += count
    return BOUNDS_S[-1]
