"""What the dashboard is told by a router of itself: its counts, its latencies, its breakers.

One call is under way at a time. Counts are since the router's start, so a call whose answer was lost costs nothing. How
often is the controller's to say: about once a second while somebody looks, else every few seconds, for the history.
"""

from __future__ import annotations

import os
import platform
import time

from msgspec import structs

from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.message_types import NAME_CHARS
from twinpool.contracts.messages.router_report import MAX_BREAKERS, RouterIdentity, RouterReport
from twinpool.router.core.router_core import RouterCore
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.service.dashboard_source import DashboardSource
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.state.report_calls import ReportCalls
from twinpool.router.verification.audits import AuditResult
from twinpool.router.verification.stream_watch import StreamWatch

RETRY_S = 1.0
"""Seconds until a report that failed is made again."""
MIN_S, MAX_S = 0.5, 30.0
"""Bounds of what the controller may ask for."""


class RouterReports:
    """The reports of one router; on its event loop. `name` is of this start of the router, `identity` what operators
    know it by."""

    def __init__(
        self,
        source: DashboardSource,
        metrics: PrometheusMetrics,
        core: RouterCore,
        watch: StreamWatch | None,
        name: str,
        model: str,
        identity: RouterIdentity,
        clock: Clock,
    ) -> None:
        self._source, self._metrics, self._core, self._watch = source, metrics, core, watch
        self._name, self._model, self._clock = name, model, clock
        name, address = identity.name[:NAME_CHARS], identity.address[:NAME_CHARS]
        self._identity = structs.replace(identity, name=name, address=address)
        self._calls = ReportCalls("dashboard away")
        self._next = clock.now()
        self._viewers = 0

    def tick(self) -> None:
        """Report if it is time; to be called every 100 ms or so."""
        if not self._calls.busy and self._clock.now() >= self._next:
            self._calls.begin(self._report)

    def seen_by(self, viewers: int) -> None:
        """Note how many browsers look at this router's dashboard, and report with the next tick."""
        self._viewers, self._next = viewers, self._clock.now()

    def close(self) -> None:
        self._calls.close()

    async def _report(self) -> None:
        began, told = self._clock.now(), self._viewers
        try:
            pause_s = await self._source.report(self.report())
        except ConnectionError:
            self._next = self._clock.now() + RETRY_S
            raise
        if self._viewers == told:  # Else the next one is due already.
            self._next = began + min(max(pause_s, MIN_S), MAX_S)

    def report(self) -> RouterReport:
        """This router as it is now."""
        core, metrics = self._core, self._metrics
        counts, results, tally = core.counts, core.audits.counts.results, metrics.tally
        breakers = [e.record.name for e in core.workers if e.breaker.state is not CircuitState.CLOSED]
        return RouterReport(
            self._name,
            platform.node(),
            os.getpid(),
            build_id(),
            self._model,
            core.requests.in_flight,
            core.requests.waiting,
            {
                "requests_submitted": counts.submitted,
                "requests_ended": counts.ended,
                "requests_failed": counts.failed,
                "requests_cancelled": counts.cancelled,
                "generated_tokens": tally.generated_tokens,
                "prompt_tokens_cached": tally.cached.total(),
                "transfer_bytes": tally.transfer_bytes,
                "replays": counts.replays,
                "attempts_recomputed": counts.recomputed,
                "handovers_damaged": counts.damaged,
                "fallbacks": counts.fallbacks,
                "refused_full": metrics.refused_full,
                "refused_early": counts.refused_early,
                "requests_shed": counts.shed,
                "client_disconnects": metrics.disconnects,
                "slow_clients": metrics.slow_clients,
                "migrated": core.migrations.counts.migrated,
                "audits_equal": results[AuditResult.EXACT],
                "audits_damaged": results[AuditResult.DAMAGED],
                "streams_flagged": sum(self._watch.flagged.values()) if self._watch is not None else 0,
            },
            tuple(tally.first_token_shape.counts),
            tuple(tally.gap_shape.counts),
            tuple(breakers[:MAX_BREAKERS]),
            self._viewers,
            self._identity,
            tuple(tally.output_token_shape.counts),
            round(time.process_time(), 3),
            ttft_slo_s=metrics.ttft_slo_s,
        )
