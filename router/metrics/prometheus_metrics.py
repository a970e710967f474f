"""The router's Prometheus metrics. Counting is plain arithmetic on the event loop; families are made at each scrape.

The library's own counters and histograms take a lock each time, which for every token would cost as much as all other
work of the router on it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.ids import Role
from contracts.messages.worker_events import LegReport
from router.core.local_prefill import LocalReason
from router.core.router_core import RouterCore
from router.metrics.cache_metrics import tier_metrics
from router.metrics.draft_metrics import draft_metrics
from router.metrics.link_metrics import link_metrics
from router.metrics.verification_metrics import verification_metrics
from router.openai.choice_output import ChoiceOutput
from router.state.circuit_breaker import CircuitState
from router.verification.stream_watch import StreamWatch

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_BREAKER = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class LatencyTally:
    """A histogram of seconds; a bucket includes its upper bound."""

    __slots__ = ("_bounds", "_counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        total = 0
        buckets = []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.sum_s)


class TargetTally:
    """Counts of first tokens and later deliveries, and of those that missed the autoscaler's targets."""

    __slots__ = ("_first_s", "_gap_s", "first_late", "first_tokens", "gaps", "gaps_late")

    def __init__(self, first_s: float = math.inf, gap_s: float = math.inf) -> None:
        self._first_s, self._gap_s = first_s, gap_s
        self.first_tokens = self.first_late = self.gaps = self.gaps_late = 0

    def first_token(self, seconds: float) -> None:
        self.first_tokens += 1
        self.first_late += seconds > self._first_s

    def gap(self, seconds: float) -> None:
        self.gaps += 1
        self.gaps_late += seconds > self._gap_s


