"""Prometheus metrics of the links that pages take from worker to worker, from the counters of their last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.router.state.worker_table import WorkerEntry

_COUNTERS = {
    "writes": ("twinpool_link_writes", "Writes of pages that a worker sent to another"),
    "bytes": ("twinpool_link_bytes", "Bytes of pages that a worker sent to another"),
    "busy_s": ("twinpool_link_busy_seconds", "Seconds in which a worker was sending pages to another"),
    "waited_s": ("twinpool_link_waited_seconds", "Seconds from the post of each write until it had landed, summed"),
    "opened": ("twinpool_link_opened", "Connections for pages that were opened; all but the first ones are retries"),
}
_GAUGES = {
    "under_way": ("twinpool_link_under_way", "Writes that are under way, and those that wait"),
    "waiting": ("twinpool_link_waiting", "Writes that wait until fewer bytes are under way to the same worker"),
    "in_flight_bytes": ("twinpool_link_in_flight_bytes", "Bytes of pages that are under way"),
}
_PLANE = "plane_"
MAX_LINKS = 1024
"""With more links than this, those of each worker are summed into one sample, with an empty `to`: links are as many as
prefill workers times decode workers."""


def link_metrics(workers: Iterable[WorkerEntry]) -> Iterator[Metric]:
    """Yield the families, with a sample for each link between workers that are there, or for each worker."""
    workers = list(workers)
    summed = sum(key.startswith("link_writes:") for entry in workers for key in entry.status.counters) > MAX_LINKS
    labels = ["worker", "to"]
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        **{what: CounterMetricFamily(*named, labels=labels) for what, named in _COUNTERS.items()},
        **{what: GaugeMetricFamily(*named, labels=labels) for what, named in _GAUGES.items()},
    }
    planes = GaugeMetricFamily(
        "twinpool_link_info", "1, by the data plane that a link takes", labels=[*labels, "plane"]
    )
    for entry in workers:
        sums: dict[str, float] = {}
        for key, value in entry.status.counters.items():
            what, _, to = key.removeprefix("link_").partition(":")
            if not key.startswith("link_") or not to:
                continue
            if what in families and summed:
                sums[what] = sums.get(what, 0.0) + value
            elif what in families:
                families[what].add_metric([str(entry.record.name), to], value)
            elif what.startswith(_PLANE) and not summed:
                planes.add_metric([str(entry.record.name), to, what.removeprefix(_PLANE)], value)
        for what, value in sums.items():
            families[what].add_metric([str(entry.record.name), ""], value)
    yield from families.values()
    yield planes
