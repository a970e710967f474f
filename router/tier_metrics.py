"""What the tiers of the workers' caches did, as Prometheus sees it: the counters of the workers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.workers import Entry

_HITS = {"device": "hit_tokens_device", "host": "hit_tokens_host", "storage": "hit_tokens_storage"}
_PAGES = {
    ("device", "kept"): "device_pages_kept",
    ("host", "kept"): "host_pages_used",
    ("host", "total"): "host_pages_total",
}
_MOVES = {
    ("host", "saved"): "pages_saved",
    ("host", "left_out"): "saves_left_out",
    ("device", "loaded"): "pages_loaded",
    ("device", "evicted"): "pages_evicted",
    ("storage", "stored"): "pages_stored",
    ("storage", "failed"): "stores_failed",
    ("host", "prefetched"): "pages_prefetched",
}


def tier_metrics(workers: Iterable[Entry]) -> Iterator[Metric]:
    """A sample for each counter that a worker reports; a worker without a tier has none of it."""
    hits = CounterMetricFamily(
        "twinpool_cache_hit_tokens", "Prompt tokens found in a worker's cache", labels=["worker", "role", "tier"]
    )
    moves = CounterMetricFamily(
        "twinpool_cache_moved_pages", "What became of pages", labels=["worker", "role", "tier", "what"]
    )
    pages = GaugeMetricFamily("twinpool_cache_pages", "Pages of a tier", labels=["worker", "role", "tier", "what"])
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
    yield from (hits, moves, pages)
