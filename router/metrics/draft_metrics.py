"""Prometheus metrics of drafts, from the counters of the decode workers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from router.state.worker_table import WorkerEntry

_WHAT = {"made": "tokens_drafted", "accepted": "drafts_accepted"}


def draft_metrics(workers: Iterable[WorkerEntry]) -> Iterator[Metric]:
    """Yield the family, with samples for each worker that runs decode."""
    drafts = CounterMetricFamily(
        "twinpool_draft_tokens",
        "Tokens that were drafted, and those of them that were drawn",
        labels=["worker", "what"],
    )
    for entry in workers:
        for what, key in _WHAT.items():
            if key in entry.status.counters:
                drafts.add_metric([str(entry.record.name), what], entry.status.counters[key])
    yield drafts
