"""Prometheus metrics of drafts, from the counters of the decode workers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from twinpool.router.state.worker_table import WorkerEntry

_FAMILIES = {
    "tokens_drafted": ("twinpool_draft_tokens", "Tokens that were drafted"),
    "drafts_accepted": ("twinpool_draft_tokens_accepted", "Drafted tokens that were drawn"),
}


def draft_metrics(workers: Iterable[WorkerEntry]) -> Iterator[Metric]:
    """Yield the families, with samples for each worker that runs decode."""
    families = {key: CounterMetricFamily(*named, labels=["worker"]) for key, named in _FAMILIES.items()}
    for entry in workers:
        for key, family in families.items():
            if key in entry.status.counters:
                family.add_metric([str(entry.record.name)], entry.status.counters[key])
    yield from families.values()
