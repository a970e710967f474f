"""What it costs to hand a request on, and what to let it finish: measured, as the worker goes.

A move costs its bytes at the rate of the moves so far, and what every move costs besides. To finish costs the tokens
that are still to come, at the request's own pace. How many those are nobody knows before `max_tokens`; the guess is
that answers end without memory: whatever was generated, the mean length of those that ended is still to come.
"""

from __future__ import annotations

FIRST_BYTES_PER_S = 500e6
"""Before anything was moved: slow for memory, quick for a network."""
OVERHEAD_S = 0.02
"""What a move takes besides its bytes: five messages, a step to end, one to begin."""
KNOWN_ANSWERS = 8
"""Fewer ended answers than this say nothing of the next."""
_NEW = 0.2
"""Weight of the newest measurement."""


class MigrationCosts:
    """One worker's measurements."""

    def __init__(self) -> None:
        self.bytes_per_s = FIRST_BYTES_PER_S
        self._ended = 0
        self._mean_length = 0.0

    def moved(self, nbytes: int, seconds: float) -> None:
        """A move of so many bytes took so long."""
        rate = nbytes / max(seconds - OVERHEAD_S, 1e-3)
        self.bytes_per_s += _NEW * (rate - self.bytes_per_s)

    def ended(self, generated: int) -> None:
        """An answer ended after so many tokens."""
        self._ended += 1
        weight = max(_NEW / 4, 1 / self._ended)
        self._mean_length += weight * (generated - self._mean_length)

    def to_come(self, most: int) -> float:
        """Tokens that a request is expected to generate yet, where it may generate `most`."""
        return min(most, self._mean_length) if self._ended >= KNOWN_ANSWERS else most

    def worth_moving(self, nbytes: int, most: int, step_s: float) -> bool:
        """Whether handing `nbytes` on takes less time than `most` tokens at most, one every `step_s`."""
        return OVERHEAD_S + nbytes / self.bytes_per_s < self.to_come(most) * step_s
