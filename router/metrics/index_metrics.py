"""Prometheus metrics of the KV index, as this router reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock
from twinpool.router.kv_indexer.told_prefixes import ToldPrefixes


def index_metrics(told: ToldPrefixes, clock: Clock) -> Iterator[Metric]:
    """Yield the families; those of the table only while there is one that is believed."""
    fresh = told.fresh(clock.now())
    yield GaugeMetricFamily("twinpool_kv_index_up", "1 while the KV index is believed", value=int(fresh))
    if not fresh or told.memory is None:
        return
    header, slots = told.memory.header, told.memory.slots
    live = int((slots["live"] != 0).sum())
    yield GaugeMetricFamily("twinpool_kv_index_workers", "Workers whose caches are known in full", value=live)
    yield GaugeMetricFamily(
        "twinpool_kv_index_entries", "Pages in the KV index, each once", value=int(header["entries"][0])
    )
    yield CounterMetricFamily(
        "twinpool_kv_index_evicted", "Pages that gave way as the KV index was full", value=int(header["evicted"][0])
    )
    yield CounterMetricFamily(
        "twinpool_kv_index_crowded",
        "Holders of pages that were left out as the KV index had no room for another set of them",
        value=int(header["crowded"][0]),
    )
