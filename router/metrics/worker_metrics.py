"""Prometheus metrics of the cluster as this router sees it.

Those of workers are by their last heartbeats and by this router's own books; those of the tiers of their caches, their
links and their drafts by the counters of the last heartbeats; those of the KV index as this router reads it; those of
the controllers as it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.contracts.messages.worker_status import CPU_SECONDS, GPU_UTILIZATION
from twinpool.router.core.router_core import RouterCore
from twinpool.router.kv_indexer.holder_table import KVIndexReader
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.state.worker_table import WorkerEntry, weights_version

STATES = ("starting", "ready", "draining", "left", "dead")
_BREAKER = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}
_LABELS = ("worker", "role")


def worker_metrics(core: RouterCore) -> Iterator[Metric]:
    """Yield the families, with a sample for each worker that the controller knows."""
    yield from _by_role(core)
    yield from _states(core)
    yield from _work(core)
    yield from _shared_steps(core)
    yield from _processors(core)
    yield from _breakers(core)


def _by_role(core: RouterCore) -> Iterator[Metric]:
    serving = GaugeMetricFamily("twinpool_workers_serving", "Workers that take requests", labels=["role"])
    for role in core.workers.roles:
        serving.add_metric([role], len(core.serving(role)))
    yield serving
    workers = GaugeMetricFamily("twinpool_workers", "Workers by state", labels=["role", "state"])
    found = Counter((str(e.record.role), e.status.state) for e in core.workers)
    roles = dict.fromkeys([*map(str, core.workers.roles), *(role for role, _ in sorted(found))])
    for role_name in roles:
        for state in STATES:
            workers.add_metric([role_name, state], found[role_name, state])
    yield workers


def _states(core: RouterCore) -> Iterator[Metric]:
    state = GaugeMetricFamily("twinpool_worker_state", "1, by the worker's state", labels=[*_LABELS, "state"])
    starts = CounterMetricFamily("twinpool_worker_starts", "Times that the worker has started", labels=_LABELS)
    stalled = GaugeMetricFamily(
        "twinpool_worker_stalled_seconds",
        "Since its loop made progress while it had work; 0 while all is well",
        labels=_LABELS,
    )
    longest = GaugeMetricFamily(
        "twinpool_worker_longest_step_seconds", "The longest of its latest steps", labels=_LABELS
    )
    for entry in core.workers:
        labels = [str(entry.record.name), str(entry.record.role)]
        state.add_metric([*labels, entry.status.state], 1)
        starts.add_metric(labels, entry.record.incarnation)
        stalled.add_metric(labels, entry.status.stalled_s)
        longest.add_metric(labels, entry.status.longest_step_s)
    yield from (state, starts, stalled, longest)


def _work(core: RouterCore) -> Iterator[Metric]:
    requests = GaugeMetricFamily(
        "twinpool_worker_requests", "Requests that the worker has, of all routers", labels=[*_LABELS, "state"]
    )
    booked = GaugeMetricFamily(
        "twinpool_worker_booked_requests", "Requests that this router has booked there", labels=_LABELS
    )
    pending = GaugeMetricFamily(
        "twinpool_worker_pending_prompt_tokens", "Prompt tokens that it has still to compute", labels=_LABELS
    )
    outgoing = GaugeMetricFamily(
        "twinpool_worker_outgoing_handovers", "Hand-overs to others whose pages it still holds", labels=_LABELS
    )
    steps = CounterMetricFamily("twinpool_worker_steps", "Steps that the worker has made", labels=_LABELS)
    preemptions = CounterMetricFamily(
        "twinpool_preemptions", "Prompts that gave their pages up to others and began anew", labels=_LABELS
    )
    images = CounterMetricFamily(
        "twinpool_images",
        "Images that a worker has computed, and how often a later step took what it kept of one (`reused`)",
        labels=[*_LABELS, "outcome"],
    )
    for entry in core.workers:
        labels, status = [str(entry.record.name), str(entry.record.role)], entry.status
        requests.add_metric([*labels, "running"], status.running)
        requests.add_metric([*labels, "waiting"], status.waiting)
        booked.add_metric(labels, len(entry.requests))
        pending.add_metric(labels, status.prompt_tokens)
        outgoing.add_metric(labels, status.outgoing)
        steps.add_metric(labels, status.steps)
        if "preemptions" in status.counters:
            preemptions.add_metric(labels, status.counters["preemptions"])
        for outcome in ("computed", "reused"):
            if (count := status.counters.get(f"pictures_{outcome}")) is not None:
                images.add_metric([*labels, outcome], count)
    yield from (requests, booked, pending, outgoing, steps, preemptions, images)


def _shared_steps(core: RouterCore) -> Iterator[Metric]:
    """Of workers that share their experts."""
    steps = CounterMetricFamily(
        "twinpool_worker_shared_steps",
        "Steps that the worker took with those that it shares its experts with",
        labels=[*_LABELS, "rows"],
    )
    idle_rows = CounterMetricFamily(
        "twinpool_worker_shared_steps_idle_rows",
        "Rows that the busiest of them had more than the worker in these steps",
        labels=_LABELS,
    )
    for entry in core.workers:
        labels, counters = [str(entry.record.name), str(entry.record.role)], entry.status.counters
        if "dp_steps" in counters:
            idle = counters.get("dp_idle_steps", 0.0)
            steps.add_metric([*labels, "some"], counters["dp_steps"] - idle)
            steps.add_metric([*labels, "none"], idle)
            idle_rows.add_metric(labels, counters.get("dp_idle_rows", 0.0))
    yield from (steps, idle_rows)


def _processors(core: RouterCore) -> Iterator[Metric]:
    cpu = CounterMetricFamily(
        "twinpool_worker_cpu_seconds", "Processor time of the worker's process, of its first rank", labels=_LABELS
    )
    gpu = GaugeMetricFamily(
        "twinpool_worker_gpu_utilization",
        "Share of the driver's last sampling period in which kernels ran on the worker's GPU",
        labels=_LABELS,
    )
    for entry in core.workers:
        labels, counters = [str(entry.record.name), str(entry.record.role)], entry.status.counters
        if (seconds := counters.get(CPU_SECONDS)) is not None:
            cpu.add_metric(labels, seconds)
        if (used := counters.get(GPU_UTILIZATION)) is not None:
            gpu.add_metric(labels, used)
    yield from (cpu, gpu)


def _breakers(core: RouterCore) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "twinpool_breaker_state", "Circuit breaker: 0 closed, 1 half-open, 2 open", labels=_LABELS
    )
    opened = CounterMetricFamily("twinpool_breaker_opened", "Times that the circuit breaker has opened", labels=_LABELS)
    for entry in core.workers:
        labels = [str(entry.record.name), str(entry.record.role)]
        state.add_metric(labels, _BREAKER.get(entry.breaker.state, 0))
        opened.add_metric(labels, entry.breaker.opened)
    yield state
    yield opened


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


def index_metrics(told: KVIndexReader, clock: Clock) -> Iterator[Metric]:
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


def weights_metrics(core: RouterCore) -> Iterator[Metric]:
    """Yield the families of what the cluster serves."""
    served, version = core.workers.served, weights_version(core.workers)
    info = GaugeMetricFamily("twinpool_weights_info", "1, by the version of the weights", labels=["version"])
    if version:
        info.add_metric([version], 1)
    yield info
    text = "Changes of weights, and flushes of all caches, since the cluster began"
    yield CounterMetricFamily("twinpool_weights_changes", text, value=served.weights.number)
    yield GaugeMetricFamily("twinpool_weights_behind", "Workers that have yet to change", value=served.behind)
    yield GaugeMetricFamily("twinpool_cluster_paused", "1 while workers make no steps", value=int(served.paused))
    yield GaugeMetricFamily("twinpool_cluster_asleep", "The level of sleep; 0 while awake", value=served.asleep)


def control_plane_metrics(reachable: bool, plane: ControlPlane | None) -> Iterator[Metric]:
    """Yield the families; but for the first only where controllers say who leads."""
    text = "1 while a controller tells this router of the workers"
    yield GaugeMetricFamily("twinpool_controller_up", text, value=int(reachable))
    if plane is None:
        return
    leader = GaugeMetricFamily("twinpool_controller_info", "1, by where the leader is reached", labels=["leader"])
    leader.add_metric([plane.leader], 1)
    yield leader
    yield CounterMetricFamily("twinpool_controller_terms", "Controllers that have led so far", value=plane.term)
    yield GaugeMetricFamily("twinpool_controller_standbys", "Controllers that wait to lead", value=len(plane.standbys))


_LINK_COUNTERS = {
    "writes": ("twinpool_link_writes", "Writes of pages that a worker sent to another"),
    "bytes": ("twinpool_link_bytes", "Bytes of pages that a worker sent to another"),
    "busy_s": ("twinpool_link_busy_seconds", "Seconds in which a worker was sending pages to another"),
    "waited_s": ("twinpool_link_waited_seconds", "Seconds from the post of each write until it had landed, summed"),
    "opened": ("twinpool_link_opened", "Connections for pages that were opened; all but the first ones are retries"),
}
_LINK_GAUGES = {
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
        **{what: CounterMetricFamily(*named, labels=labels) for what, named in _LINK_COUNTERS.items()},
        **{what: GaugeMetricFamily(*named, labels=labels) for what, named in _LINK_GAUGES.items()},
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


_DRAFTS = {
    "tokens_drafted": ("twinpool_draft_tokens", "Tokens that were drafted"),
    "drafts_accepted": ("twinpool_draft_tokens_accepted", "Drafted tokens that were drawn"),
    "rows_drafted": (
        "twinpool_draft_rows",
        "Rows of steps that had drafts: each brought one token more than were drawn",
    ),
}
_DRAFTS_BY_KIND = {
    "draft_steps_": (
        "twinpool_draft_steps",
        "Steps by what drafts were worth in them: `paying`, `without` where none paid, `tried` where some had one",
        "kind",
    ),
    "drafted_at_": ("twinpool_draft_place_tokens", "Tokens that were drafted, by their place in a draft", "place"),
    "accepted_at_": (
        "twinpool_draft_place_tokens_accepted",
        "Drafted tokens that were drawn, by their place in a draft",
        "place",
    ),
}


def draft_metrics(workers: Iterable[WorkerEntry]) -> Iterator[Metric]:
    """Yield the families, with samples for each worker that runs decode."""
    families = {key: CounterMetricFamily(*named, labels=["worker"]) for key, named in _DRAFTS.items()}
    kinds = {
        key: CounterMetricFamily(name, text, labels=["worker", label])
        for key, (name, text, label) in _DRAFTS_BY_KIND.items()
    }
    gain = GaugeMetricFamily(
        "twinpool_draft_gain",
        "Tokens a second that are expected of the latest step with drafts, over those without; 1: none",
        labels=["worker"],
    )
    for entry in workers:
        for key, family in families.items():
            if key in entry.status.counters:
                family.add_metric([str(entry.record.name)], entry.status.counters[key])
        for counter, value in entry.status.counters.items():
            at = counter.rfind("_") + 1
            if counter[:at] in kinds:
                kinds[counter[:at]].add_metric([str(entry.record.name), counter[at:]], value)
        if "draft_gain" in entry.status.counters:
            gain.add_metric([str(entry.record.name)], entry.status.counters["draft_gain"])
    yield from (*families.values(), *kinds.values(), gain)
