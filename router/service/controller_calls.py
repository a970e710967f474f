"""A router's calls to the controller that go on beside its requests: leases of quotas, what requests meet, what the
dashboard shows. Counts are since the router's start, so that a report whose answer was lost costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator

from msgspec import structs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.pushed_weights import PushedFolders
from twinpool.contracts.clock import Clock
from twinpool.contracts.compact_json import sse_event
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.json_logs import log
from twinpool.contracts.message_types import NAME_CHARS
from twinpool.contracts.messages.router_report import (
    MAX_BREAKERS,
    AutoscalerView,
    LatencyCounts,
    RouterIdentity,
    RouterReport,
)
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
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.verification.audits import AuditResult
from twinpool.router.verification.stream_watch import StreamWatch

MAX_VIEWERS = 64
"""Browsers that look at one router's page at once."""
RETRY_S = 0.5
"""Seconds between two attempts to get frames."""
SILENCE_S = 15.0
"""Seconds without a frame after which the stream counts as broken: a large cluster has one every few seconds."""
BEAT_S = 5.0
"""Seconds without an event after which a viewer gets a comment, by which both ends see that the connection is there."""
PAST_S = 2.0
"""Seconds for which the past is the same for all viewers."""
BEAT = b": beat\n\n"


class NoViewer(TwinpoolError):
    """Raised when as many browsers look as may, or the router ends."""


class DashboardViewer:
    """One browser's events."""

    def __init__(self, relay: DashboardRelay) -> None:
        self._relay = relay
        self._more = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """End the events: the client has left, or the router ends. Idempotent."""
        self._closed = True
        self._relay.left(self)
        self._more.set()

    def wake(self) -> None:
        self._more.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Events of a stream: `past`, at the beginning and whenever frames begin anew; `frame`; `away`."""
        relay, seen, stream = self._relay, 0, 0
        while not self._closed:
            if stream != relay.stream:
                stream, past = relay.stream, await relay.past()
                if past:
                    yield past
            elif seen != relay.number:
                seen = relay.number
                yield relay.latest
            elif not await self._woken():
                yield BEAT

    async def _woken(self) -> bool:
        try:
            async with asyncio.timeout(BEAT_S):
                await self._more.wait()
        except TimeoutError:
            return False
        self._more.clear()
        return True


class DashboardRelay:
    """The frames of one router; on its event loop."""

    def __init__(self, source: DashboardSource, clock: Clock, on_viewers: Callable[[int], None]) -> None:
        """`on_viewers` is told how many look, whenever that changes."""
        self._source, self._clock, self._on_viewers = source, clock, on_viewers
        self._viewers: set[DashboardViewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._past: tuple[int, float, bytes] | None = None
        self._closed = False
        self.latest = b""
        """The latest event."""
        self.number = 0
        """How many events there were."""
        self.stream = 0
        """How many streams of frames there were that have brought one."""

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    def open(self) -> DashboardViewer:
        """A viewer more; its `close` must be called. Raises `NoViewer`."""
        if self._closed:
            raise NoViewer("this router ends: ask again, and another answers")
        if len(self._viewers) >= MAX_VIEWERS:
            raise NoViewer(f"{MAX_VIEWERS} browsers look at this router's dashboard already")
        viewer = DashboardViewer(self)
        self._viewers.add(viewer)
        self._on_viewers(len(self._viewers))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())
        return viewer

    def left(self, viewer: DashboardViewer) -> None:
        if viewer in self._viewers:
            self._viewers.discard(viewer)
            self._on_viewers(len(self._viewers))
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all viewers' events, and take none any more. Idempotent."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.close()

    async def past(self) -> bytes:
        """The event `past`; empty where the controller doesn't answer: it comes once frames do."""
        now, kept = self._clock.now(), self._past
        if kept is None or kept[0] != self.stream or now >= kept[1] + PAST_S:
            try:
                kept = self._past = self.stream, now, sse_event(await self._source.past(), "past")
            except ConnectionError as error:
                log("dashboard without its past", reason=str(error))
                return b""
        return kept[2]

    async def _follow(self) -> None:
        """Get frames until nobody looks any more, from one stream after the other."""
        said = ""
        while True:
            began = self.stream
            reason = await self._frames()
            if reason != said or self.stream != began:
                log("dashboard's frames have ended", reason=reason)
                self._tell(sse_event(json.dumps({"reason": reason}), "away"))
            said = reason
            await asyncio.sleep(RETRY_S)

    async def _frames(self) -> str:
        """Pass on one stream's frames; returns why it ended."""
        began = False
        try:
            async with contextlib.aclosing(self._source.frames()) as frames:  # type: ignore[type-var]
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        frame = await anext(frames)
                    self.stream += not began
                    began = True
                    self._tell(sse_event(frame, "frame"))
        except TimeoutError:
            return f"the controller has sent nothing for {SILENCE_S:g} s"
        except (ConnectionError, StopAsyncIteration) as error:
            return str(error) or "the frames have ended"

    def _tell(self, event: bytes) -> None:
        self.latest, self.number = event, self.number + 1
        for viewer in self._viewers:
            viewer.wake()


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
        self._core, self._reachable = core, ports.reachable
        self.pushed = PushedFolders(config.engine.weight_roots, clock)
        """The weights that were pushed to the cluster."""
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
        served = self._core.workers.served
        used = [one.path for one in (served.weights, served.pending) if one is not None and one.path]
        known = self._reachable is not None and self._reachable()
        self.pushed.tend(used, served.tried, settled=known and not served.behind)

    def close(self) -> None:
        self.pushed.close()
        for calls in (self.quotas, *self._reported(), self.dashboard):
            if calls is not None:
                calls.close()

    def _reported(self) -> list[ReportCalls]:
        return [reports.calls for reports in (self.latency, self.reports) if reports is not None]
