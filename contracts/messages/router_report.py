"""What a router tells the controller of itself, for the dashboard: its counts, and what it has under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
NAME_CHARS = 253
MAX_BREAKERS = 64
"""Workers whose open circuit breakers a report names at most."""


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """What an operator knows a router by."""

    name: str = ""
    """What its logs call it."""
    address: str = ""
    """Where it listens, ``host:port``."""
    settings: str = ""
    """Digest of the settings that routers read (`contracts.config.setting_effects.routers_digest`)."""
    kept: bool = False
    """Whether `serve` keeps it, and replaces it where its build or settings change; one in its own process ends with
    it. Any other is replaced by whoever started it."""


UNNAMED = RouterIdentity()


@dataclass(frozen=True, slots=True)
class RouterReport:
    """One router as it is now."""

    router: str
    """Names one start of the router; the counts are since then."""
    node: str
    pid: int
    build: str
    model: str
    in_flight: int
    """Choices that have not ended."""
    waiting: int
    """Those of them that wait for workers."""
    counters: dict[str, int] = field(default_factory=dict)
    """By the names in `COUNTERS`."""
    first_tokens: tuple[int, ...] = ()
    """Times from arrival to the first token, a count for each bucket of `contracts.messages.latency_shape`."""
    gaps: tuple[int, ...] = ()
    """Times between deliveries of an answer's tokens, likewise."""
    open_breakers: tuple[str, ...] = ()
    """Workers that get nothing from this router, as they have failed."""
    viewers: int = 0
    """Browsers that look at its dashboard."""
    identity: RouterIdentity = UNNAMED
    output_tokens: tuple[int, ...] = ()
    """Times for each token of an answer after its first, one of each answer, likewise; empty of builds that don't
    say."""
    cpu_s: float = 0.0
    """Seconds of processors that the router's process has used since its start, without its helpers' processes; 0 of
    builds that don't say."""
    tokens_per_s: float = 0.0
    """Tokens of answers a second of late, as the controller measures it: by counts of reports one after the other."""
    ttft_slo_s: float = 0.0
    """Seconds to the first token beyond which it refuses requests (`router.ttft_slo_ms`); 0: none."""


def bare(report: RouterReport) -> RouterReport:
    """A report without its counts."""
    return replace(report, counters={}, first_tokens=(), gaps=(), output_tokens=())
