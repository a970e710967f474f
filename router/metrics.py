"""What Prometheus sees. Counts that the brain or the workers keep are read when scraped, not copied per token."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.clock import Clock
from contracts.ids import Role
from contracts.messages import Progress
from router.brain import Brain
from router.choice import Choice

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One router's registry."""

    def __init__(self, brain: Brain, plane: str, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._clock = clock
        self._computed = Counter(
            "twinpool_prompt_tokens_computed",
            "Prompt tokens whose state a worker computed",
            ["worker", "role"],
            registry=r,
        )
        self._bytes = Counter(
            "twinpool_transfer_bytes", "Bytes of pages received and verified by decode", ["plane"], registry=r
        )
        self._bytes_here = self._bytes.labels(plane)
        self._cached = Counter("twinpool_prompt_tokens_cached", "Prompt tokens found in prefill's cache", registry=r)
        self._generated = Counter("twinpool_generated_tokens", "Tokens delivered to clients' answers", registry=r)
        self._ttft = Histogram(
            "twinpool_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=TTFT_BUCKETS_S,
            registry=r,
        )
        self._itl = Histogram(
            "twinpool_inter_token_seconds", "Between tokens of an answer", buckets=ITL_BUCKETS_S, registry=r
        )
        self._e2e = Histogram(
            "twinpool_request_seconds", "From arrival to the end of an answer", buckets=E2E_BUCKETS_S, registry=r
        )
        self.refused_full = Counter("twinpool_refused_full", "Requests refused because the queue was full", registry=r)
        self.disconnects = Counter("twinpool_client_disconnects", "Requests whose client left", registry=r)
        self.slow_clients = Counter("twinpool_slow_clients", "Requests cancelled: client took too long", registry=r)
        r.register(_BrainCollector(brain))

    def report(self, event: Progress) -> None:
        """Count what a leg says it did, whether or not its request still runs."""
        self._computed.labels(event.worker, str(event.role)).inc(event.computed_tokens)
        if event.role is Role.PREFILL:
            self._cached.inc(event.cached_tokens)
        else:
            self._bytes_here.inc(event.transfer_bytes)

    def tokens(self, choice: Choice, count: int, now: float) -> None:
        self._generated.inc(count)
        if not choice.first_at:
            choice.first_at = now
            self._ttft.observe(now - choice.request.arrived + choice.tokenise_s)
        else:
            self._itl.observe(now - choice.last_at)
        choice.last_at = now

    def ended(self, choice: Choice) -> None:
        if choice.error is None:
            self._e2e.observe(choice.ended_at - choice.request.arrived + choice.tokenise_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _BrainCollector(Collector):
    """The brain's counts as metrics."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        brain, counts = self._brain, self._brain.counts
        for name, text, value in (
            ("twinpool_requests_submitted", "Choices admitted", counts.submitted),
            ("twinpool_requests_ended", "Choices that ended in their full answer", counts.ended),
            ("twinpool_requests_failed", "Choices that ended in an error", counts.failed),
            ("twinpool_requests_cancelled", "Choices taken back", counts.cancelled),
            ("twinpool_replays", "Attempts after a worker was lost or failed", counts.replays),
            ("twinpool_drain_refusals", "Attempts that a draining worker refused", counts.refusals),
            (
                "twinpool_damaged",
                "Hand-overs whose bytes did not match their tag, detected and recomputed",
                counts.damaged,
            ),
            ("twinpool_fallbacks", "Requests served without the hand-over that they were due", counts.fallbacks),
            ("twinpool_late_events", "Events of ended requests or earlier attempts, dropped", counts.late_events),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily("twinpool_requests_in_house", "Choices that have not ended", value=brain.in_house)
        yield GaugeMetricFamily("twinpool_requests_waiting", "Choices waiting for workers", value=brain.waiting)
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        serving = GaugeMetricFamily("twinpool_workers_serving", "Workers that take requests", labels=["role"])
        for role in Role:
            serving.add_metric([role], len(self._brain.serving(role)))
        yield serving
        load = GaugeMetricFamily(
            "twinpool_worker_load", "Prompt tokens (prefill) or sequences (decode) in flight", labels=["worker", "role"]
        )
        free = GaugeMetricFamily(
            "twinpool_worker_pages_free", "Free pages, as last reported", labels=["worker", "role"]
        )
        for entry in self._brain.workers:
            labels = [entry.record.name, str(entry.record.role)]
            load.add_metric(labels, entry.load)
            free.add_metric(labels, entry.status.pages_free)
        yield load
        yield free
