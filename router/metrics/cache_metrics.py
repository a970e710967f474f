"""Prometheus metrics of the tiers of the workers' caches, from the counters of the workers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.state.worker_table import WorkerEntry

_HITS = {"device": "hit_tokens_device", "host": "hit_tokens_host", "storage": "hit_tokens_storage"}
_PAGES = {
    ("device", "kept"): "device_pages_kept",
    ("host", "kept"): "host_pages_used",
    ("host", "total"): "host_pages_total",
}
_RETRACTED = ("retractions", "resumptions", "recomputed")
_RETRACTED_BYTES = {"out": "retracted_bytes", "back": "resumed_bytes"}
_MOVES = {
    ("host", "saved"): "pages_saved",
    ("host", "left_out"): "saves_left_out",
    ("device", "loaded"): "pages_loaded",
    ("device", "evicted"): "pages_evicted",
    ("storage", "stored"): "pages_stored",
    ("storage", "failed"): "stores_failed",
    ("storage", "missed"): "stores_missed",
    ("host", "prefetched"): "pages_prefetched",
}


def tier_metrics(workers: Iterable[WorkerEntry]) -> Iterator[Metric]:
    """Yield the families, with a sample for each counter that a worker reports: none for tiers that it lacks."""
    hits = CounterMetricFamily(
        "twinpool_cache_hit_tokens", "Prompt tokens found in a worker's cache", labels=["worker", "role", "tier"]
    )
    moves = CounterMetricFamily(
        "twinpool_cache_moved_pages", "What became of pages", labels=["worker", "role", "tier", "what"]
    )
    pages = GaugeMetricFamily("twinpool_cache_pages", "Pages of a tier", labels=["worker", "role", "tier", "what"])
    retracted = CounterMetricFamily(
        "twinpool_retracted_requests",
        "Requests that left decode's device for others",
        labels=["worker", "role", "what"],
    )
    retracted_bytes = CounterMetricFamily(
        "twinpool_retracted_bytes", "State copied to host memory and back for them", labels=["worker", "role", "way"]
    )
    away = GaugeMetricFamily(
        "twinpool_requests_retracted_now", "Requests that are off decode's device", labels=["worker", "role"]
    )
    for entry in workers:
        labels, counters = [str(entry.record.name), str(entry.record.role)], entry.status.counters
        for tier, key in _HITS.items():
            if key in counters:
                hits.add_metric([*labels, tier], counters[key])
        for (tier, what), key in _MOVES.items():
            if key in counters:
                moves.add_metric([*labels, tier, what], counters[key])
        for (tier, what), key in _PAGES.items():
            if key in counters:
                pages.add_metric([*labels, tier, what], counters[key])
        for key in _RETRACTED:
            if key in counters:
                retracted.add_metric([*labels, key], counters[key])
        for way, key in _RETRACTED_BYTES.items():
            if key in counters:
                retracted_bytes.add_metric([*labels, way], counters[key])
        if "retracted" in counters:
            away.add_metric(labels, counters["retracted"])
    yield from (hits, moves, pages, retracted, retracted_bytes, away)