class PrometheusMetrics(Collector):
    """The metrics of one router; used from its event loop."""

    def __init__(self, core: RouterCore, plane: str, watch: StreamWatch | None = None, model: str = "") -> None:
        self._core = core
        self._plane = plane
        self._watch, self._model = watch, model
        self._computed: Counter[tuple[str, str]] = Counter()
        self._ttft, self._itl, self._e2e = (
            LatencyTally(TTFT_BUCKETS_S),
            LatencyTally(ITL_BUCKETS_S),
            LatencyTally(E2E_BUCKETS_S),
        )
        self.transfer_bytes = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.target = TargetTally()
        self.refused_full = 0
        self.disconnects = 0
        self.slow_clients = 0
        self.sources: list[Callable[[], Iterator[Metric]]] = []
        """Functions that yield further families at each scrape: of connections, bodies and readers."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def report(self, event: LegReport) -> None:
        """Count what a leg reports, whether or not its request still runs."""
        self._computed[event.worker, event.role] += event.computed_tokens
        if event.role is Role.PREFILL:
            self.cached_tokens += event.cached_tokens
        else:
            self.transfer_bytes += event.transfer_bytes

    def tokens(self, choice: ChoiceOutput, count: int, now: float) -> None:
        """Count tokens delivered to a choice at `now`, and set its `first_at` and `last_at`.

        The inter-token histogram gets one value a delivery, however many tokens that has.
        """
        self.generated_tokens += count
        if choice.first_at:
            gap_s = now - choice.last_at
            self._itl.observe(gap_s)
            self.target.gap(gap_s)
        else:
            choice.first_at = now
            first_s = now - choice.request.arrived + choice.tokenise_s
            self._ttft.observe(first_s)
            self.target.first_token(first_s)
        choice.last_at = now

    def ended(self, choice: ChoiceOutput) -> None:
        """Count a choice's duration, unless it ended in an error; its `ended_at` must be set."""
        if choice.error is None:
            self._e2e.observe(choice.ended_at - choice.request.arrived + choice.tokenise_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    # ------------------------------------------------------------ at the scrape

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._core.counts
        for name, text, value in (
            ("twinpool_prompt_tokens_cached", "Prompt tokens found in prefill's cache", self.cached_tokens),
            ("twinpool_generated_tokens", "Tokens delivered to clients' answers", self.generated_tokens),
            ("twinpool_refused_full", "Requests refused because the queue was full", self.refused_full),
            ("twinpool_client_disconnects", "Requests whose client left", self.disconnects),
            ("twinpool_slow_clients", "Requests cancelled because their client read too slowly", self.slow_clients),
            ("twinpool_requests_submitted", "Choices admitted", counts.submitted),
            ("twinpool_requests_ended", "Choices that ended in their full answer", counts.ended),
            ("twinpool_requests_failed", "Choices that ended in an error", counts.failed),
            ("twinpool_requests_cancelled", "Choices taken back", counts.cancelled),
            ("twinpool_requests_detached", "Choices left to workers, as their clients may come back", counts.detached),
            ("twinpool_requests_adopted", "Choices that workers had kept and that went on here", counts.adopted),
            ("twinpool_replays", "Attempts after a worker was lost or failed", counts.replays),
            (
                "twinpool_recomputed",
                "Attempts that decode had no memory for, gone on from their tokens",
                counts.recomputed,
            ),
            ("twinpool_drain_refusals", "Attempts that a draining worker refused", counts.refusals),
            ("twinpool_damaged", "Hand-overs with damaged bytes, detected and recomputed", counts.damaged),
            ("twinpool_fallbacks", "Legs in which decode computed prompt tokens itself", counts.fallbacks),
            (
                "twinpool_refused_early",
                "Requests refused: their first token was predicted to be late",
                counts.refused_early,
            ),
            (
                "twinpool_refused_falsely",
                "Those of them for which the worker would have had the time, by what it did since",
                counts.refused_falsely,
            ),
            (
                "twinpool_shed",
                "Choices not computed: nothing had begun them when their first token was due",
                counts.shed,
            ),
            ("twinpool_late_events", "Events of ended requests or earlier attempts, dropped", counts.late_events),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield from self._of_migrations()
        for source in self.sources:
            yield from source()
        yield self._ttft.family("twinpool_time_to_first_token_seconds", "From arrival to the first token")
        yield self._itl.family(
            "twinpool_inter_token_seconds",
            "Between deliveries of an answer's tokens, of one token each unless several came at once",
        )
        yield self._e2e.family("twinpool_request_seconds", "From arrival to the end of an answer")
        yield from self._of_legs()
        yield from self._of_workers()

    def _of_migrations(self) -> Iterator[Metric]:
        counts, offered = self._core.migrations.counts, float(self._core.migrations.offers.bytes)
        outcomes = CounterMetricFamily(
            "twinpool_migrations", "Requests handed from decode to decode", labels=["outcome"]
        )
        for outcome, value in (
            ("migrated", counts.migrated),
            ("stayed", counts.stayed),
            ("restarted", counts.restarted),
        ):
            outcomes.add_metric([outcome], value)
        yield outcomes
        for name, text, total in (
            ("twinpool_migrated_bytes", "State sent along with requests that migrated", float(counts.migrated_bytes)),
            (
                "twinpool_offered_bytes",
                "State taken over from trees of workers that left",
                offered,
            ),
            ("twinpool_migration_pause_seconds", "Streams stood still for moves, in all", counts.paused_s),
        ):
            yield CounterMetricFamily(name, text, value=total)
        text = "The longest that a stream stood still for a move"
        yield GaugeMetricFamily("twinpool_migration_pause_longest_seconds", text, value=counts.longest_pause_s)

    def _of_legs(self) -> Iterator[Metric]:
        computed = CounterMetricFamily(
            "twinpool_prompt_tokens_computed",
            "Prompt tokens whose state a worker computed",
            labels=["worker", "role"],
        )
        # Workers that have computed nothing have a sample too: a decode worker must visibly stay at 0.
        known = {(str(e.record.name), str(e.record.role)): 0 for e in self._core.workers}
        for labels, value in sorted({**known, **self._computed}.items()):
            computed.add_metric(labels, value)
        yield computed
        moved = CounterMetricFamily(
            "twinpool_transfer_bytes", "Bytes of pages received and verified by decode", labels=["plane"]
        )
        moved.add_metric([self._plane], self.transfer_bytes)
        yield moved

    def _of_breakers(self) -> Iterator[Metric]:
        labels = ["worker", "role"]
        state = GaugeMetricFamily(
            "twinpool_breaker_state", "Circuit breaker: 0 closed, 1 half-open, 2 open", labels=labels
        )
        opened = CounterMetricFamily("twinpool_breaker_opened", "Times it has opened", labels=labels)
        for entry in self._core.workers:
            values = [entry.record.name, str(entry.record.role)]
            state.add_metric(values, _BREAKER.get(entry.breaker.state, 0))
            opened.add_metric(values, entry.breaker.opened)
        yield state
        yield opened

    def _of_workers(self) -> Iterator[Metric]:
        core = self._core
        yield GaugeMetricFamily(
            "twinpool_requests_in_flight", "Choices that have not ended", value=core.requests.in_flight
        )
        yield GaugeMetricFamily("twinpool_requests_waiting", "Choices waiting for workers", value=core.requests.waiting)
        serving = GaugeMetricFamily("twinpool_workers_serving", "Workers that take requests", labels=["role"])
        for role in core.workers.roles:
            serving.add_metric([role], len(core.serving(role)))
        yield serving
        local = CounterMetricFamily(
            "twinpool_local_prompts", "Attempts whose prompt a decode worker was given to compute", labels=["reason"]
        )
        for reason in LocalReason:
            local.add_metric([reason], core.counts.local_prompts[reason])
        yield local
        load = GaugeMetricFamily(
            "twinpool_worker_load",
            "Prompt tokens (prefill), sequences (decode), or both in flight",
            labels=["worker", "role"],
        )
        free = GaugeMetricFamily(
            "twinpool_worker_pages_free", "Free pages, as last reported", labels=["worker", "role"]
        )
        for entry in core.workers:
            labels = [entry.record.name, str(entry.record.role)]
            load.add_metric(labels, entry.load)
            free.add_metric(labels, entry.status.pages_free)
        yield load
        yield free
        yield from self._of_breakers()
        yield from tier_metrics(core.workers)
        yield from link_metrics(core.workers)
        yield from draft_metrics(core.workers)
        yield from verification_metrics(core.damage, core.audits, self._watch, self._model)
