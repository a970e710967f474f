"""Figures of very many numbers in little memory: a histogram of seconds in bins of one per cent."""

from __future__ import annotations

from math import log

import numpy as np

MIN_S, MAX_S = 1e-6, 1e5
"""What is shorter or longer counts as so long."""
_STEP = log(1.01)
_BINS = int(log(MAX_S / MIN_S) / _STEP) + 2
MIDDLES_S = MIN_S * np.exp((np.arange(_BINS) + 0.5) * _STEP)
"""The seconds that what a bin has counts as: (bins,)."""


class GapHistogram:
    """Counts of seconds; a quantile is right to half a per cent."""

    def __init__(self) -> None:
        self.counts = [0.0] * _BINS
        """By the bins of `MIDDLES_S`."""
        self.total = 0.0
        self.sum_s = 0.0

    def add(self, seconds: float, count: float = 1.0) -> None:
        at = int(log(seconds / MIN_S) / _STEP) if seconds > MIN_S else 0
        self.counts[at if at < _BINS else _BINS - 1] += count
        self.total += count
        self.sum_s += seconds * count

    def quantile(self, share: float) -> float:
        """The seconds that `share` of all that were counted are no longer than; 0 where nothing was counted."""
        if not self.total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.total))
        return float(MIDDLES_S[min(at, _BINS - 1)])

    def share_within(self, seconds: float) -> float:
        """The share of all that took no longer than `seconds`; 1 where nothing was counted."""
        if not self.total:
            return 1.0
        at = int(log(max(seconds, MIN_S) / MIN_S) / _STEP)
        return sum(self.counts[: at + 1]) / self.total
