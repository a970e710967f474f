"""Metrics under vLLM's names, for its dashboards and for autoscalers that look for them; only where they mean the same.

A Twinpool is one model server to whoever scrapes it, so each name has one series, with `model_name` and without vLLM's
`engine`. Times, tokens and ends are this router's own requests'. Running and waiting requests, the use of the KV cache
and preemptions are the workers', whichever router sent them work: with several routers take the greatest, not the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.router.core.router_core import RouterCore
from twinpool.router.metrics.request_tally import RequestTally
from twinpool.router.state.worker_table import GONE, WorkerEntry

_PREEMPTIONS = ("preemptions", "retractions")
"""Counters of workers: prompts that gave their pages up, and requests that left decode's device."""


class WorkerTotal:
    """The sum of some counters over all workers, which no restart of a worker takes anything off.

    What a worker counted between the last look and its end is lost.
    """

    def __init__(self, counters: tuple[str, ...]) -> None:
        self._counters = counters
        self._seen: dict[WorkerName, tuple[Incarnation, float]] = {}
        self._gone = 0.0

    def look(self, workers: Iterable[WorkerEntry]) -> float:
        """Take in the workers' latest counters; returns the sum so far."""
        for entry in workers:
            name, incarnation = entry.record.name, entry.record.incarnation
            value = sum(entry.status.counters.get(counter, 0.0) for counter in self._counters)
            before, known = self._seen.get(name, (incarnation, 0.0))
            if before != incarnation:
                self._gone += known
                known = 0.0
            # A status without counters (of a worker that has ended) takes nothing back.
            self._seen[name] = (incarnation, max(value, known))
        return self._gone + sum(value for _, value in self._seen.values())


class VllmAliases:
    """The families under vLLM's names."""

    def __init__(self, core: RouterCore, tally: RequestTally, model: str) -> None:
        self._core, self._tally, self._labels = core, tally, {"model_name": model}
        self._preemptions = WorkerTotal(_PREEMPTIONS)

    def families(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        running, waiting = running_and_waiting(self._core)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in workers' batches", float(running)),
            ("vllm:num_requests_waiting", "Requests that wait to be processed", float(waiting)),
            ("vllm:kv_cache_usage_perc", "Use of the KV cache of those who decode; 1 is all", _usage(self._core)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        tally = self._tally
        device = tally.cached["device"]
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts that were processed", tally.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", tally.generated_tokens),
            ("vllm:num_preemptions", "Preemptions", self._preemptions.look(self._core.workers)),
            ("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache", tally.looked_up),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache, on the device", device),
            ("vllm:external_prefix_cache_queries", "Tokens looked for off the device", tally.looked_up - device),
            ("vllm:external_prefix_cache_hits", "Tokens found off the device", tally.cached.total() - device),
        ):
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by why", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in (*tally.answers.items(), ("abort", self._core.counts.cancelled)):
            success.add_metric([*self._labels.values(), reason], count)
        yield success

    def _histograms(self) -> Iterator[Metric]:
        tally = self._tally
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Time to first token", tally.ttft),
            ("vllm:inter_token_latency_seconds", "Time between tokens", tally.itl),
            ("vllm:time_per_output_token_seconds", "Time between tokens, by its older name", tally.itl),
            ("vllm:request_time_per_output_token_seconds", "Time of an answer's token after the first", tally.tpot),
            ("vllm:e2e_request_latency_seconds", "Time of a request", tally.duration),
            ("vllm:request_queue_time_seconds", "Time before a request's first batch", tally.queue),
            ("vllm:request_prefill_time_seconds", "Time from the first batch to the first token", tally.prefill),
            ("vllm:request_decode_time_seconds", "Time from the first token to the last", tally.decode),
            ("vllm:request_inference_time_seconds", "Time from the first batch to the last token", tally.inference),
            ("vllm:request_prompt_tokens", "Tokens of a prompt", tally.prompt_length),
            ("vllm:request_generation_tokens", "Tokens of an answer", tally.answer_length),
        ):
            yield histogram.family(name, text, self._labels)


def running_and_waiting(core: RouterCore) -> tuple[int, int]:
    """Return how many requests are in workers' batches, and how many wait for that: each once, though a request is
    known to its prefill and to its decode worker at the same time."""
    running, waiting = 0, core.requests.waiting
    for entry in core.workers:
        if entry.status.state in GONE:
            continue
        running += entry.status.running
        # A decode worker's other waiting requests are computed by prefill, or wait there.
        off_device = int(entry.status.counters.get("retracted", 0))
        waiting += off_device if entry.record.role is Role.DECODE else entry.status.waiting
    return running, waiting


def _usage(core: RouterCore) -> float:
    """Return the share of pages in use of the workers that decode, 0 while none has said."""
    those = [e.status for e in core.workers if e.record.role is not Role.PREFILL and e.status.state not in GONE]
    total = sum(status.pages_total for status in those)
    return 1 - sum(status.pages_free for status in those) / total if total else 0.0
