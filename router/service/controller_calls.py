"""A router's calls to the controller that go on beside its requests: leases of quotas, what requests meet, what the
dashboard shows. Counts are since the router's start, so that a report whose answer was lost costs nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator

from msgspec import structs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.message_types import NAME_CHARS
from twinpool.contracts.messages.autoscaler_messages import AutoscalerView, LatencyCounts
from twinpool.contracts.messages.router_report import MAX_BREAKERS, RouterIdentity, RouterReport
from twinpool.router.core.router_actions import RouterCounts
from twinpool.router.core.router_core import RouterCore
from twinpool.router.links.controller_port import (
    REPORT_S,
    ControllerPorts,
    DashboardSource,
    LatencyListener,
    ReportCalls,
)
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.metrics.request_tally import TargetTally
from twinpool.router.metrics.worker_metrics import control_plane_metrics
from twinpool.router.security.tenant_accounts import TenantAccounts
from twinpool.router.service.admission import QuotaLeases
from twinpool.router.service.dashboard_relay import DashboardRelay
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.verification.audits import AuditResult
from twinpool.router.verification.stream_watch import StreamWatch

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Bounds of the pause between two reports to the dashboard that the controller may ask for."""


class LatencyReports:
    """The reports to the autoscaler: how many requests came, and how many met their targets. The answer says what the
    autoscaler does, for `twinpool status` and the metrics."""

    def __init__(
        self,
        metrics: PrometheusMetrics,
        counts: RouterCounts,
        listener: LatencyListener,
        name: str,
        clock: Clock,
        config: AutoscalingConfig,
    ) -> None:
        """`name`: of this start of the router."""
        self._metrics, self._counts, self._listener, self._name = metrics, counts, listener, name
        metrics.tally.target = TargetTally(config.ttft_target_s, config.itl_target_s)
        self.calls = ReportCalls(clock, "autoscaler away", self._report)
        self.view = AutoscalerView()
        """What the autoscaler has told of itself last."""

    def counts(self) -> LatencyCounts:
        """What was counted until now. A request that was refused or dropped for want of time or room is late."""
        target, counts = self._metrics.tally.target, self._counts
        refused = counts.refused_early + self._metrics.refused_full
        lost = refused + counts.shed
        return LatencyCounts(
            requests=counts.submitted + refused,
            first_tokens=target.first_tokens + lost,
            first_late=target.first_late + lost,
            gaps=target.gaps,
            gaps_late=target.gaps_late,
        )

    async def _report(self) -> None:
        self.view = await self._listener.report_latency(self._name, self.counts())

    def families(self) -> Iterator[Metric]:
        """The metrics of targets and of the autoscaler."""
        counts = self.counts()
        for name, text, value in (
            ("twinpool_first_tokens_judged", "First tokens, and requests refused or dropped", counts.first_tokens),
            ("twinpool_first_tokens_late", "Those later than autoscaling.ttft_target_s, or lost", counts.first_late),
            ("twinpool_gaps_judged", "Deliveries of tokens after an answer's first", counts.gaps),
            ("twinpool_gaps_late", "Those later than autoscaling.itl_target_s", counts.gaps_late),
        ):
            yield CounterMetricFamily(name, text, value=value)
        changes = CounterMetricFamily(
            "twinpool_autoscaler_changes", "What the autoscaler has done, since the controller's start", labels=["kind"]
        )
        for kind, count in self.view.counters.items():
            changes.add_metric([kind], count)
        yield changes
        wanted = GaugeMetricFamily("twinpool_autoscaler_workers", "Workers that a pool is to have", labels=["role"])
        need = GaugeMetricFamily(
            "twinpool_autoscaler_need", "Workers that the load needs, while that is known", labels=["role"]
        )
        for pool in self.view.pools:
            wanted.add_metric([pool.role], pool.wanted)
            if pool.need >= 0:
                need.add_metric([pool.role], pool.need)
        yield wanted
        yield need
        yield GaugeMetricFamily(
            "twinpool_autoscaler_held_seconds", "For which an operator's change holds it", value=self.view.held_s
        )


class RouterReports:
    """The reports to the dashboard: counts, latencies, breakers. How often is the controller's to say: about once a
    second while somebody looks, else every few seconds, for the history."""

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
        """`name`: of this start of the router. `identity`: what operators know it by."""
        self._source, self._metrics, self._core, self._watch = source, metrics, core, watch
        self._name, self._model, self._clock = name, model, clock
        name, address = identity.name[:NAME_CHARS], identity.address[:NAME_CHARS]
        self._identity = structs.replace(identity, name=name, address=address)
        self.calls = ReportCalls(clock, "dashboard away", self._report)
        self._viewers = 0

    def seen_by(self, viewers: int) -> None:
        """Note how many browsers look at this router's dashboard, and report with the next tick."""
        self._viewers, self.calls.next = viewers, self._clock.now()

    async def _report(self) -> None:
        began, told = self._clock.now(), self._viewers
        try:
            pause_s = await self._source.report(self.report())
        except ConnectionError:
            self.calls.next = self._clock.now() + REPORT_S
            raise
        if self._viewers == told:  # Else the next one is due already.
            self.calls.next = began + min(max(pause_s, MIN_PAUSE_S), MAX_PAUSE_S)

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


class ControllerCalls:
    """Those of one start of a router, on its event loop; none where there is no controller."""

    def __init__(
        self,
        ports: ControllerPorts,
        config: Config,
        core: RouterCore,
        accounts: TenantAccounts,
        metrics: PrometheusMetrics,
        watch: StreamWatch | None,
        model: str,
        mint: Callable[[], str],
        clock: Clock,
    ) -> None:
        """`mint` names this start of the router in each kind of call. Metrics get their sources."""
        self.control_plane = ports.control_plane
        self.quotas = QuotaLeases(accounts, ports.lessor, mint(), clock) if ports.lessor is not None else None
        """None: tenants' limits are this router's alone."""
        if (reachable := ports.reachable) is not None:
            metrics.sources.append(lambda: control_plane_metrics(reachable(), ports.control_plane()))
        self.latency: LatencyReports | None = None
        """None: no autoscaler is told what requests meet."""
        if ports.reporter is not None and config.autoscaling.enabled:
            self.latency = LatencyReports(metrics, core.counts, ports.reporter, mint(), clock, config.autoscaling)
            metrics.sources.append(self.latency.families)
        self.reports: RouterReports | None = None
        self.source: DashboardSource | None = None
        """Who knows the cluster's routers; None: nobody."""
        self.dashboard: DashboardRelay | None = None
        """Where browsers are shown the dashboard; None: there is none."""
        if ports.dashboard is not None:
            self.reports = RouterReports(ports.dashboard, metrics, core, watch, mint(), model, ports.identity, clock)
            self.source = ports.dashboard
            self.dashboard = DashboardRelay(ports.dashboard, clock, self.reports.seen_by)

    def tick(self) -> None:
        """To be called every 100 ms or so."""
        for calls in (self.quotas, *self._reported()):
            if calls is not None:
                calls.tick()

    def close(self) -> None:
        for calls in (self.quotas, *self._reported(), self.dashboard):
            if calls is not None:
                calls.close()

    def _reported(self) -> list[ReportCalls]:
        return [reports.calls for reports in (self.latency, self.reports) if reports is not None]
