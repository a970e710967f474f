"""Prometheus metrics of the tiers of the workers' caches, from the counters of the workers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.router.state.worker_table import WorkerEntry

_LABELS = ("worker", "role")
_HITS = {"device": "hit_tokens_device", "host": "hit_tokens_host", "storage": "hit_tokens_storage"}
_ENDED = {"resumed": "resumptions", "recomputed": "recomputed"}
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
    workers = list(workers)
    yield from _pages(workers)
    yield from _traffic(workers)
    yield from _retractions(workers)


def _pages(workers: list[WorkerEntry]) -> Iterator[Metric]:
    labels = [*_LABELS, "tier"]
    total_pages = GaugeMetricFamily("twinpool_kv_capacity_pages", "Pages that a tier can hold", labels=labels)
    used = GaugeMetricFamily(
        "twinpool_kv_used_pages", "Pages in use: on the device those that no prompt may have now", labels=labels
    )
    cached = GaugeMetricFamily("twinpool_kv_cached_pages", "Pages that later prompts may share", labels=labels)
    usage = GaugeMetricFamily("twinpool_kv_usage_ratio", "Pages in use, of those that the tier can hold", labels=labels)
    for entry in workers:
        names, status, counters = _names(entry), entry.status, entry.status.counters
        tiers = {"device": (status.pages_total, status.pages_total - status.pages_free)} if status.pages_total else {}
        if "host_pages_total" in counters:
            tiers["host"] = int(counters["host_pages_total"]), int(counters.get("host_pages_used", 0))
        for tier, (total, taken) in tiers.items():
            total_pages.add_metric([*names, tier], total)
            used.add_metric([*names, tier], taken)
            usage.add_metric([*names, tier], taken / total if total else 0.0)
        for tier, key in (("device", "device_pages_kept"), ("host", "host_pages_used")):
            if key in counters:
                cached.add_metric([*names, tier], counters[key])
    yield from (total_pages, used, cached, usage)


def _traffic(workers: list[WorkerEntry]) -> Iterator[Metric]:
    hits = CounterMetricFamily(
        "twinpool_cache_hit_tokens", "Prompt tokens found in a worker's cache", labels=[*_LABELS, "tier"]
    )
    moves = CounterMetricFamily("twinpool_cache_moved_pages", "What became of pages", labels=[*_LABELS, "tier", "what"])
    for entry in workers:
        names, counters = _names(entry), entry.status.counters
        for tier, key in _HITS.items():
            if key in counters:
                hits.add_metric([*names, tier], counters[key])
        for (tier, what), key in _MOVES.items():
            if key in counters:
                moves.add_metric([*names, tier, what], counters[key])
    yield hits
    yield moves


def _retractions(workers: list[WorkerEntry]) -> Iterator[Metric]:
    left = CounterMetricFamily("twinpool_retractions", "Requests that left decode's device for others", labels=_LABELS)
    ended = CounterMetricFamily(
        "twinpool_retractions_ended", "Those that went on: from a copy, or computed again", labels=[*_LABELS, "outcome"]
    )
    copied = CounterMetricFamily(
        "twinpool_retracted_bytes", "State copied to host memory and back for them", labels=[*_LABELS, "way"]
    )
    away = GaugeMetricFamily("twinpool_requests_retracted", "Requests that are off decode's device", labels=_LABELS)
    for entry in workers:
        names, counters = _names(entry), entry.status.counters
        if "retractions" in counters:
            left.add_metric(names, counters["retractions"])
        for outcome, key in _ENDED.items():
            if key in counters:
                ended.add_metric([*names, outcome], counters[key])
        for way, key in _RETRACTED_BYTES.items():
            if key in counters:
                copied.add_metric([*names, way], counters[key])
        if "retracted" in counters:
            away.add_metric(names, counters["retracted"])
    yield from (left, ended, copied, away)


def _names(entry: WorkerEntry) -> list[str]:
    return [str(entry.record.name), str(entry.record.role)]
