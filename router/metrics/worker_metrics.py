"""Prometheus metrics of the workers as this router sees them: by their last heartbeats, and by its own books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.messages.worker_status import CPU_SECONDS, GPU_UTILIZATION
from twinpool.router.core.router_core import RouterCore
from twinpool.router.state.circuit_breaker import CircuitState

STATES = ("starting", "ready", "draining", "left", "dead")
_BREAKER = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}
_LABELS = ("worker", "role")


def worker_metrics(core: RouterCore) -> Iterator[Metric]:
    """Yield the families, with a sample for each worker that the controller knows."""
    yield from _by_role(core)
    yield from _states(core)
    yield from _work(core)
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
    yield from (requests, booked, pending, outgoing, steps, preemptions)


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
