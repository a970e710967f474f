"""The router's Prometheus metrics. Counting is plain arithmetic on the event loop; families are made at each scrape.

The library's own counters and histograms take a lock each time, which for every token would cost as much as all other
work of the router on it. docs/metrics.md, which is made from here, lists every family.

Scrapes: the router's metrics are collected in pieces between other work, and written in a thread. With a thousand
workers a scrape is ten thousands of lines. Made in one go on the event loop it would stop every stream for seconds, and
whoever asks for /metrics again and again would stop them for good. So one is made at a time, and all who come while it
is made share the next.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, cast

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector

from twinpool.contracts.build_id import build_id, package_version
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.damage import DamageSite
from twinpool.contracts.messages.worker_status import DamageTotals
from twinpool.router.core.router_core import RouterCore
from twinpool.router.core.routing_policies import LocalReason
from twinpool.router.metrics.request_tally import RequestTally
from twinpool.router.metrics.vllm_aliases import VllmAliases
from twinpool.router.metrics.worker_metrics import (
    draft_metrics,
    link_metrics,
    tier_metrics,
    weights_metrics,
    worker_metrics,
)
from twinpool.router.verification.audits import AuditResult, Audits
from twinpool.router.verification.stream_watch import FlagReason, StreamWatch

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_KIND = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_KIND = "text/plain; version=0.0.4; charset=utf-8"
# Both ask nothing of a registry but `collect`.
_plain = cast(Callable[[Any], bytes], generate_latest)
_encode = cast(Callable[[Any], bytes], partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8))


class Families(Protocol):
    """What has metrics to write."""

    def collect(self) -> Iterable[Metric]: ...


def wants_openmetrics(accept: str) -> bool:
    """Return whether a scrape would rather have OpenMetrics; `accept`: its header, which may be empty."""
    wanted = {kind: weight for kind, weight in map(_weighed, accept.split(",")) if kind}
    text = max(wanted.get(kind, 0.0) for kind in ("text/plain", "text/*", "*/*"))
    return wanted.get(OPENMETRICS, 0.0) > 0 and wanted[OPENMETRICS] >= text


def expose(families: Families, *, opened: bool) -> tuple[bytes, str]:
    """Return all metrics and their content type. `opened`: in OpenMetrics, else in Prometheus' text. The library's own
    choice would replace the colon of ``vllm:...`` in OpenMetrics, as if it weren't allowed there."""
    return (_encode(families), OPENMETRICS_KIND) if opened else (_plain(families), TEXT_KIND)


def _weighed(accepted: str) -> tuple[str, float]:
    """Return a media type that is accepted, and its weight from 0 to 1; of a weight that isn't a number 0."""
    kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return kind, float(parameter[2:])
            except ValueError:
                return kind, 0.0
    return kind, 1.0


PIECE_S = 0.002
"""Seconds of collecting after which other work has its turn."""


class Collected:
    """Families that were collected, as what writes them takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def nothing() -> Iterator[Metric]:
    return iter(())


class Scrapes:
    """Answers to scrapes; on one event loop."""

    def __init__(
        self,
        collect: Callable[[], Iterator[Metric]],
        seen: Callable[[], Iterator[Metric]] = nothing,
        join: Callable[[Iterable[Metric]], list[Metric]] = list,
    ) -> None:
        """`collect` yields families on the loop, and holds nothing between two of them that the loop's other work
        changes. `seen` is called on the loop and yields its families in a thread: it reads what doesn't change. `join`
        puts together, in that thread, what they yield."""
        self._collect, self._seen, self._join = collect, seen, join
        self._turn = asyncio.Lock()
        self._next: dict[bool, asyncio.Task[tuple[bytes, str]]] = {}
        """The answers that are not begun yet, by whether they are in OpenMetrics."""

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type, as the header `accept` asks for it."""
        opened = wants_openmetrics(accept)
        task = self._next.get(opened)
        if task is None:
            task = self._next[opened] = asyncio.get_running_loop().create_task(self._make(opened))
        return await asyncio.shield(task)  # A client that leaves takes the answer from nobody else.

    async def _make(self, opened: bool) -> tuple[bytes, str]:
        async with self._turn:
            del self._next[opened]
            families: list[Metric] = []
            seen = self._seen()
            began = time.perf_counter()
            for family in self._collect():
                families.append(family)
                if time.perf_counter() - began > PIECE_S:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
            return await asyncio.to_thread(self._write, families, seen, opened=opened)

    def _write(self, families: list[Metric], seen: Iterator[Metric], *, opened: bool) -> tuple[bytes, str]:
        return expose(Collected(self._join(itertools.chain(families, seen))), opened=opened)


