"""A router's calls to the controller that go on beside its requests: leases of quotas, what requests meet, what the
dashboard shows."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.router.core.router_core import RouterCore
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.metrics.worker_metrics import control_plane_metrics
from twinpool.router.security.tenant_accounts import TenantAccounts
from twinpool.router.service.controller_ports import ControllerPorts
from twinpool.router.service.dashboard_relay import DashboardRelay
from twinpool.router.service.dashboard_source import DashboardSource
from twinpool.router.service.latency_reports import LatencyReports
from twinpool.router.service.quota_leases import QuotaLeases
from twinpool.router.service.router_reports import RouterReports
from twinpool.router.verification.stream_watch import StreamWatch


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
        for calls in (self.quotas, self.latency, self.reports):
            if calls is not None:
                calls.tick()

    def close(self) -> None:
        for calls in (self.quotas, self.latency, self.reports, self.dashboard):
            if calls is not None:
                calls.close()
