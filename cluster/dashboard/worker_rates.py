"""Rates of workers' counters over the latest seconds, one worker's incarnation each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.worker_status import CPU_SECONDS, WorkerView

LINK_BYTES = "link_bytes:"
"""Prefix of the counters of bytes that a worker has sent to another."""
HITS = ("hit_tokens_device", "hit_tokens_host", "hit_tokens_storage")
"""Counters of prompt tokens that were found in a worker's cache."""
KEPT = ("tokens_generated", "prompt_tokens_computed", CPU_SECONDS, *HITS)
"""Counters of which rates are shown, besides those of links."""


class WorkerSample(NamedTuple):
    """A worker as the controller has it, and when its counters were said."""

    view: WorkerView
    said_at: float
    """In seconds of the controller's clock."""


class _Point(NamedTuple):
    at: float
    counts: dict[str, float]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What one worker sends to another."""

    sender: WorkerName
    receiver: WorkerName
    bytes_s: float
    total: float
    """Bytes since the sender's start."""


class WorkerRates:
    """Rates a second between what each worker said last and what it said `window_s` before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: dict[tuple[WorkerName, Incarnation], deque[_Point]] = {}
        self._quiet_s = 2 * window_s

    def take(self, samples: Iterable[WorkerSample], now: float) -> None:
        """Take in all workers; those that aren't among them are forgotten."""
        before, self._points = self._points, {}
        for view, said_at in samples:
            counters = view.status.counters
            if not counters:
                continue
            key = (view.record.name, view.record.incarnation)
            points = self._points[key] = before.get(key) or deque()
            if not points or said_at > points[-1].at:
                points.append(_Point(said_at, _kept(counters)))
            while len(points) > 2 and points[1].at <= now - self._window_s:
                points.popleft()
            if len(points) > 1 and points[-1].at < now - self._quiet_s:
                last = points[-1]  # It has said nothing for long: nothing is known of now.
                points.clear()
                points.append(last)

    def of(self, name: WorkerName, incarnation: Incarnation) -> dict[str, float]:
        """Rates a second by the names in `KEPT`; empty while there are no two points."""
        points = self._points.get((name, incarnation))
        if points is None or len(points) < 2:
            return {}
        first, last = points[0], points[-1]
        seconds = last.at - first.at
        return {
            key: max(0.0, last.counts[key] - first.counts.get(key, 0.0)) / seconds for key in KEPT if key in last.counts
        }

    def links(self) -> list[LinkRate]:
        """All links by which something was ever sent, the busiest first."""
        found = []
        for (name, _), points in self._points.items():
            first, last = points[0], points[-1]
            seconds = last.at - first.at
            for key, total in last.counts.items():
                if key.startswith(LINK_BYTES) and total > 0:
                    grown = max(0.0, total - first.counts.get(key, 0.0))
                    receiver = WorkerName(key.removeprefix(LINK_BYTES))
                    found.append(LinkRate(name, receiver, grown / seconds if seconds > 0 else 0.0, total))
        found.sort(key=lambda link: (-link.bytes_s, -link.total, link.sender, link.receiver))
        return found


def _kept(counters: Mapping[str, float]) -> dict[str, float]:
    kept = {key: value for key, value in counters.items() if key.startswith(LINK_BYTES)}
    for key in KEPT:
        if key in counters:
            kept[key] = counters[key]
    return kept
