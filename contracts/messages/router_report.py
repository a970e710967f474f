"""What a router tells the controller of itself, for the dashboard: its counts, and what it has under way. And what it
tells the autoscaler, with what that tells of itself.

Latencies are histograms of seconds that can be added up (`LatencyShape`): quarter octaves, from which any percentile
can be read within 19 %. `/metrics` has few buckets, as monitoring systems want them; these are for showing percentiles
of the latest seconds.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Role
from twinpool.contracts.message_types import NAME_CHARS, SOME, Finite, Message, Name, Uint32, Uint64

FIRST_S = 0.00025
OCTAVES = 19
STEPS = 4
"""Buckets in which seconds double."""
BOUNDS_S = tuple(FIRST_S * 2 ** (i / STEPS) for i in range(OCTAVES * STEPS + 1))
"""Upper bounds of the buckets, each included, from 0.25 ms to 131 s; one more bucket has what is longer."""
BUCKETS = len(BOUNDS_S) + 1


class LatencyShape:
    """Counts of seconds by bucket."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The sum of histograms, bucket by bucket."""
    out = [0] * BUCKETS
    for counts in histograms:
        for bucket, count in enumerate(counts):
            if count:
                out[bucket] += count
    return out


def grown(later: Sequence[int], earlier: Sequence[int]) -> list[int]:
    """What has come to a histogram between two moments; a bucket that has shrunk, as after a restart, counts as 0."""
    return [max(0, b - a) for a, b in zip(earlier, later, strict=True)]


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The seconds that `share` (0 to 1) of the values don't exceed, within their bucket by proportion; None without
    values. What is longer than the last bound counts as the last bound."""
    total = sum(counts)
    if not total:
        return None
    wanted, below = max(share * total, 1e-9), 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            if bucket >= len(BOUNDS_S):
                break
            high = BOUNDS_S[bucket]
            low = BOUNDS_S[bucket - 1] if bucket else 0.0
            return low + (high - low) * (wanted - below) / count
        below += count
    return BOUNDS_S[-1]


COUNTERS = (
    "requests_submitted",
    "requests_ended",
    "requests_failed",
    "requests_cancelled",
    "generated_tokens",
    "prompt_tokens_cached",
    "transfer_bytes",
    "replays",
    "attempts_recomputed",
    "handovers_damaged",
    "fallbacks",
    "refused_full",
    "refused_early",
    "requests_shed",
    "client_disconnects",
    "slow_clients",
    "migrated",
    "audits_equal",
    "audits_damaged",
    "streams_flagged",
)
"""The names of a report's counters. Those that `/metrics` has are called as there, without ``twinpool_`` and
``_total``."""
MAX_BREAKERS = 64
"""Workers whose open circuit breakers a report names at most."""
Histogram = Annotated[tuple[Uint64, ...], Meta(max_length=BUCKETS)]
"""A count for each bucket of `LatencyShape`; empty: nothing is told."""
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class RouterIdentity(Message, frozen=True):
    """What an operator knows a router by."""

    name: Name = ""
    """What its logs call it."""
    address: Name = ""
    """Where it listens, ``host:port``."""
    settings: Name = ""
    """Digest of the settings that routers read (`contracts.config.setting_effects.routers_digest`)."""
    kept: bool = False
    """Whether `serve` keeps it, and replaces it where its build or settings change; one in its own process ends with
    it. Any other is replaced by whoever started it."""


UNNAMED = RouterIdentity()


class RoutedModel(Struct, frozen=True):
    """A model as a router is told of it, and where its cluster is."""

    model: str
    """The checkpoint's folder or file."""
    controllers: str
    """Where the cluster's controllers are reached: ``host:port``, several with commas."""
    settings: str = ""
    """The file of its whole configuration as JSON; empty: all defaults."""
    kv_index: str = ""
    """The file of the table of its KV index; empty: there is none."""
    digest: str = ""
    """Digest of the settings that routers read of it."""
    build: str = ""
    """The build that says so."""


