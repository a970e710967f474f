"""The dashboard's frames: what there is to see of a cluster now, and of its last hours.

`EventLog` has what happened to the cluster, in words, the latest entries of it. `History` has the past: a row of
numbers every few seconds for a quarter of an hour, and one a minute for hours. `ClusterFrames` makes the frames of
both.

The logic alone: whoever has the cluster's state hands it in (`take`), as often as somebody watches, or every few
seconds where nobody does, and asks for frames. What has happened between two states becomes entries of the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from twinpool.cluster.dashboard.frame_rows import (
    GONE,
    HITS,
    SERVING,
    SHOWN,
    Latencies,
    RouterTotals,
    WorkerRates,
    WorkerSample,
    link_rows,
    ordered,
    pool_rows,
    request_row,
    worker_row,
)
from twinpool.contracts.damage import DamageSite
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.contracts.messages.request_record import RequestRecord
from twinpool.contracts.messages.router_report import AutoscalerView, LatencyTarget, RouterReport, percentile
from twinpool.contracts.messages.worker_status import CPU_SECONDS, DamageTotals

KEPT = 200
TEXT_CHARS = 400


class EventKind(StrEnum):
    """Who or what an entry is about, by which the page marks it."""

    WORKER = "worker"
    SCALE = "scale"
    OPERATOR = "operator"
    CONTROL = "control"
    ROUTER = "router"
    DAMAGE = "damage"


class EventLog:
    """The latest `KEPT` entries. They are numbered, so that whoever has missed some sees how many."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._count = 0

    def add(self, at: float, kind: EventKind, text: str) -> None:
        """Add an entry. `at`: seconds since 1970."""
        self._count += 1
        self._events.append({"n": self._count, "at": round(at, 3), "kind": kind, "text": text[:TEXT_CHARS]})

    def latest(self, most: int = KEPT) -> list[dict[str, Any]]:
        """The latest entries as JSON has them, the oldest first."""
        return list(self._events)[-most:]


SAMPLE_S = 5.0
"""Seconds between two rows."""
KEPT_S = 900.0
MINUTE_S, MINUTES = 60.0, 360
"""What a row of the longer past is of, and how many are kept."""
COLUMNS = (
    "at",
    "requests_s",
    "tokens_s",
    "prompt_tokens_s",
    "hit_share",
    "bytes_s",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "itl_p50",
    "itl_p99",
    "running",
    "queued",
    "cpu_workers",
    "cpu_routers",
    "pages_prefill",
    "pages_decode",
    "serving_prefill",
    "serving_decode",
)
"""`at` in seconds since 1970; percentiles in seconds; pages as the share that requests hold, and hits as the share
of prompt tokens; processors in use; None where unknown."""

WORST = frozenset({"ttft_p99", "tpot_p99", "itl_p99"})
"""Columns of which a minute has the worst; of the others it has the mean."""

Row = Mapping[str, float | None]


class History:
    """The latest rows."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=int(KEPT_S / SAMPLE_S))
        self._minutes: deque[tuple[float | None, ...]] = deque(maxlen=MINUTES)
        self._minute: list[tuple[float | None, ...]] = []
        """Rows of the minute that isn't over."""

    def add(self, row: Row) -> None:
        """Add a row; it must have every column."""
        values = tuple(row[name] for name in COLUMNS)
        self._rows.append(values)
        if self._minute and _minute_of(self._minute[0]) != _minute_of(values):
            self._minutes.append(_together(self._minute))
            self._minute = []
        self._minute.append(values)

    def columns(self) -> dict[str, list[float | None]]:
        """All rows, column by column, the oldest first."""
        return _columns(self._rows)

    def minutes(self) -> dict[str, list[float | None]]:
        """Whole minutes, likewise; `at` is the middle of each."""
        return _columns(self._minutes)


def _columns(rows: Sequence[tuple[float | None, ...]]) -> dict[str, list[float | None]]:
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}


