"""What the rules are given: each worker's load, who of a pool is where in its life, and rates of the latest time."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_report import LatencyCounts


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that serves, as its last heartbeat told."""

    name: WorkerName
    incarnation: Incarnation
    role: Role
    told: int
    """A number that changes whenever it tells its counters: these come more seldom than the rest."""
    running: int
    pages_total: int
    pages_free: int
    prompt_tokens: int
    """Of its prompts that are still to be computed."""
    computed: float = 0.0
    """Counter: prompt tokens computed."""
    generated: float = 0.0
    """Counter: tokens of answers generated."""
    compute_rate: float = 0.0
    """Prompt tokens a second that it computes when it does; 0 while it hasn't said."""
    retractions: float = 0.0
    """Counter: requests put off for want of pages."""
    retracted: float = 0.0
    """Requests that are put off now."""
    ungranted: int = 0
    """Requests that wait for pages now."""
    granted: int = 0
    """Requests that have pages and don't run yet."""

    @property
    def key(self) -> tuple[WorkerName, Incarnation]:
        return self.name, self.incarnation


@dataclass(frozen=True, slots=True)
class PoolState:
    """How many workers of a pool are where in their life."""

    role: Role
    ready: int = 0
    starting: int = 0
    """Starting, and placed on a node or not yet known to wait for one."""
    unplaced: int = 0
    """Starting, and waiting for a node with a place."""
    dead: int = 0
    """Died, and to be started again."""
    leaving: int = 0
    """Draining, to leave or to change their role."""

    @property
    def wanted(self) -> int:
        """Workers that it has or is to have."""
        return self.ready + self.starting + self.unplaced + self.dead

    @property
    def in_flux(self) -> bool:
        """Whether someone comes or goes. A start that waits for a node may do so for long, and doesn't count."""
        return bool(self.starting or self.dead or self.leaving)


WorkerKey = tuple[WorkerName, Incarnation]


class _LoadAt(NamedTuple):
    at: float
    told: int
    value: float


class ToldCounter:
    """A counter that workers tell now and then, summed over those that are there: the points of the last `window_s`
    seconds of each worker, each from when it was told."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: dict[WorkerKey, deque[_LoadAt]] = {}

    def take(self, now: float, rows: Iterable[tuple[WorkerKey, int, float]]) -> float:
        """Take in each worker's number of telling (which changes when it tells) and its count; workers that aren't
        among them are forgotten. Returns how much all counts have grown since the last time."""
        grown, before, self._points = 0.0, self._points, {}
        for key, told, value in rows:
            points = self._points[key] = before.get(key) or deque([_LoadAt(now, told, value)])
            if points[-1].told != told:
                grown += max(0.0, value - points[-1].value)
                points.append(_LoadAt(now, told, value))
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


MAX_ROUTERS = 256
"""Starts of routers whose counts are kept; beyond it those that were silent for longest are forgotten."""
MIN_OUTCOMES = 20
"""Fewer outcomes say nothing."""
SIGMAS = 2.0
"""Standard deviations beyond what chance brings, from which a target counts as missed."""
MIX_S = 600.0
"""Seconds in which what is known of prompts' lengths fades to a third."""


class Outcomes(NamedTuple):
    """First tokens, or later deliveries, of the window."""

    judged: int = 0
    late: int = 0

    def missed(self, attainment: float) -> bool:
        """Whether more were late than chance makes of a share that is just met."""
        most = self.judged * (1 - attainment) + SIGMAS * math.sqrt(self.judged * attainment * (1 - attainment))
        return self.judged >= MIN_OUTCOMES and self.late > most

    @property
    def late_share(self) -> float:
        return self.late / self.judged if self.judged else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The load of both pools over the window; rates are of a second."""

    prefill: int
    """Prefill workers that serve."""
    decode: int
    offered: float
    """Prompt tokens a second that had to be computed: what was, and what the queue has grown by."""
    computed: float
    """Prompt tokens a second that were computed."""
    rate: float
    """Prompt tokens a second that one prefill worker computes when it does; 0 while none has said."""
    requests: float
    """Requests a second; 0 where no router tells them."""
    backlog: int
    """Prompt tokens that are still to be computed, now."""
    pages: int
    """Pages of all decode workers."""
    used_pages: int
    """Those of them that requests hold, now."""
    running: int
    """Requests that run on decode, now."""
    granted: int
    """Requests that have pages on decode and don't run yet: their prompts are computed, or on their way."""
    generated: float
    """Tokens a second that decode generates."""
    lacking: float
    """Requests that wait for pages of decode workers, now, without as many as wait for prefill to compute."""
    ungranted: int
    """Requests that wait for pages of decode workers, now."""
    lacked: bool
    """Whether there were such requests within the window."""
    put_off: int
    """Requests that decode put off for want of pages within the window, or has put off now."""
    first: Outcomes
    """First tokens."""
    gaps: Outcomes
    """Later deliveries."""

    @property
    def busy(self) -> float:
        """The share of their time that prefill workers computed; 0 while no rate is known."""
        return self.computed / (self.prefill * self.rate) if self.prefill and self.rate else 0.0

    @property
    def queue_s(self) -> float:
        """Seconds in which prefill could compute all that waits."""
        return self.backlog / (self.prefill * self.rate) if self.prefill and self.rate else 0.0


