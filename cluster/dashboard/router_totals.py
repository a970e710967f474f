"""What all routers have counted together, whatever became of them, and what has come to it lately."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.contracts.messages.latency_shape import BUCKETS, added, grown
from twinpool.contracts.messages.router_report import COUNTERS, RouterReport

MAX_ROUTERS = 256
"""Starts of routers that are told apart; beyond it the one that was silent for longest stays in the sums alone."""
SILENT_S = 15.0
"""Seconds without a report after which a router isn't there any more."""


class Latencies(NamedTuple):
    """Counts of seconds by bucket (`contracts.messages.latency_shape`)."""

    first_tokens: list[int]
    output_tokens: list[int]
    gaps: list[int]


NOTHING = Latencies([0] * BUCKETS, [0] * BUCKETS, [0] * BUCKETS)


class _Heard(NamedTuple):
    at: float
    grown: Counter[str]
    """What has come to a router's counters since its first report here."""
    cpu_s: float = 0.0


@dataclass(slots=True)
class _Known:
    report: RouterReport
    heard: deque[_Heard]
    """Its reports within the window of rates, and the one before."""

    @property
    def at(self) -> float:
        """When it reported last."""
        return self.heard[-1].at

    def rate(self, counter: str) -> float:
        """A counter's growth a second from the first to the last of `heard`."""
        first, last = self.heard[0], self.heard[-1]
        return (last.grown[counter] - first.grown[counter]) / (last.at - first.at) if last.at > first.at else 0.0


class _Point(NamedTuple):
    at: float
    latencies: Latencies


class RouterTotals:
    """The sums of all routers' reports; on the controller's loop.

    A rate is the growth between two reports of a router by the time between them: however often routers report and
    sums are looked at, what came in five seconds isn't that of half a one. Rates are of what has come since a router's
    first report *here*: a controller that is started again hears of thousands of requests at once, and none of them has
    just come.
    """

    def __init__(self, rate_window_s: float, latency_window_s: float) -> None:
        """`rate_window_s`: what rates are of, or the time between two reports where that is longer."""
        self._rate_window_s, self._latency_window_s = rate_window_s, latency_window_s
        self._known: dict[str, _Known] = {}
        self._gone: Counter[str] = Counter()
        """What routers have counted that aren't told apart any more."""
        self._forgotten: dict[str, Counter[str]] = {}
        """Of the last of those, by router: one that reports again counts from where it was."""
        self._sums = NOTHING
        self._points: deque[_Point] = deque()
        self._last: _Point | None = None

    def report(self, report: RouterReport, now: float) -> bool:
        """Take in a report; its counts are since its router's start. Returns whether this router is new here."""
        known = self._known.get(report.router)
        if known is None:
            self._known[report.router] = _Known(report, deque([_Heard(now, Counter(), report.cpu_s)]))
            if len(self._known) > MAX_ROUTERS:
                self._forget(min(self._known, key=lambda router: self._known[router].at))
            self._gone.subtract(self._forgotten.pop(report.router, {}))
            return True
        before, known.report = known.report, report
        came = Counter({name: max(0, n - before.counters.get(name, 0)) for name, n in report.counters.items()})
        heard = known.heard
        heard.append(_Heard(now, heard[-1].grown + came, report.cpu_s))
        while len(heard) > 2 and heard[1].at <= now - self._rate_window_s:
            heard.popleft()
        pairs = zip(_latencies(report), _latencies(before), strict=True)
        grew = (grown(told, told_before) if told and told_before else () for told, told_before in pairs)
        self._sums = Latencies(*(added((had, came)) for had, came in zip(self._sums, grew, strict=True)))
        return False

    def _forget(self, router: str) -> None:
        counters = Counter(self._known.pop(router).report.counters)
        self._gone.update(counters)
        self._forgotten[router] = counters
        if len(self._forgotten) > MAX_ROUTERS:
            del self._forgotten[next(iter(self._forgotten))]

    def here(self, now: float) -> list[RouterReport]:
        """The last report of each router that is there."""
        return [known.report for known in self._there(now)]

    def _there(self, now: float) -> list[_Known]:
        return [known for known in self._known.values() if known.at > now - SILENT_S]

    def totals(self) -> dict[str, int]:
        """All counters, summed over all starts of routers."""
        total = Counter(dict.fromkeys(COUNTERS, 0))
        total.update(self._gone)
        for known in self._known.values():
            total.update(known.report.counters)
        return dict(total)

    def rate(self, counter: str, now: float) -> float:
        """A counter's growth a second, of all routers that are there."""
        return sum(known.rate(counter) for known in self._there(now))

    def rate_of(self, router: str, counter: str) -> float:
        """A router's counter's growth a second."""
        return self._known[router].rate(counter)

    def cores_of(self, router: str) -> float | None:
        """How many processors a router keeps busy; None where it has reported once, or its build doesn't say."""
        first, last = self._known[router].heard[0], self._known[router].heard[-1]
        if last.cpu_s <= 0 or last.at <= first.at:
            return None
        return max(0.0, last.cpu_s - first.cpu_s) / (last.at - first.at)

    # ------------------------------------------------------------ latencies

    def take(self, now: float) -> None:
        """Note the sums of this moment, from which `latencies` are."""
        self._points.append(_Point(now, self._sums))
        while len(self._points) > 2 and self._points[1].at <= now - self._latency_window_s:
            self._points.popleft()

    def latencies(self) -> Latencies:
        """What has come within the window."""
        return _between(self._points[0], self._points[-1]) if self._points else NOTHING

    def latencies_since_last(self) -> Latencies:
        """What has come between the moment that was noted last and that of the last call, for the history."""
        before, self._last = self._last, self._points[-1]
        return _between(before, self._last) if before is not None else NOTHING


def _latencies(report: RouterReport) -> tuple[tuple[int, ...], ...]:
    """A report's histograms, in the order of `Latencies`; empty those of which its build doesn't know."""
    return report.first_tokens, report.output_tokens, report.gaps


def _between(first: _Point, last: _Point) -> Latencies:
    return Latencies(*(grown(b, a) for a, b in zip(first.latencies, last.latencies, strict=True)))
