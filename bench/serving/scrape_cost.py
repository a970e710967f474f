"""python -m bench.serving.scrape_cost [--workers 4,100,1000]: what a scrape of one router costs, by its workers.

Fake workers with the counters of real ones; each prefill worker has a link to each decode worker. For each size: the
lines of a scrape, its seconds, and the longest that the event loop stood still meanwhile, which is what streams feel.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time

from tests.router.fake_worker import FakeCluster
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.router.core.router_core import RouterCore
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics

COUNTERS = (
    "preemptions", "hit_tokens_device", "hit_tokens_host", "hit_tokens_storage", "pages_saved", "pages_loaded",
    "pages_evicted", "pages_stored", "stores_failed", "stores_missed", "saves_left_out", "device_pages_kept",
    "host_pages_used", "host_pages_total", "retractions", "resumptions", "recomputed", "retracted_bytes",
    "resumed_bytes", "retracted", "damage_logits", "stale_pages", "tokens_drafted", "drafts_accepted",
)  # fmt: skip
LINK = ("writes", "bytes", "busy_s", "waited_s", "opened", "under_way", "waiting", "in_flight_bytes", "plane_shm")


def metrics_of(workers: int) -> PrometheusMetrics:
    cluster = FakeCluster(workers // 2, workers - workers // 2)
    peers = [name for name in cluster.workers if name.startswith("decode")]
    links = {f"link_{what}:{peer}": 1.0 for what in LINK for peer in peers}
    for name, worker in cluster.workers.items():
        worker.counters = dict.fromkeys(COUNTERS, 1.0) | (links if name.startswith("prefill") else {})
    core = RouterCore(RouterConfig(), ManualClock(1.0), map(str, itertools.count()).__next__)
    core.on_view(cluster.views())
    return PrometheusMetrics(core, "shm", model="demo")


async def measure(metrics: PrometheusMetrics) -> tuple[int, float, float]:
    """Return the lines of a scrape, its seconds, and the longest pause of the loop meanwhile."""
    await metrics.scrapes.answer("")  # what is done once
    task = asyncio.ensure_future(metrics.scrapes.answer(""))
    began = last = time.perf_counter()
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    text, _ = task.result()
    return text.count(b"\n"), last - began, longest


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="bench.serving.scrape_cost", description=__doc__)
    parser.add_argument("--workers", default="4,100,1000", help="numbers of workers, separated by commas")
    for workers in map(int, parser.parse_args().workers.split(",")):
        lines, seconds, longest = asyncio.run(measure(metrics_of(workers)))
        print(f"{workers:5} workers: {lines:6} lines in {seconds:6.3f} s; the loop stood still {1000 * longest:.0f} ms")


if __name__ == "__main__":
    main()
