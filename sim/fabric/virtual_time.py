"""Virtual time: a clock that stands still while code runs, and the queue of events that are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class TimerEntry:
    """An event that will run, unless it is cancelled."""

    run: Callable[[], None] | None

    def cancel(self) -> None:
        self.run = None


class VirtualTime:
    """Implements `contracts.clock.Clock`. Events that are due at the same time run in the order of their entry."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, TimerEntry]] = []
        self._entered = 0

    def now(self) -> float:
        return self._now

    def after(self, delay_s: float, run: Callable[[], None]) -> TimerEntry:
        """Call `run` in `delay_s` seconds; a negative delay counts as 0."""
        entry = TimerEntry(run)
        self._entered += 1
        heapq.heappush(self._heap, (self._now + max(0.0, delay_s), self._entered, entry))
        return entry

    def next(self) -> bool:
        """Advance to the next event and run it; False when there is none."""
        while self._heap:
            at, _, entry = heapq.heappop(self._heap)
            if entry.run is not None:
                self._now = at
                run, entry.run = entry.run, None
                run()
                return True
        return False
