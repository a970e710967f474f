"""Rows of the dashboard's frames: workers with the rates of their counters, pools and links, latest requests, and what
all routers have counted together, whatever became of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.request_record import RequestRecord
from twinpool.contracts.messages.router_report import BUCKETS, COUNTERS, AutoscalerView, RouterReport, added, grown
from twinpool.contracts.messages.worker_status import CPU_SECONDS, GPU_UTILIZATION, WorkerView

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


MAX_LINKS = 256
"""Links that a frame names, the busiest ones."""
GONE = frozenset({"left", "dead"})
SERVING = frozenset({"ready", "draining"})
ROLE_ORDER = {Role.PREFILL: 0, Role.DECODE: 1}


def ordered(samples: Iterable[WorkerSample]) -> list[WorkerSample]:
    """Prefill first, then by name, ``decode-2`` before ``decode-10``."""
    return sorted(samples, key=lambda one: (ROLE_ORDER.get(one.view.record.role, 2), *_natural(one.view.record.name)))


def worker_row(view: WorkerView, rates: WorkerRates) -> dict[str, Any]:
    """One worker. Pages of the device are held by requests, kept by the prefix cache alone, or unused, and sum up to
    `pages.total`; rates are a second. `cpu`: how many processors it keeps busy, `gpu`:
    its GPU's utilization from 0 to 1, each where that is known."""
    status, record = view.status, view.record
    counters, lately = status.counters, rates.of(record.name, record.incarnation)
    held = status.pages_total - status.pages_free
    unused = min(status.pages_free, int(counters.get("device_pages_unused", status.pages_free)))
    row: dict[str, Any] = {
        "name": record.name,
        "role": record.role,
        "state": status.state,
        "incarnation": record.incarnation,
        "node": record.node,
        "build": record.build,
        "plane": status.plane,
        "running": status.running,
        "waiting": status.waiting,
        "outgoing": status.outgoing,
        "prompt_tokens": status.prompt_tokens,
        "pages": {
            "total": status.pages_total,
            "requests": held,
            "cached": status.pages_free - unused,
            "unused": unused,
        },
        "tokens_s": round(lately.get("tokens_generated", 0.0), 1),
        "prompt_tokens_s": round(lately.get("prompt_tokens_computed", 0.0), 1),
        "stalled_s": round(status.stalled_s, 1),
        "last_end": status.last_end[:200],
        "waits": status.waits[:200],
        "cordoned": view.cordoned,
    }
    if "host_pages_total" in counters:
        used, swapped = int(counters.get("host_pages_used", 0)), int(counters.get("host_pages_swapped", 0))
        row["host"] = {
            "total": int(counters["host_pages_total"]),
            "swapped": swapped,
            "cached": max(0, used - swapped),
        }
    if CPU_SECONDS in lately:
        row["cpu"] = round(lately[CPU_SECONDS], 2)
    if GPU_UTILIZATION in counters:
        row["gpu"] = round(counters[GPU_UTILIZATION], 2)
    for name in ("retracted", "ungranted", "kept_answers"):
        if counters.get(name):
            row[name] = int(counters[name])
    return row


def pool_rows(rows: Sequence[dict[str, Any]], autoscaler: AutoscalerView | None) -> list[dict[str, Any]]:
    """The pools that there are, each with how many of its workers are in which state, and what the autoscaler says."""
    sizing = {pool.role: pool for pool in autoscaler.pools} if autoscaler is not None else {}
    pools = []
    for role in dict.fromkeys([row["role"] for row in rows]):
        own = [row for row in rows if row["role"] == role]
        live = [row for row in own if row["state"] in SERVING]
        pool: dict[str, Any] = {
            "role": role,
            "states": {state: sum(row["state"] == state for row in own) for state in sorted({r["state"] for r in own})},
            "running": sum(row["running"] for row in live),
            "waiting": sum(row["waiting"] for row in live),
            "pages_total": sum(row["pages"]["total"] for row in live),
            "pages_requests": sum(row["pages"]["requests"] for row in live),
        }
        if (one := sizing.get(role)) is not None:
            pool |= {"wanted": one.wanted, "least": one.least, "most": one.most, "why": one.why}
            pool["need"] = round(one.need, 2) if one.need >= 0 else None
        pools.append(pool)
    return pools


def link_rows(links: Sequence[LinkRate]) -> tuple[list[list[Any]], int]:
    """The busiest links as sender, receiver, bytes a second and bytes since the sender's start; and how many more there
    are."""
    rows = [[link.sender, link.receiver, round(link.bytes_s), int(link.total)] for link in links[:MAX_LINKS]]
    return rows, max(0, len(links) - MAX_LINKS)


def _natural(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)


SHOWN = 16
"""Requests in a frame, the newest ones that the controller was told of."""
MAX_SPANS, MAX_EVENTS = 32, 12
TEXT_CHARS = 120


def request_row(record: RequestRecord) -> dict[str, Any]:
    """One request; times in seconds since it came. Spans that aren't `hidden` follow each other and add up to
    `total_s`."""
    return {
        "request_id": record.request_id,
        "router": record.router,
        "model": record.model,
        "tenant": record.tenant,
        "arrived": round(record.arrived, 3),
        "total_s": record.total_s,
        "first_token_s": record.first_token_s,
        "outcome": record.outcome,
        "well": not record.notable,
        "message": record.message[:TEXT_CHARS],
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": sum(record.cached_tokens.values()),
        "generated": record.generated,
        "attempts": record.attempts,
        "migrations": record.migrations,
        "retractions": record.retractions,
        "spans": [
            {
                "name": span.name,
                "start_s": span.start_s,
                "end_s": span.end_s,
                "worker": span.worker,
                "detail": span.detail[:TEXT_CHARS],
                "hidden": span.hidden,
            }
            for span in record.spans[:MAX_SPANS]
        ],
        "events": [
            {"at_s": event.at_s, "kind": event.kind, "worker": event.worker, "text": event.text[:TEXT_CHARS]}
            for event in record.events[:MAX_EVENTS]
        ],
    }


MAX_ROUTERS = 256
"""Starts of routers that are told apart; beyond it the one that was silent for longest stays in the sums alone."""
SILENT_S = 15.0
"""Seconds without a report after which a router isn't there any more."""


class Latencies(NamedTuple):
    """Counts of seconds by bucket (`contracts.messages.router_report`)."""

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


class _SumsAt(NamedTuple):
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
        self._points: deque[_SumsAt] = deque()
        self._last: _SumsAt | None = None

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
        self._points.append(_SumsAt(now, self._sums))
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


def _between(first: _SumsAt, last: _SumsAt) -> Latencies:
    return Latencies(*(grown(b, a) for a, b in zip(first.latencies, last.latencies, strict=True)))
