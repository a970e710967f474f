"""The record of a worker's rows with non-finite logits, which decides whether its results can be trusted.

One such row may come from the prompt itself: a model in half precision can overflow. Several within
`cluster.nonfinite_window_s` seconds point to a device, a driver or weights gone bad, and whatever else that worker
computes is suspect: the worker is ended and started again.
"""

from __future__ import annotations

from collections import deque

from twinpool.contracts.clock import Clock


class NonfiniteRows:
    """One worker's record of rows with non-finite logits: `limit_rows` of them within `window_s` seconds make the
    worker unfit. See the module's prose."""

    def __init__(self, limit_rows: int, window_s: float, clock: Clock) -> None:
        self._limit, self._window_s, self._clock = limit_rows, window_s, clock
        self._at: deque[float] = deque(maxlen=limit_rows)
        self.rows = 0
        """Rows with non-finite logits since the worker's start."""
        self.unfit = ""
        """Why this worker must not go on, in words; empty while it may."""

    def nonfinite(self) -> None:
        """Record one more row; sets `unfit` when the limit is reached within the window."""
        now = self._clock.now()
        self.rows += 1
        self._at.append(now)
        if len(self._at) == self._limit and now - self._at[0] <= self._window_s:
            self.unfit = (
                f"the logits of {self._limit} rows were no finite numbers within {self._window_s:g} s "
                "(cluster.nonfinite_rows, cluster.nonfinite_window_s): its device or its weights are suspect"
            )
