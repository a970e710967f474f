"""Prometheus metrics of the links that pages take from worker to worker, from the counters of their last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.state.worker_table import WorkerEntry

_COUNTERS = {
    "writes": ("twinpool_link_writes", "Writes of pages that a worker sent to another"),
    "bytes": ("twinpool_link_bytes", "Bytes of pages that a worker sent to another"),
    "busy_s": ("twinpool_link_busy_seconds", "Seconds in which a worker was sending pages to another"),
    "waited_s": ("twinpool_link_waited_seconds", "Seconds from the post of each write until it had landed, summed"),
    "opened": ("twinpool_link_opened", "Connections for pages that were opened; all but the first ones are retries"),
}


def link_metrics(workers: Iterable[WorkerEntry]) -> Iterator[Metric]:
    """Yield the families, with a sample for each link between workers that are there."""
    labels = ["worker", "to"]
    families = {what: CounterMetricFamily(*named, labels=labels) for what, named in _COUNTERS.items()}
    under_way = GaugeMetricFamily("twinpool_link_under_way", "Writes of pages that are under way", labels=labels)
    for entry in workers:
        for key, value in entry.status.counters.items():
            what, _, to = key.removeprefix("link_").partition(":")
            if not key.startswith("link_") or not to:
                continue
            if what in families:
                families[what].add_metric([str(entry.record.name), to], value)
            elif what == "under_way":
                under_way.add_metric([str(entry.record.name), to], value)
    yield from families.values()
    yield under_way