class LatencyTotals:
    """What all routers have counted together, whichever of them come and go."""

    def __init__(self) -> None:
        self._last: dict[str, LatencyCounts] = {}
        self.total = LatencyCounts()

    def report(self, router: str, counts: LatencyCounts) -> None:
        """Add what a router has counted since its last report. The first one only says where it begins: what it has
        counted by then is of an earlier time, or of an earlier controller's."""
        before = self._last.pop(router, None)
        self._last[router] = counts
        while len(self._last) > MAX_ROUTERS:
            self._last.pop(next(iter(self._last)))
        if before is not None:
            grown = {
                f.name: max(0, getattr(counts, f.name) - getattr(before, f.name)) for f in structs.fields(LatencyCounts)
            }
            self.total = LatencyCounts(**{name: getattr(self.total, name) + more for name, more in grown.items()})


class _Sample(NamedTuple):
    at: float
    backlog: int
    retractions: float
    lacking: bool
    totals: LatencyCounts


class PromptMix:
    """The mean length of prompts, of late more than of long ago."""

    def __init__(self) -> None:
        self._tokens = self._requests = 0.0

    def take(self, seconds: float, tokens: float, requests: int) -> None:
        """Take in what came within so many seconds."""
        fades = math.exp(-seconds / MIX_S)
        self._tokens = max(0.0, self._tokens * fades + tokens)
        self._requests = self._requests * fades + requests

    def number(self, tokens: int) -> float:
        """How many prompts so many tokens are; infinite while that isn't known and there are some."""
        if not tokens:
            return 0.0
        return tokens * self._requests / self._tokens if self._tokens and self._requests else math.inf


class LoadWindow:
    """The samples of the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()
        self._computed, self._generated = ToldCounter(window_s), ToldCounter(window_s)
        self._retractions = ToldCounter(window_s)
        self._prompts = PromptMix()
        self._retracted = 0.0
        """Requests put off since the first sample."""

    def take(self, now: float, workers: Iterable[WorkerLoad], totals: LatencyCounts) -> MeasuredLoad:
        """Take a sample; returns the load over the window that ends with it."""
        rows = list(workers)
        prefill = [row for row in rows if row.role is Role.PREFILL]
        decode = [row for row in rows if row.role is Role.DECODE]
        backlog = sum(row.prompt_tokens for row in prefill)
        done = self._computed.take(now, [(row.key, row.told, row.computed) for row in prefill])
        self._generated.take(now, [(row.key, row.told, row.generated) for row in decode])
        self._retracted += self._retractions.take(now, [(row.key, row.told, row.retractions) for row in decode])
        if self._samples:
            before = self._samples[-1]
            came = totals.requests - before.totals.requests
            self._prompts.take(now - before.at, done + backlog - before.backlog, came)
        self._samples.append(_Sample(now, backlog, self._retracted, False, totals))
        while len(self._samples) > 2 and self._samples[1].at <= now - self._window_s:
            self._samples.popleft()
        first = self._samples[0]
        seconds = now - first.at
        computed = self._computed.rate
        growth = (backlog - first.backlog) / seconds if seconds else 0.0
        told = [row.compute_rate for row in prefill if row.compute_rate > 0]
        then = first.totals
        offered = max(0.0, computed + growth)
        requests = (totals.requests - then.requests) / seconds if seconds else 0.0
        pages = sum(row.pages_total for row in decode)
        used_pages = pages - sum(row.pages_free for row in decode)
        ungranted = sum(row.ungranted for row in decode)
        lacking = max(0.0, ungranted - self._prompts.number(backlog))
        self._samples[-1] = self._samples[-1]._replace(lacking=lacking >= 1)
        return MeasuredLoad(
            prefill=len(prefill),
            decode=len(decode),
            offered=offered,
            computed=computed,
            rate=statistics.median(told) if told else 0.0,
            requests=requests,
            backlog=backlog,
            pages=pages,
            used_pages=used_pages,
            running=sum(row.running for row in decode),
            granted=sum(row.granted for row in decode),
            generated=self._generated.rate,
            lacking=lacking,
            ungranted=ungranted,
            lacked=any(sample.lacking for sample in self._samples),
            put_off=round(self._retracted - first.retractions + sum(row.retracted for row in decode)),
            first=Outcomes(totals.first_tokens - then.first_tokens, totals.first_late - then.first_late),
            gaps=Outcomes(totals.gaps - then.gaps, totals.gaps_late - then.gaps_late),
        )