def verification_metrics(damage: DamageTotals, audits: Audits, watch: StreamWatch | None) -> Iterator[Metric]:
    """Yield all families; audit results and reasons of flags that never occurred are there as 0."""
    found = CounterMetricFamily(
        "twinpool_state_damage",
        "State that a check found not to be what it should be; dropped and computed again (an audit's was served)",
        labels=["worker", "role", "where"],
    )
    for sample in damage.samples():
        found.add_metric([sample.worker, sample.role, sample.where], sample.count)
    for (worker, role), count in sorted(audits.counts.damage.items()):
        found.add_metric([worker, role, DamageSite.AUDIT], count)
    yield found
    yield from _of_audits(audits)
    if watch is not None:
        yield from _of_streams(watch)


def _of_audits(audits: Audits) -> Iterator[Metric]:
    counts = audits.counts
    answers = CounterMetricFamily(
        "twinpool_audit_answers", "Answers chosen for an audit, by what became of them", labels=["result"]
    )
    for result in AuditResult:
        answers.add_metric([result], counts.results[result])
    yield answers
    yield CounterMetricFamily("twinpool_audit_tokens", "Tokens of answers drawn again by audits", value=counts.tokens)
    yield CounterMetricFamily(
        "twinpool_audit_damaged_tokens", "Tokens of damaged answers that came out otherwise", value=counts.differing
    )
    yield GaugeMetricFamily(
        "twinpool_audit_damage_ratio",
        "Damaged answers among those with a clear result, since the start",
        value=counts.damage_rate,
    )
    yield GaugeMetricFamily("twinpool_audits_waiting", "Answers that wait for an idle worker", value=audits.queued)


def _of_streams(watch: StreamWatch) -> Iterator[Metric]:
    flagged = CounterMetricFamily("twinpool_streams_flagged", "Streams that look broken, by why", labels=["reason"])
    for why in FlagReason:
        flagged.add_metric([why], watch.flagged[why])
    yield flagged
    yield CounterMetricFamily("twinpool_streams_watched", "Streams watched to their end", value=watch.ended)
    text = "Share of rare tokens in what the model says lately"
    yield GaugeMetricFamily("twinpool_rare_token_ratio", text, value=watch.rare_rate)


