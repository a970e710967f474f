"""A counter that workers tell now and then, summed over those that are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from twinpool.contracts.ids import Incarnation, WorkerName

WorkerKey = tuple[WorkerName, Incarnation]


class _Point(NamedTuple):
    at: float
    told: int
    value: float


class ToldCounter:
    """The points of the last `window_s` seconds of each worker, each from when it was told."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: dict[WorkerKey, deque[_Point]] = {}

    def take(self, now: float, rows: Iterable[tuple[WorkerKey, int, float]]) -> float:
        """Take in each worker's number of telling (which changes when it tells) and its count; workers that aren't
        among them are forgotten. Returns how much all counts have grown since the last time."""
        grown, before, self._points = 0.0, self._points, {}
        for key, told, value in rows:
            points = self._points[key] = before.get(key) or deque([_Point(now, told, value)])
            if points[-1].told != told:
                grown += max(0.0, value - points[-1].value)
                points.append(_Point(now, told, value))
            while len(points) > 2 and points[1].at <= now - self._window_s:
                points.popleft()
        return grown

    @property
    def rate(self) -> float:
        """The growth a second of all counts, each between the first and the last time that its worker told."""
        return sum(
            max(0.0, points[-1].value - points[0].value) / (points[-1].at - points[0].at)
            for points in self._points.values()
            if points[-1].at > points[0].at
        )
