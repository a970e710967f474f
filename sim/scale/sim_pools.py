"""The pools of a simulated cluster: modelled workers under production's controller and autoscaler.

Workers register, renew their leases as often as the controller says, tell their counters as seldom as real ones, drain
and leave. A worker that drains takes nothing new and ends what it has; nothing migrates, so a drain takes as long as
its longest answer. Starts take `StepCosts.start_s`, and wait while nodes have no place. A worker that changes its role
keeps its process, and with it its place: once it is drained, it is ready again after `StepCosts.role_change_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import KillWorker, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.worker_process.lease_keeper import COUNTERS_S
from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.messages.router_report import LatencyCounts
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.scale.cluster_plan import ClusterPlan
from twinpool.sim.scale.decode_model import DecodeModel
from twinpool.sim.scale.prefill_model import PrefillModel
from twinpool.sim.scale.scale_figures import GapHistogram, RunFigures

NODE = NodePlace("n" * 12, "node")
MAX_POSITIONS = 1 << 20
_READY, _DRAINING = "ready", "draining"


@dataclass(slots=True)
class PendingStart:
    """A start that isn't over."""

    order: StartWorker
    over: float | None = None
    """When it is; None while it waits for a place."""


@dataclass(slots=True, eq=False)
class ModelWorker:
    """One incarnation of a worker. One of `prefill` and `decode` is its model."""

    key: WorkerKey
    role: Role
    prefill: PrefillModel | None
    decode: DecodeModel | None
    renews_at: float
    counters_at: float
    due: float = float("inf")
    """The earliest turn of its model that the caller has entered in its agenda."""
    told: bool = False
    """Whether changes of its cache are on their way to the index."""
    draining: bool = False
    open: int = 0
    """Requests on their way to it, answers on their way from it, and prompts that decode hasn't."""
    sent: dict[WorkerName, int] = field(default_factory=dict)
    """Bytes that it has sent to each other worker, where the plan counts them."""

    @property
    def idle(self) -> bool:
        model = self.prefill or self.decode
        return model is not None and model.idle and not self.open


