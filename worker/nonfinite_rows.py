"""Whether a worker's results can be trusted: how many of its rows had logits that are no numbers lately.

One such row may be a prompt's own doing: a model in half precision can overflow. Several within a minute are a device,
a driver or weights gone bad, and whatever else that worker computes is suspect: it is ended and started again.
"""

from __future__ import annotations

from collections import deque

from contracts.clock import Clock


class NonfiniteRows:
    """One worker's record of rows with logits that are no numbers. See the module's prose."""

    def __init__(self, limit_rows: int, window_s: float, clock: Clock) -> None:
        self._limit, self._window_s, self._clock = limit_rows, window_s, clock
        self._at: deque[float] = deque(maxlen=limit_rows)
        self.rows = 0
        """Rows with such logits since the start."""
        self.unfit = ""
        """Why this worker must not go on; empty while it may."""

    def nonfinite(self) -> None:
        """One more row."""
        now = self._clock.now()
        self.rows += 1
        self._at.append(now)
        if len(self._at) == self._limit and now - self._at[0] <= self._window_s:
            self.unfit = (
                f"the logits of {self._limit} rows were no finite numbers within {self._window_s:g} s "
                "(cluster.nonfinite_rows, cluster.nonfinite_window_s): its device or its weights are suspect"
            )
