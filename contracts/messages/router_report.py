"""What a router tells the controller of itself, for the dashboard: its counts, and what it has under way."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta, field
from msgspec.structs import replace

from twinpool.contracts.errors import WireError
from twinpool.contracts.message_types import NAME_CHARS, SOME, Finite, Message, Name, Uint32, Uint64
from twinpool.contracts.messages.latency_shape import BUCKETS

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
"""A count for each bucket of `contracts.messages.latency_shape`; empty: nothing is told."""
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
    """Times from arrival to the first token, a count for each bucket of `contracts.messages.latency_shape`."""
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