class SimPools:
    """The workers, and the controller that they have their leases of."""

    def __init__(self, plan: ClusterPlan, clock: Clock, figures: RunFigures) -> None:
        config = plan.config
        self._plan, self._clock, self._figures = plan, clock, figures
        self.core = Controller(clock, config.cluster, MemoryLedger())
        self.core.set_nodes([NODE])
        self.autoscaler = Autoscaler(self.core, clock, config) if config.autoscaling.enabled else None
        self.workers: dict[WorkerKey, ModelWorker] = {}
        self._starting: list[PendingStart] = []
        self._closed: set[WorkerKey] = set()
        """Incarnations that have closed to change their role, and whose processes wait for their next plan."""
        self._turned = clock.now()
        self.on_join: Callable[[ModelWorker], None] = lambda worker: None
        self.on_leave: Callable[[ModelWorker], None] = lambda worker: None

    def begin(self) -> None:
        """Start the workers that there are at first; they are ready at once."""
        for role, count in zip(PAIR, (self._plan.prefill.workers, self._plan.decode.workers), strict=True):
            self.core.pools.add_some(role, count)
        for action in self.core.tick():
            if isinstance(action, StartWorker):
                self._register(action)
        for number, worker in enumerate(self.workers.values()):
            # Workers don't beat together.
            worker.renews_at += number / len(self.workers)
        self._count_sizes()

    def size(self, role: Role) -> int:
        return sum(worker.role is role and not worker.draining for worker in self.workers.values())

    def turn(self, counts: LatencyCounts) -> None:
        """Do what is due of heartbeats, the autoscaler and starts; to be called some times a second. `counts`: what
        routers report of latencies."""
        now = self._clock.now()
        self._figures.worker_s += (now - self._turned) * self._places_taken
        self._turned = now
        for worker in [one for one in self.workers.values() if now >= one.renews_at]:
            self._renew(worker, now)
        if self.autoscaler is not None:
            self.autoscaler.report("router", counts)
            self.autoscaler.tick()
        for action in self.core.tick():
            match action:
                case StartWorker():
                    self._starting.append(PendingStart(action))
                    if (waits := (action.name, action.successor_of)) in self._closed:
                        self._closed.remove(waits)
                        self._begin_start(self._starting[-1], now + self._plan.costs.role_change_s)
                case KillWorker():
                    key = action.name, action.incarnation
                    self._starting = [one for one in self._starting if (one.order.name, one.order.incarnation) != key]
        if self._starting:
            self._go_on_starting(now)

    @property
    def _places_taken(self) -> int:
        return len(self.workers) + sum(one.over is not None for one in self._starting)

    def _begin_start(self, start: PendingStart, over: float) -> None:
        self.core.placed(start.order.name, start.order.incarnation, NODE)
        start.over = over

    def _go_on_starting(self, now: float) -> None:
        """Begin the starts for which there is a place, and end those that are over."""
        places = self._plan.places or float("inf")
        for start in list(self._starting):
            if start.over is not None and now >= start.over:
                self._starting.remove(start)
                self._register(start.order)
                self._count_sizes()
            elif start.over is None and self._places_taken < places:
                self._begin_start(start, now + self._plan.costs.start_s)

    def _register(self, start: StartWorker) -> None:
        plan, key, now = self._plan, (start.name, start.incarnation), self._clock.now()
        fits = WorkerLimits(MAX_POSITIONS, MAX_POSITIONS)
        record = WorkerRecord(start.name, start.role, start.incarnation, 1, NODE.host, "", "", fits, NODE.node_id)
        if self.core.register(record).fenced:
            return
        prefill = start.role is Role.PREFILL
        worker = ModelWorker(
            key,
            start.role,
            PrefillModel(plan.costs, plan.prefill, plan.block_tokens) if prefill else None,
            None if prefill else DecodeModel(plan.costs, plan.decode, plan.config.cache.page_tokens, self._gaps),
            now,
            now,
        )
        self.workers[key] = worker
        self.on_join(worker)

    @property
    def _gaps(self) -> GapHistogram:
        return self._figures.gaps

    def _renew(self, worker: ModelWorker, now: float) -> None:
        name, incarnation = worker.key
        grant = self.core.renew(name, incarnation, self._status(worker, now))
        assert not grant.fenced, f"{name} renews in time and has lost its lease"
        worker.renews_at = now + grant.renew_s
        if grant.drain and not worker.draining:
            worker.draining = True
            self._count_sizes()
        if worker.draining and worker.idle:
            if self.core.leave(name, incarnation, closed=True):
                self._closed.add(worker.key)  # Its start is due with the controller's next tick, of this turn.
            del self.workers[worker.key]
            self.on_leave(worker)

    def _status(self, worker: ModelWorker, now: float) -> WorkerStatus:
        tells = now >= worker.counters_at
        if tells:
            worker.counters_at = now + COUNTERS_S
        state = _DRAINING if worker.draining else _READY
        name, incarnation = worker.key
        if (prefill := worker.prefill) is not None:
            return self._prefill_status(worker, prefill, state, tells)
        decode = worker.decode
        assert decode is not None, "a worker has a model"
        page = self._plan.config.cache.page_tokens
        counters = {}
        if tells:
            counters = {
                "tokens_generated": float(decode.generated_by(now)),
                "retractions": float(decode.retractions),
                "retracted": float(decode.retracted),
            }
        return WorkerStatus(
            name,
            Role.DECODE,
            state,
            1,
            NODE.host,
            incarnation,
            decode.running,
            decode.waiting,
            self._plan.decode.device_tokens // page,
            decode.free_tokens // page,
            decode.steps,
            counters=counters,
            counters_left_out=not tells,
            routers=self._plan.routers,
            ungranted=decode.ungranted,
        )

    def _prefill_status(self, worker: ModelWorker, prefill: PrefillModel, state: str, tells: bool) -> WorkerStatus:
        plan, page, block = self._plan, self._plan.config.cache.page_tokens, self._plan.block_tokens
        (name, incarnation), pages = worker.key, plan.prefill.device_tokens // page
        held = min(pages, -(-prefill.under_way_tokens // page))
        counters = {}
        if tells:
            cached = prefill.cache.on_device * block // page
            counters = {
                "prompt_tokens_computed": float(prefill.computed),
                "hit_tokens_device": float(prefill.held - prefill.loaded),
                "hit_tokens_host": float(prefill.loaded),
                "device_pages_unused": float(max(0, pages - held - cached)),
            }
            if plan.prefill.host_tokens:
                counters["host_pages_total"] = float(plan.prefill.host_tokens // page)
                counters["host_pages_used"] = float(prefill.cache.on_host * block // page)
            counters |= {f"link_bytes:{to}": float(sent) for to, sent in worker.sent.items()}
            if prefill.computed:
                counters["compute_tokens_per_s"] = self._compute_rate
                counters["load_tokens_per_s"] = 1 / max(1e-9, self._plan.costs.load_token_s)
        return WorkerStatus(
            name,
            Role.PREFILL,
            state,
            1,
            NODE.host,
            incarnation,
            prefill.running,
            prefill.waiting,
            pages,
            pages - held,
            prefill.steps,
            prefill.waiting + prefill.running,
            counters=counters,
            prompt_tokens=prefill.todo,
            counters_left_out=not tells,
            routers=self._plan.routers,
        )

    @property
    def _compute_rate(self) -> float:
        """Prompt tokens a second of full steps."""
        chunk = self._plan.prefill.chunk_tokens
        return chunk / self._plan.costs.prefill_s(chunk, chunk * chunk / 2)

    def _count_sizes(self) -> None:
        sizes = self.size(Role.PREFILL), self.size(Role.DECODE)
        if not self._figures.sizes or self._figures.sizes[-1][1:] != sizes:
            self._figures.sizes.append((self._clock.now(), *sizes))