class RouterReport(Message, frozen=True):
    """One router as it is now."""

    router: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    """Names one start of the router; the counts are since then."""
    node: Name
    pid: Uint32
    build: Name
    model: Name
    in_flight: Uint32
    """Choices that have not ended."""
    waiting: Uint32
    """Those of them that wait for workers."""
    counters: Annotated[dict[str, Uint64], SOME] = field(default_factory=dict)
    """By the names in `COUNTERS`."""
    first_tokens: Histogram = ()
    """Times from arrival to the first token, a count for each bucket of `LatencyShape`."""
    gaps: Histogram = ()
    """Times between deliveries of an answer's tokens, likewise."""
    open_breakers: Annotated[tuple[Name, ...], Meta(max_length=MAX_BREAKERS)] = ()
    """Workers that get nothing from this router, as they have failed."""
    viewers: Uint32 = 0
    """Browsers that look at its dashboard."""
    identity: RouterIdentity = UNNAMED
    output_tokens: Histogram = ()
    """Times for each token of an answer after its first, one of each answer, likewise; empty of builds that don't
    say."""
    cpu_s: Seconds = 0.0
    """Seconds of processors that the router's process has used since its start, without its helpers' processes; 0 of
    builds that don't say."""
    tokens_per_s: Finite = 0.0
    """Tokens of answers a second of late, as the controller measures it: by counts of reports one after the other."""
    ttft_slo_s: Seconds = 0.0
    """Seconds to the first token beyond which it refuses requests (`router.ttft_slo_ms`); 0: none."""


def bare(report: RouterReport) -> RouterReport:
    """A report without its counts."""
    return replace(report, counters={}, first_tokens=(), gaps=(), output_tokens=())


def checked(report: RouterReport) -> RouterReport:
    """A report as it came, without counters of names that this build doesn't know. Raises `WireError` where one of its
    histograms has neither all buckets nor none."""
    if any(len(counts) not in (0, BUCKETS) for counts in (report.first_tokens, report.gaps, report.output_tokens)):
        raise WireError(f"a histogram of latencies has {BUCKETS} buckets")
    return replace(report, counters={name: report.counters[name] for name in COUNTERS if name in report.counters})


class RouterReportAnswer(Message, frozen=True):
    """The controller's answer to a report."""

    next_s: Finite
    """Seconds until the router is to tell again."""


class RouterReportList(Message, frozen=True):
    """The latest report of each router that is there, without its counts (`bare`)."""

    routers: Annotated[tuple[RouterReport, ...], SOME]


class DashboardFrame(Message, frozen=True):
    """What the dashboard shows, now or of the last minutes."""

    json: bytes
    """As the page reads it (docs/dashboard.md)."""


# ---------------------------------------------------------------- the autoscaler


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """One latency that is promised, as its setting has it."""

    latency: str
    """``ttft`` or ``itl``."""
    seconds: float
    share: float | None
    """The share of requests, or of deliveries, that are to meet it, from 0 to 1; None: all."""
    setting: str


class LatencyCounts(Message, frozen=True):
    """What one router has counted since its start."""

    requests: Uint64 = 0
    """Choices that have come, those that were refused for want of room included."""
    first_tokens: Uint64 = 0
    """Choices that got their first token, or were refused or dropped because it would have come too late."""
    first_late: Uint64 = 0
    """Those of them for which it came later than the target, or not at all."""
    gaps: Uint64 = 0
    """Deliveries of tokens after an answer's first."""
    gaps_late: Uint64 = 0
    """Those of them that came later after the one before than the target."""


class LatencyReport(Message, frozen=True):
    """The counts of one router."""

    router: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    """Names one start of the router; the counts are since then."""
    counts: LatencyCounts


class PoolSizing(Message, frozen=True):
    """One pool as the autoscaler sees it."""

    role: Role
    ready: Uint32
    wanted: Uint32
    """Workers that it has or is to have, those that are starting included and those that leave left out."""
    least: Uint32
    most: Uint32
    need: Finite
    """Workers that the load needs; below 0 while that isn't known."""
    why: str
    """What the need comes from, or why nothing is decided, in words."""


class SizingDecision(Message, frozen=True):
    """One change that the autoscaler has made."""

    ago_s: Finite
    text: str
    """What was changed, and why."""


class AutoscalerView(Message, frozen=True):
    """The autoscaler as operators see it."""

    pools: Annotated[tuple[PoolSizing, ...], SOME] = ()
    decisions: Annotated[tuple[SizingDecision, ...], SOME] = ()
    """The latest ones, the newest first."""
    held_s: Finite = 0.0
    """Seconds for which it leaves the pools alone yet, because an operator has changed one."""
    counters: Annotated[dict[str, Uint64], SOME] = field(default_factory=dict)
    """How often it has decided what, since the controller's start."""