class PrometheusMetrics:
    """The metrics of one router; used from its event loop."""

    def __init__(
        self,
        core: RouterCore,
        plane: str,
        watch: StreamWatch | None = None,
        model: str = "",
        config: RouterConfig = RouterConfig(),  # noqa: B008 (frozen)
    ) -> None:
        self._core, self._config = core, config
        self._plane = plane
        self._watch, self._model = watch, model
        self.tally = RequestTally()
        self.refused_full = 0
        self.disconnects = 0
        self.slow_clients = 0
        self.sources: list[Callable[[], Iterator[Metric]]] = []
        """Functions that yield further families at each scrape: of bodies, tenants and readers."""
        self.of_process: list[Callable[[], Iterable[Metric]]] = [ProcessCollector(registry=None).collect]
        """Functions that yield the families of the whole process, of connections too: where it serves several models,
        they are no model's."""
        if config.metrics_aliases == "vllm":
            self.sources.append(VllmAliases(core, self.tally, model).families)
        self.scrapes = Scrapes(self.collect, self.seen)

    @property
    def ttft_slo_s(self) -> float:
        """Seconds to the first token beyond which requests are refused; 0: none."""
        return self._config.ttft_slo_ms / 1000

    # ------------------------------------------------------------ at the scrape

    def collect(self) -> Iterator[Metric]:
        """Yield every family but those of `seen`. Between two of them other work may have its turn."""
        for source in self.of_process:
            yield from source()
        yield from self.of_model()

    def of_model(self) -> Iterator[Metric]:
        """Yield the families of `collect` that are of this router's model."""
        yield from self._of_router()
        yield from self._of_requests()
        yield from self._of_attempts()
        yield from self._of_migrations()
        for source in self.sources:
            yield from source()
        yield from self._of_latencies()
        yield from self._of_legs()
        yield from worker_metrics(self._core)
        yield from weights_metrics(self._core)
        yield from verification_metrics(self._core.damage, self._core.audits, self._watch)

    def seen(self) -> Iterator[Metric]:
        """Return the families of what workers reported last, as they are known now; they may be made in a thread, as a
        report never changes. Of many workers with many links they are the most of a scrape."""
        workers = list(self._core.workers)
        return itertools.chain.from_iterable(family(workers) for family in (tier_metrics, link_metrics, draft_metrics))

    def _of_router(self) -> Iterator[Metric]:
        labels = {"version": package_version(), "build": build_id(), "model": self._model}
        build = GaugeMetricFamily("twinpool_build_info", "1, by what this router runs and serves", labels=list(labels))
        build.add_metric(list(labels.values()), 1)
        yield build
        requests = self._core.requests
        for name, text, value in (
            ("twinpool_requests_in_flight", "Choices that have not ended", requests.in_flight),
            ("twinpool_requests_waiting", "Choices waiting for workers", requests.waiting),
            ("twinpool_requests_limit", "Choices that may be in flight (router.max_queue)", self._config.max_queue),
            (
                "twinpool_stalled_seconds",
                "Since any request advanced while there is work; 0 without work",
                self._core.progress.stalled_s,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _of_requests(self) -> Iterator[Metric]:
        counts, tally = self._core.counts, self.tally
        for name, text, value in (
            ("twinpool_requests_submitted", "Choices admitted", counts.submitted),
            ("twinpool_requests_ended", "Choices that ended in their full answer", counts.ended),
            ("twinpool_requests_failed", "Choices that ended in an error", counts.failed),
            ("twinpool_requests_cancelled", "Choices taken back", counts.cancelled),
            ("twinpool_requests_detached", "Choices left to workers, as their clients may come back", counts.detached),
            ("twinpool_requests_adopted", "Choices that workers had kept and that went on here", counts.adopted),
            (
                "twinpool_requests_refused_falsely",
                "Requests refused as late for which the worker would have had the time, by what it did since",
                counts.refused_falsely,
            ),
            (
                "twinpool_requests_shed",
                "Choices not computed: nothing had begun them when their first token was due",
                counts.shed,
            ),
            ("twinpool_client_disconnects", "Requests whose client left", self.disconnects),
            ("twinpool_slow_clients", "Requests cancelled because their client read too slowly", self.slow_clients),
            ("twinpool_prompt_tokens", "Tokens of prompts that were processed", tally.prompt_tokens),
            ("twinpool_generated_tokens", "Tokens delivered to clients' answers", tally.generated_tokens),
        ):
            yield CounterMetricFamily(name, text, value=value)
        refused = CounterMetricFamily(
            "twinpool_requests_refused",
            "Requests refused: the queue was full, or their first token was predicted to be late",
            labels=["reason"],
        )
        refused.add_metric(["queue_full"], self.refused_full)
        refused.add_metric(["late"], counts.refused_early)
        yield refused
        answers = CounterMetricFamily(
            "twinpool_answers", "Choices that ended, but for those that were taken back", labels=["finish_reason"]
        )
        for reason, count in tally.answers.items():
            answers.add_metric([reason], count)
        yield answers
        ignored = CounterMetricFamily(
            "twinpool_ignored_fields",
            "Fields of requests that had no effect, by name; unknown: such as nobody here knows",
            labels=["field"],
        )
        for field, count in {"unknown": 0, **tally.ignored}.items():
            ignored.add_metric([field], count)
        yield ignored

    def _of_attempts(self) -> Iterator[Metric]:
        counts = self._core.counts
        for name, text, value in (
            ("twinpool_replays", "Attempts after a worker was lost or failed", counts.replays),
            (
                "twinpool_attempts_recomputed",
                "Attempts that decode had no memory for, gone on from their tokens",
                counts.recomputed,
            ),
            ("twinpool_drain_refusals", "Attempts that a draining worker refused", counts.refusals),
            ("twinpool_handovers_damaged", "Hand-overs with damaged bytes, detected and recomputed", counts.damaged),
            ("twinpool_fallbacks", "Legs in which decode computed prompt tokens itself", counts.fallbacks),
            ("twinpool_late_events", "Events of ended requests or earlier attempts, dropped", counts.late_events),
        ):
            yield CounterMetricFamily(name, text, value=value)
        local = CounterMetricFamily(
            "twinpool_local_prompts", "Attempts whose prompt a decode worker was given to compute", labels=["reason"]
        )
        for reason in LocalReason:
            local.add_metric([reason], counts.local_prompts[reason])
        yield local
        placed = CounterMetricFamily(
            "twinpool_placements", "Times that the policy chose a worker", labels=["policy", "worker", "role"]
        )
        for (worker, role), count in sorted(counts.placements.items()):
            placed.add_metric([self._config.policy, worker, role], count)
        yield placed

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

    def _of_latencies(self) -> Iterator[Metric]:
        tally = self.tally
        for name, text, histogram in (
            ("twinpool_time_to_first_token_seconds", "From arrival to the first token", tally.ttft),
            (
                "twinpool_time_per_output_token_seconds",
                "Of an answer, from its first token to its last, by the tokens after the first",
                tally.tpot,
            ),
            (
                "twinpool_inter_token_latency_seconds",
                "Between deliveries of an answer's tokens, of one token each unless several came at once",
                tally.itl,
            ),
            ("twinpool_request_duration_seconds", "From arrival to the end of an answer", tally.duration),
            ("twinpool_request_queue_seconds", "From admission until a worker began the prompt", tally.queue),
            ("twinpool_request_prefill_seconds", "From a prompt's begin to the first token", tally.prefill),
            ("twinpool_request_decode_seconds", "From the first token to the last", tally.decode),
            ("twinpool_request_prompt_tokens", "Tokens of a choice's prompt", tally.prompt_length),
            ("twinpool_request_generated_tokens", "Tokens of a choice's answer", tally.answer_length),
        ):
            yield histogram.family(name, text)

    def _of_legs(self) -> Iterator[Metric]:
        computed = CounterMetricFamily(
            "twinpool_prompt_tokens_computed",
            "Prompt tokens whose state a worker computed",
            labels=["worker", "role"],
        )
        # Workers that have computed nothing have a sample too: a decode worker must visibly stay at 0.
        known = {(str(e.record.name), str(e.record.role)): 0 for e in self._core.workers}
        for labels, value in sorted({**known, **self.tally.computed}.items()):
            computed.add_metric(labels, value)
        yield computed
        yield CounterMetricFamily(
            "twinpool_prompt_tokens_cached", "Prompt tokens found in prefill's cache", value=self.tally.cached.total()
        )
        moved = CounterMetricFamily(
            "twinpool_transfer_bytes", "Bytes of pages received and verified by decode", labels=["plane"]
        )
        moved.add_metric([self._plane], self.tally.transfer_bytes)
        yield moved
