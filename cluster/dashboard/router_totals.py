"""What all routers have counted together, whatever became of them, and what has come to it lately."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from contracts.messages.latency_shape import BUCKETS, added, grown
from contracts.messages.router_report import COUNTERS, RouterReport

MOST_ROUTERS = 256
"""Starts of routers that are told apart; beyond it the one that was silent for longest stays in the sums alone."""
SILENT_S = 15.0
"""Seconds without a report after which a router isn't there any more."""


class Lately(NamedTuple):
    """What has come between two moments."""

    seconds: float
    counts: Counter[str]
    first_tokens: list[int]
    gaps: list[int]

    def rate(self, counter: str) -> float:
        """A counter's growth a second."""
        return self.counts[counter] / self.seconds if self.seconds > 0 else 0.0


NOTHING = Lately(0.0, Counter(), [0] * BUCKETS, [0] * BUCKETS)


@dataclass(slots=True)
class _Known:
    report: RouterReport
    at: float
    grown: Counter[str] = field(default_factory=Counter)
    """What has come to its counters since its first report here."""


class _Point(NamedTuple):
    at: float
    counts: Counter[str]
    first_tokens: list[int]
    gaps: list[int]
    by_router: dict[str, Counter[str]]


class RouterTotals:
    """The sums of all routers' reports; on the controller's loop.

    Rates are of what has come since a router's first report *here*: a controller that is started again hears of
    thousands of requests at once, and none of them has just come.
    """

    def __init__(self, window_s: float) -> None:
        """`window_s`: the longest time of which rates are asked for."""
        self._window_s = window_s
        self._known: dict[str, _Known] = {}
        self._gone: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._first, self._gaps = [0] * BUCKETS, [0] * BUCKETS
        self._points: deque[_Point] = deque()
        self._last: _Point | None = None

    def report(self, report: RouterReport, now: float) -> bool:
        """Take in a report; its counts are since its router's start. Returns whether this router is new here."""
        known = self._known.get(report.router)
        if known is None:
            self._known[report.router] = _Known(report, now)
            if len(self._known) > MOST_ROUTERS:
                silent = min(self._known, key=lambda router: self._known[router].at)
                self._gone.update(self._known.pop(silent).report.counters)
            return True
        before, known.report, known.at = known.report, report, now
        came = Counter({name: max(0, n - before.counters.get(name, 0)) for name, n in report.counters.items()})
        known.grown.update(came)
        self._counts.update(came)
        if report.first_tokens and before.first_tokens:
            self._first = added((self._first, grown(report.first_tokens, before.first_tokens)))
        if report.gaps and before.gaps:
            self._gaps = added((self._gaps, grown(report.gaps, before.gaps)))
        return False

    def here(self, now: float) -> list[RouterReport]:
        """The last report of each router that is there."""
        return [known.report for known in self._known.values() if known.at > now - SILENT_S]

    def totals(self) -> dict[str, int]:
        """All counters, summed over all starts of routers."""
        total = Counter(dict.fromkeys(COUNTERS, 0))
        total.update(self._gone)
        for known in self._known.values():
            total.update(known.report.counters)
        return dict(total)

    def take(self, now: float) -> None:
        """Note the sums of this moment, from which rates are."""
        routers = {name: known.grown.copy() for name, known in self._known.items()}
        self._points.append(_Point(now, self._counts.copy(), self._first, self._gaps, routers))
        while len(self._points) > 2 and self._points[1].at <= now - self._window_s:
            self._points.popleft()

    def lately(self, seconds: float) -> Lately:
        """What has come in the latest `seconds`, which are at most the window."""
        first = self._first_of(seconds)
        return _between(first, self._points[-1]) if first is not None else NOTHING

    def _first_of(self, seconds: float) -> _Point | None:
        """The point from which rates of the latest `seconds` are; None while there are no two points."""
        if len(self._points) < 2:
            return None
        since = self._points[-1].at - seconds
        return next((one for one in self._points if one.at >= since and one is not self._points[-1]), self._points[-2])

    def since_last(self) -> Lately:
        """What has come between the moment that was noted last and that of the last call, for the history."""
        before, self._last = self._last, self._points[-1]
        return _between(before, self._last) if before is not None and before.at < self._last.at else NOTHING

    def rate_of(self, router: str, counter: str, seconds: float) -> float:
        """A router's counter's growth a second in the latest `seconds`."""
        first, last = self._first_of(seconds), self._points[-1]
        if first is None:
            return 0.0
        before = first.by_router.get(router, Counter())
        return (last.by_router.get(router, before)[counter] - before[counter]) / (last.at - first.at)


def _between(first: _Point, last: _Point) -> Lately:
    counts = Counter({name: n - first.counts[name] for name, n in last.counts.items()})
    shapes = grown(last.first_tokens, first.first_tokens), grown(last.gaps, first.gaps)
    return Lately(last.at - first.at, counts, *shapes)
