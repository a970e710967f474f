"""What the controller's autoscaler is told by a router: how many requests came, and how many met their targets.

One call is under way at a time, a second after the last. Counts are since the router's start, so a call whose answer
was lost costs nothing. The answer says what the autoscaler does, for `twinpool status` and the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.messages.autoscaler_messages import AutoscalerView, LatencyCounts
from twinpool.router.core.router_actions import RouterCounts
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.metrics.request_tally import TargetTally
from twinpool.router.state.report_calls import ReportCalls

REPORT_S = 1.0
"""Seconds between two reports."""


class LatencyListener(Protocol):
    """The controller, as it hears reports."""

    async def report_latency(self, router: str, counts: LatencyCounts) -> AutoscalerView:
        """Raises `ConnectionError` where the controller doesn't answer."""


class LatencyReports:
    """The reports of one router; on its event loop. `name` is of this start of the router."""

    def __init__(
        self,
        metrics: PrometheusMetrics,
        counts: RouterCounts,
        listener: LatencyListener,
        name: str,
        clock: Clock,
        config: AutoscalingConfig,
    ) -> None:
        self._metrics, self._counts, self._listener, self._name, self._clock = metrics, counts, listener, name, clock
        metrics.tally.target = TargetTally(config.ttft_target_s, config.itl_target_s)
        self._calls = ReportCalls("autoscaler away")
        self._next = clock.now()
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

    def tick(self) -> None:
        """Report if it is time; to be called every 100 ms or so."""
        now = self._clock.now()
        if not self._calls.busy and now >= self._next:
            self._next = now + REPORT_S
            self._calls.begin(self._report)

    def close(self) -> None:
        self._calls.close()

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
