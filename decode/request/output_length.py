"""The estimate of output lengths, learned from answers that ended lately, for admission and for migration.

Nobody knows how long an answer will be: `max_tokens` is its limit, usually far above its length. To reserve that much
for every request leaves most of a pool empty; to reserve nothing admits more requests than can go on. So a request that
has drawn `n` tokens is expected to come to the given quantile of recent answers *of more than n tokens*, and never to
more than its `max_tokens`. As old answers are forgotten, the estimate follows the load.

An estimate that is too low costs retractions. So each of them raises the quantile, half of the way to the longest
answer seen, and each answer that ends lowers it a little, down to the given one. Before anything is known, an answer is
expected to come to a configured number of tokens, or to twice what it has: a request without `max_tokens` may have the
rest of the context, and to reserve that would admit a handful of the first requests and no more.

Whether a request is worth migrating depends on what is still to come of it, where too high an estimate is no better
than too low a one. For that, answers are taken to end without memory: whatever was generated, the mean of recent
answers is still to come.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

REMEMBERED = 256
"""Recent answers that the estimate is made of."""
KNOWN = 8
"""Answers that must have ended before the estimate goes by them; and of those, how many must be longer than a request
has got before it goes by their quantile."""
_CALM = 0.9
"""What is left of the raise of the quantile after each answer that ended."""


class OutputLengths:
    """The estimates of one worker; see the module's prose. All lengths are in tokens of the answer."""

    def __init__(self, quantile: float, first: int) -> None:
        """`quantile`: of recent lengths, 0 to 1. `first`: the expected length before anything is known."""
        self._base, self._first = quantile, first
        self._raised = 0.0
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def quantile(self) -> float:
        """The quantile in use: the given one, raised by recent retractions."""
        return self._base + (1 - self._base) * self._raised

    def ended(self, length: int) -> None:
        """Record the length of an answer that has ended."""
        if len(self._lengths) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]
        self._lengths.append(length)
        insort(self._sorted, length)
        self._raised *= _CALM

    def retracted(self) -> None:
        """Raise the quantile: requests had to be retracted, as the estimate was too low."""
        self._raised = (1 + self._raised) / 2

    def expected(self, generated: int, most: int) -> int:
        """Return the expected length of an answer of `generated` tokens so far, from `generated` to `most`."""
        if len(self._sorted) < KNOWN:
            return min(most, max(2 * generated, self._first))
        first = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first
        if longer < KNOWN:
            # Longer than nearly all answers that were seen: it may well be half done.
            return min(most, max(2 * generated, self._sorted[-1]))
        return min(most, self._sorted[first + min(longer - 1, int(self.quantile * longer))])

    def to_come(self, most: int) -> float:
        """Return how many more tokens an answer is expected to get, where it may get `most` more."""
        known = len(self._lengths)
        return min(most, sum(self._lengths) / known) if known >= KNOWN else most
