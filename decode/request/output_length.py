"""How long answers get: an estimate that admission reserves by, learned from those that ended lately.

Nobody knows how long an answer will be; `max_tokens` is what it may be at most, and usually far more than it is. To
reserve that much for everyone leaves most of a pool empty; to reserve nothing admits more than can go on. So a request
that has drawn `n` tokens is expected to come to what the given share (the quantile) of recent answers *of more than n
tokens* stayed within, and never to more than its `max_tokens`. As answers are forgotten after a while, the estimate
follows the load.

Being too low costs retractions, so each of them raises the quantile, half of the way to the longest answer seen, and
each answer that ends lets it come back a little. Before anything is known, an answer is expected to come to a number
that was configured, or to twice what it has: who names no `max_tokens` may have the rest of the context, and to
reserve that would let in a handful of the first requests and no more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

REMEMBERED = 256
"""Answers that the estimate is made of."""
KNOWN = 8
"""Answers that must have ended before they say anything, and of those as long as a request, before they speak of it."""
_CALM = 0.9
"""What is left of the raise of the quantile after each answer that ended."""


class OutputLengths:
    """See the module's prose. All lengths are in tokens of the answer."""

    def __init__(self, quantile: float, first: int) -> None:
        """`first`: what an answer is expected to come to before anything is known."""
        self._base, self._first = quantile, first
        self._raised = 0.0
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def quantile(self) -> float:
        return self._base + (1 - self._base) * self._raised

    def ended(self, length: int) -> None:
        """An answer is whole."""
        if len(self._lengths) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]
        self._lengths.append(length)
        insort(self._sorted, length)
        self._raised *= _CALM

    def retracted(self) -> None:
        """Somebody had to go: the estimate was too low."""
        self._raised = (1 + self._raised) / 2

    def expected(self, generated: int, most: int) -> int:
        """What an answer of `generated` tokens so far will come to, from `generated` to `most`."""
        if len(self._sorted) < KNOWN:
            return min(most, max(2 * generated, self._first))
        first = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first
        if longer < KNOWN:
            # Longer than nearly all that were seen: it may well be half done.
            return min(most, max(2 * generated, self._sorted[-1]))
        return min(most, self._sorted[first + min(longer - 1, int(self.quantile * longer))])