def _minute_of(row: tuple[float | None, ...]) -> int:
    at = row[0]
    assert at is not None
    return int(at // MINUTE_S)


def _together(rows: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...]:
    found: list[float | None] = [(_minute_of(rows[0]) + 0.5) * MINUTE_S]
    for name, values in zip(COLUMNS[1:], list(zip(*rows, strict=True))[1:], strict=True):
        known = [value for value in values if value is not None]
        if not known:
            found.append(None)
        else:
            found.append(max(known) if name in WORST else round(sum(known) / len(known), 4))
    return tuple(found)


VERSION = 1
WINDOW_S = 5.0
"""Seconds that rates are of."""
LATENCY_WINDOW_S = 15.0
"""Seconds that percentiles are of."""
EARLY_S = 0.5
"""Seconds by which a row of the history may be early, so that none is missed for a tick's sake."""
FRAME_EVENTS = 24
"""Entries of the log in each frame: one that was missed comes with the next."""
MAX_ROUTERS_SHOWN = 64


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster at one moment."""

    workers: Sequence[WorkerSample]
    autoscaler: AutoscalerView | None = None
    """None: there is none."""
    control: ControlPlane | None = None
    """None: there are no controllers, as in one process."""
    supervised: bool = True
    """Whether somebody starts workers."""
    shutting_down: bool = False
    deaths: int = 0
    """Workers that have died since the controller's start."""
    requests: Sequence[RequestRecord] = ()
    """The latest ones that are known of, the newest first."""
    targets: Sequence[LatencyTarget] = ()
    """What the autoscaler sizes the pools for."""


class ClusterFrames:
    """Makes frames of one cluster. Not thread-safe: one loop owns it."""

    def __init__(self, name: str, boot: str, build: str, now: float) -> None:
        """`name`: the cluster's. `boot`: of this start of the controller, by which viewers see that another one makes
        the frames. `now`: seconds of the clock that `take` is given."""
        self._name, self._boot, self._build, self._began = name, boot, build, now
        self.log = EventLog()
        self._routers = RouterTotals(WINDOW_S, LATENCY_WINDOW_S)
        self._rates = WorkerRates(WINDOW_S)
        self._damage = DamageTotals()
        self._damaged = 0.0
        self._history, self._sample_at = History(), now
        self._states: dict[WorkerName, tuple[Incarnation, str, Role]] = {}
        self._known = False
        self._count = 0
        self._now = self._wall = now
        self._state = ClusterState(())
        self._here: set[str] = set()

    # ------------------------------------------------------------ what it hears

    def routers(self, now: float) -> list[RouterReport]:
        """The last report of each router that is there, with its rate of tokens."""
        return [
            replace(report, tokens_per_s=self._routers.rate_of(report.router, "generated_tokens"))
            for report in self._routers.here(now)
        ]

    def report(self, report: RouterReport, now: float, wall: float) -> None:
        """Take in a router's report. `wall`: seconds since 1970."""
        if self._routers.report(report, now):
            self.log.add(wall, EventKind.ROUTER, f"{_router_name(report)} reports")
        self._here.add(report.router)

    def take(self, state: ClusterState, now: float, wall: float) -> None:
        """Take in the cluster's state."""
        self._state, self._now, self._wall = state, now, wall
        self._rates.take(state.workers, now)
        self._routers.take(now)
        for view, _ in state.workers:
            self.changed(view.record.name, view.record.incarnation, view.status.state, view.record.role, wall)
        self._known = True
        self._note_routers(now, wall)
        self._damage.on_statuses(sample.view.status for sample in state.workers)
        self._note_damage(wall)
        if now >= self._sample_at - EARLY_S:
            self._sample_at = now + SAMPLE_S
            self._history.add(self._history_row())

    def changed(self, name: WorkerName, incarnation: Incarnation, state: str, role: Role, wall: float) -> None:
        """Note a worker's state, which may last for less than there is between two calls of `take`."""
        old, new = self._states.get(name), (incarnation, state, role)
        self._states[name] = new
        if self._known and old != new and state not in GONE:  # Of those the controller tells, with the reason.
            self.log.add(wall, EventKind.WORKER, _change(name, old, *new))

    def _note_routers(self, now: float, wall: float) -> None:
        here = {report.router for report in self._routers.here(now)}
        for _ in self._here - here:
            self.log.add(wall, EventKind.ROUTER, "a router has been silent for 15 s: it has ended, or is cut off")
        self._here = here

    def _note_damage(self, wall: float) -> None:
        found = sum(sample.count for sample in self._damage.samples())
        if found > self._damaged:
            text = f"workers have found damaged state {found - self._damaged:.0f} times; it is computed again"
            self.log.add(wall, EventKind.DAMAGE, text)
        self._damaged = found

    # ------------------------------------------------------------ what it shows

    def frame(self) -> dict[str, Any]:
        """What there is to see now; numbers in seconds, bytes, tokens and pages, rates a second."""
        self._count += 1
        state, reports = self._state, self._routers.here(self._now)
        rows = [worker_row(sample.view, self._rates) for sample in ordered(state.workers)]
        links, left_out = link_rows(self._rates.links())
        scaler = state.autoscaler
        return {
            "v": VERSION,
            "n": self._count,
            "at": round(self._wall, 3),
            "boot": self._boot,
            "up_s": round(self._now - self._began, 1),
            "cluster": self._name,
            "models": sorted({report.model for report in reports}),
            "control": self._control(),
            "now": self._numbers(self._routers.latencies()),
            "targets": self._targets(reports),
            "pools": pool_rows(rows, scaler),
            "autoscaler": None if scaler is None else {"held_s": round(scaler.held_s, 1), "counters": scaler.counters},
            "workers": rows,
            "links": links,
            "links_left_out": left_out,
            "routers": [self._router_row(report) for report in reports[:MAX_ROUTERS_SHOWN]],
            "totals": self._routers.totals(),
            "damage": self._damage_by_site(),
            "deaths": state.deaths,
            "events": self.log.latest(FRAME_EVENTS),
            "requests": [request_row(record) for record in state.requests[:SHOWN]],
        }

    def past(self) -> dict[str, Any]:
        """What there was to see: numbers every `SAMPLE_S` seconds, those of minutes for longer, and the whole log."""
        return {
            "v": VERSION,
            "boot": self._boot,
            "sample_s": SAMPLE_S,
            "history": self._history.columns(),
            "minutes": self._history.minutes(),
            "events": self.log.latest(),
        }

    def _control(self) -> dict[str, Any] | None:
        plane = self._state.control
        if plane is None:
            return None
        return {
            "leader": plane.leader,
            "term": plane.term,
            "standbys": list(plane.standbys),
            "build": self._build,
            "supervised": self._state.supervised,
            "shutting_down": self._state.shutting_down,
        }

    def _router_row(self, report: RouterReport) -> dict[str, Any]:
        return {
            "name": _router_name(report),
            "node": report.node,
            "pid": report.pid,
            "build": report.build,
            "in_flight": report.in_flight,
            "waiting": report.waiting,
            "tokens_s": round(self._routers.rate_of(report.router, "generated_tokens"), 1),
            "requests_s": round(self._routers.rate_of(report.router, "requests_submitted"), 2),
            "open_breakers": list(report.open_breakers),
            "viewers": report.viewers,
            "cpu": _rounded(self._routers.cores_of(report.router)),
        }

    def _targets(self, reports: Sequence[RouterReport]) -> dict[str, list[dict[str, Any]]]:
        """The configured targets by the latency that they are for, each with its seconds, the share of requests that is
        to meet it (None: all), and the setting."""
        found = list(self._state.targets)
        for seconds in sorted({report.ttft_slo_s for report in reports} - {0.0}):
            found.append(LatencyTarget("ttft", seconds, None, "router.ttft_slo_ms"))
        rows: dict[str, list[dict[str, Any]]] = {}
        for one in found:
            rows.setdefault(one.latency, []).append({"s": one.seconds, "share": one.share, "by": one.setting})
        return rows

    def _damage_by_site(self) -> dict[str, int]:
        found: dict[str, int] = dict.fromkeys(DamageSite, 0)
        for sample in self._damage.samples():
            found[sample.where] = found.get(sample.where, 0) + int(sample.count)
        found[DamageSite.AUDIT] += self._routers.totals()["audits_damaged"]
        return found

    def _numbers(self, latencies: Latencies) -> dict[str, Any]:
        reports = self._routers.here(self._now)
        serving = [view for view, _ in self._state.workers if view.status.state in SERVING]
        rates = [self._rates.of(view.record.name, view.record.incarnation) for view in serving]
        computed = sum(one.get("prompt_tokens_computed", 0.0) for one in rates)
        hits = sum(one.get(name, 0.0) for one in rates for name in HITS)
        return {
            "requests_s": round(self._routers.rate("requests_submitted", self._now), 2),
            "tokens_s": round(self._routers.rate("generated_tokens", self._now), 1),
            "prompt_tokens_s": round(computed, 1),
            "hit_share": round(hits / (hits + computed), 4) if hits + computed > 0 else None,
            "bytes_s": round(sum(link.bytes_s for link in self._rates.links())),
            "in_flight": sum(report.in_flight for report in reports),
            "queued": sum(report.waiting for report in reports) + sum(view.status.waiting for view in serving),
            "running": sum(view.status.running for view in serving),
            "cpu_workers": _rounded(_known_sum(one.get(CPU_SECONDS) for one in rates)),
            "cpu_routers": _rounded(_known_sum(self._routers.cores_of(report.router) for report in reports)),
            "ttft": _percentiles(latencies.first_tokens),
            "tpot": _percentiles(latencies.output_tokens),
            "itl": _percentiles(latencies.gaps),
        }

    def _history_row(self) -> dict[str, float | None]:
        numbers = self._numbers(self._routers.latencies_since_last())
        row: dict[str, float | None] = {"at": round(self._wall, 1)}
        row |= {name: numbers[name] for name in ("requests_s", "tokens_s", "prompt_tokens_s", "hit_share")}
        row |= {name: numbers[name] for name in ("bytes_s", "running", "queued", "cpu_workers", "cpu_routers")}
        for kind in ("ttft", "tpot", "itl"):
            row |= {f"{kind}_{name}": numbers[kind][name] for name in ("p50", "p99")}
        for role in (Role.PREFILL, Role.DECODE):
            roles = (role, Role.COLOCATED) if role is Role.DECODE else (role,)
            own = [v.status for v, _ in self._state.workers if v.record.role in roles and v.status.state in SERVING]
            total = sum(status.pages_total for status in own)
            held = total - sum(status.pages_free for status in own)
            row[f"pages_{role}"] = round(held / total, 4) if total else None
            row[f"serving_{role}"] = len(own)
        return row


def _percentiles(counts: Sequence[int]) -> dict[str, float | int | None]:
    found: dict[str, float | int | None] = {"count": sum(counts)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        seconds = percentile(counts, share)
        found[name] = round(seconds, 5) if seconds is not None else None
    return found


def _known_sum(values: Iterable[float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rounded(cores: float | None) -> float | None:
    return None if cores is None else round(cores, 2)


def _router_name(report: RouterReport) -> str:
    return f"router {report.pid} on {report.node}"


def _change(
    name: WorkerName, old: tuple[Incarnation, str, Role] | None, incarnation: Incarnation, state: str, role: Role
) -> str:
    what = {
        "starting": "starts",
        "ready": "drains no more" if old is not None and old[1] == "draining" else "serves",
        "draining": "drains: it takes nothing new, and what runs goes to others",
    }.get(state, f"is {state}")
    again = f", incarnation {incarnation}" if incarnation > 1 and state in ("starting", "ready") else ""
    changed = f", as a {role} worker" if old is not None and old[2] is not role else ""
    return f"{name} {what}{changed}{again}"
