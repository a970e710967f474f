"""The cost of prefill steps: how many tokens a step can have that is to take so many seconds, by the steps before it.

A step takes about `a + b n + c n p` seconds: `n` tokens at positions that are `p` on average. So what a step costs
however small it is (`a`: a launch, rows of decode) isn't taken for the price of tokens, and the far end of a long
prompt, where attention reads more, is known to cost more than its beginning. The three are fitted by least squares that
forget, drawn a little towards 0, which decides where steps that were all alike can't.
"""

from __future__ import annotations

import math

import numpy as np

REMEMBERED = 0.97
"""Weight of a step after the next one: about the last thirty count."""
MIN_STEPS = 4
"""Steps below which nothing is known."""
MAX_TIMES = 3.0
"""A step that took more than so many times what was expected counts as that: something else was in the way."""
_PRIOR = np.diag([0.3, 0.003, 0.003])
"""Squared pull towards 0 of `a`, `b` and `c`, by units of `unit` tokens."""


class StepCost:
    """The fit of one worker. `unit`: tokens of a usual step, a scale alone."""

    def __init__(self, unit: int) -> None:
        self._unit = float(unit)
        self._steps = 0
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._fit: tuple[float, float, float] | None = None

    def saw(self, tokens: int, positions: int, seconds: float) -> None:
        """Take in that a step of `tokens` tokens took so long; `positions`: the sum of the positions of all."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        sizes = np.array([1.0, tokens / self._unit, positions / self._unit**2])
        expected = self.seconds(tokens, positions)
        if expected is not None and self._steps >= 2 * MIN_STEPS:
            seconds = min(seconds, MAX_TIMES * expected)
        self._steps += 1
        self._squares = self._squares * REMEMBERED + np.outer(sizes, sizes)
        self._products = self._products * REMEMBERED + sizes * seconds
        self._fit = None

    def seconds(self, tokens: int, positions: int) -> float | None:
        """Return the seconds of a step, as `saw` takes it; None before anything is known."""
        if self._steps < MIN_STEPS:
            return None
        a, b, c = self._solved()
        return a + b * tokens + c * positions

    def tokens_within(self, seconds: float, start: int) -> float | None:
        """Return how many tokens of a prompt from position `start` on add about so many seconds to a step; None before
        anything is known."""
        if self._steps < MIN_STEPS:
            return None
        _, b, c = self._solved()
        first = b + c * start
        # first * n + c * n * n / 2 = seconds
        under = first + math.sqrt(first * first + 2 * c * seconds)
        return 2 * seconds / under if under > 0 else math.inf

    def _solved(self) -> tuple[float, float, float]:
        """The seconds of a step, of a token, and of a token's position. None is negative: what would be is left out."""
        if self._fit is None:
            kept = [0, 1, 2]
            found = np.zeros(3)
            while kept:
                squares = (self._squares + _PRIOR)[np.ix_(kept, kept)]
                solved = np.linalg.solve(squares, self._products[kept])
                if (solved >= 0).all():
                    found[kept] = solved
                    break
                del kept[int(solved.argmin())]
            self._fit = float(found[0]), float(found[1]) / self._unit, float(found[2]) / self._unit**2
        return self._fit
