"""Clocks. Code that decides by time is given a `Clock`, so that no test sleeps."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock; on one host it reads the same in every process."""

    now = staticmethod(time.monotonic)
    """Returns seconds. The function itself, as it is called several times for each token."""


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds
