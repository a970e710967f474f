"""A queueing model of both pools under the production controller and autoscaler, by steps of a virtual clock.

A prefill worker computes its prompts one after the other. A decode worker grants pages for a prompt and its answer when
there are enough, first come, first served; each of its steps brings a token for every request that runs, and takes
longer the more there are. Prompts go to the prefill worker with the fewest tokens to compute and to the decode worker
with the fewest pages held. A worker that drains takes nothing new; what runs on a decode worker goes on elsewhere where
there are pages for it (live migration), else here. Starts take `start_s`, and wait while there is no place.

The controller hears heartbeats as it does from real workers: counters every 5 s, the rest every second. A router's
report comes every second.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import KillWorker, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_report import LatencyCounts
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

STEP_S = 0.25
HEARTBEAT_STEPS, REPORT_STEPS, COUNTERS_STEPS = 4, 4, 20
NODE = NodePlace("n" * 12, "node")


@dataclass(frozen=True, slots=True)
class ModelAsk:
    """One request."""

    at_s: float
    prompt: int
    """Tokens that have to be computed."""
    answer: int
    """Tokens."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What workers are able to do."""

    compute_per_s: float = 4000.0
    """Prompt tokens a second of a prefill worker."""
    step_s: float = 0.02
    """A decode step without requests."""
    step_each_s: float = 0.002
    """What each request adds to it."""
    pages: int = 2000
    """Pages of a decode worker."""
    page_tokens: int = 16
    start_s: float = 20.0
    """From a start to the first heartbeat."""


@dataclass(slots=True)
class ModelRequest:
    ask: ModelAsk
    left: float
    """Prompt tokens that are still to be computed."""
    pages: int
    to_come: float
    """Tokens of the answer that are still to come."""
    granted: bool = False
    decode: ModelWorker | None = None


@dataclass(slots=True, eq=False)
class ModelWorker:
    name: WorkerName
    role: Role
    incarnation: Incarnation
    began_s: float
    prompts: deque[ModelRequest] = field(default_factory=deque)
    waiting: deque[ModelRequest] = field(default_factory=deque)
    """On decode: those that have no pages yet."""
    promised: set[int] = field(default_factory=set)
    """On decode: ids of requests with pages whose prompt isn't computed yet."""
    running: list[ModelRequest] = field(default_factory=list)
    held: int = 0
    """Pages that requests hold."""
    draining: bool = False
    computed: float = 0.0
    """Prompt tokens computed, or tokens of answers generated."""

    @property
    def empty(self) -> bool:
        return not (self.prompts or self.waiting or self.running or self.promised)


@dataclass(slots=True)
class ModelFigures:
    """What a run came to."""

    ttft_s: list[float] = field(default_factory=list)
    gaps: float = 0.0
    gaps_late: float = 0.0
    worker_s: float = 0.0
    """Seconds of all workers, from their starts to their ends."""
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    """The ready workers of both pools whenever that changed."""


class AutoscalingModel:
    """One run. Whoever drives it may act through `core` between steps."""

    def __init__(
        self, config: Config, asks: Sequence[ModelAsk], costs: ModelCosts, sizes: dict[Role, int], places: int = 1000
    ) -> None:
        """`sizes`: the workers that serve at the beginning. `places`: workers that nodes have room for."""
        self.config, self.costs, self.places = config, costs, places
        self.clock, self.ledger = ManualClock(1000.0), MemoryLedger()
        self._began = self.clock.now()
        self.core = Controller(self.clock, config.cluster, self.ledger)
        self.core.set_nodes([NODE])
        self.autoscaler = Autoscaler(self.core, self.clock, config) if config.autoscaling.enabled else None
        self._asks = deque(sorted(asks, key=lambda ask: ask.at_s))
        self._unplaced: deque[ModelRequest] = deque()
        self.workers: dict[WorkerName, ModelWorker] = {}
        self._starting: list[tuple[StartWorker, float | None]] = []
        """Starts, and when they are over; None while they wait for a place."""
        self.breaks: Callable[[StartWorker], bool] = lambda start: False
        """Whether a start's process dies instead of registering."""
        self.figures = ModelFigures()
        self._steps = self._requests = self._late = self._in_flight = 0
        for role, count in sizes.items():
            self.core.pools.add_some(role, count)
        self._act(start_s=0.0)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.clock.now() - self._began

    @property
    def done(self) -> bool:
        return not self._asks and not self._in_flight

    def pool(self, role: Role) -> list[ModelWorker]:
        """Workers of a pool that take requests."""
        return [one for one in self.workers.values() if one.role is role and not one.draining]

    def size(self, role: Role) -> int:
        return len(self.pool(role))

    def restart_controller(self) -> None:
        """The controller is killed and started again with its ledger; workers and starts go on."""
        self.core = Controller(self.clock, self.config.cluster, self.ledger, supervised=False)
        self.core.set_nodes([NODE])
        self.autoscaler = Autoscaler(self.core, self.clock, self.config) if self.config.autoscaling.enabled else None
        self.core.attach(
            [(one.name, one.incarnation) for one in self.workers.values()]
            + [(start.name, start.incarnation) for start, _ in self._starting]
        )

    def run(self, until_s: float | None = None) -> None:
        """Go on until this time, or until all is answered."""
        while not self.done if until_s is None else self.now < until_s:
            self.step()

    def step(self) -> None:
        self.clock.advance(STEP_S)
        self._steps += 1
        while self._asks and self._asks[0].at_s <= self.now:
            ask = self._asks.popleft()
            self._requests += 1
            self._in_flight += 1
            pages = -(-(ask.prompt + ask.answer) // self.costs.page_tokens)
            self._unplaced.append(ModelRequest(ask, float(ask.prompt), pages, float(ask.answer)))
        self._place()
        for worker in list(self.workers.values()):
            if worker.role is Role.PREFILL:
                self._compute(worker)
            else:
                self._decode(worker)
        if self._steps % HEARTBEAT_STEPS == 0:
            self._heartbeats()
        if self._steps % REPORT_STEPS == 0 and self.autoscaler is not None:
            figures = self.figures
            self.autoscaler.report(
                "router",
                LatencyCounts(
                    self._requests, len(figures.ttft_s), self._late, int(figures.gaps), int(figures.gaps_late)
                ),
            )
        self._act(self.costs.start_s)
        self.figures.worker_s += STEP_S * (len(self.workers) + sum(over is not None for _, over in self._starting))
        sizes = self.size(Role.PREFILL), self.size(Role.DECODE)
        if not self.figures.sizes or self.figures.sizes[-1][1:] != sizes:
            self.figures.sizes.append((self.now, *sizes))

    # ------------------------------------------------------------ requests

    def _place(self) -> None:
        prefill, decode = self.pool(Role.PREFILL), self.pool(Role.DECODE)
        while self._unplaced and prefill and decode:
            request = self._unplaced.popleft()
            min(prefill, key=lambda one: sum(r.left for r in one.prompts)).prompts.append(request)
            self._ask_pages(request, decode)

    def _ask_pages(self, request: ModelRequest, decode: Sequence[ModelWorker]) -> None:
        worker = min(decode, key=lambda one: one.held + sum(r.pages for r in one.waiting))
        request.decode = worker
        worker.waiting.append(request)
        self._grant(worker)

    def _grant(self, worker: ModelWorker) -> None:
        while worker.waiting and worker.held + worker.waiting[0].pages <= self.costs.pages:
            request = worker.waiting.popleft()
            worker.held += request.pages
            request.granted = True
            worker.promised.add(id(request))
            self._begin(request)

    def _begin(self, request: ModelRequest) -> None:
        """Have a request run that has its pages and its prompt's state."""
        if request.granted and request.left <= 0 and request.decode is not None:
            request.decode.promised.discard(id(request))
            request.decode.running.append(request)
            took = self.now - request.ask.at_s
            self.figures.ttft_s.append(took)
            self._late += took > self.config.autoscaling.ttft_target_s

    def _compute(self, worker: ModelWorker) -> None:
        budget = self.costs.compute_per_s * STEP_S
        while worker.prompts and budget > 0:
            request = worker.prompts[0]
            done = min(budget, request.left)
            request.left -= done
            worker.computed += done
            budget -= done
            if request.left <= 0:
                worker.prompts.popleft()
                self._begin(request)

    def _decode(self, worker: ModelWorker) -> None:
        if worker.draining:
            self._migrate(worker)
        if worker.running:
            step_s = self.costs.step_s + self.costs.step_each_s * len(worker.running)
            tokens = STEP_S / step_s
            came = sum(min(tokens, request.to_come) for request in worker.running)
            self.figures.gaps += came
            worker.computed += came
            self.figures.gaps_late += came if step_s > self.config.autoscaling.itl_target_s else 0.0
            for request in worker.running:
                request.to_come -= tokens
            ended = [request for request in worker.running if request.to_come <= 0]
            worker.running = [request for request in worker.running if request.to_come > 0]
            worker.held -= sum(request.pages for request in ended)
            self._in_flight -= len(ended)
        self._grant(worker)

    def _migrate(self, worker: ModelWorker) -> None:
        others = self.pool(Role.DECODE)
        if not others:
            return
        while worker.waiting:
            self._ask_pages(worker.waiting.popleft(), others)
        for request in list(worker.running):
            there = min(others, key=lambda one: one.held)
            if there.held + request.pages > self.costs.pages:
                return
            worker.running.remove(request)
            worker.held -= request.pages
            there.held += request.pages
            there.running.append(request)
            request.decode = there

    # ------------------------------------------------------------ the controller

    def _heartbeats(self) -> None:
        for worker in list(self.workers.values()):
            grant = self.core.renew(worker.name, worker.incarnation, self._status(worker))
            assert not grant.fenced, f"{worker.name} has lost its lease"
            worker.draining = worker.draining or grant.drain
            if worker.draining and worker.empty:
                self.core.leave(worker.name, worker.incarnation)
                del self.workers[worker.name]

    def _status(self, worker: ModelWorker) -> WorkerStatus:
        tells = self._steps % COUNTERS_STEPS == 0
        counters = {}
        if tells and worker.role is Role.PREFILL:
            counters = {"prompt_tokens_computed": worker.computed}
            if worker.computed:
                counters["compute_tokens_per_s"] = self.costs.compute_per_s
        prefill = worker.role is Role.PREFILL
        if tells and not prefill:
            counters = {"tokens_generated": worker.computed}
        return WorkerStatus(
            worker.name,
            worker.role,
            "draining" if worker.draining else "ready",
            1,
            NODE.host,
            worker.incarnation,
            running=bool(worker.prompts) if prefill else len(worker.running),
            waiting=max(0, len(worker.prompts) - 1) if prefill else len(worker.waiting) + len(worker.promised),
            pages_total=self.costs.pages,
            pages_free=self.costs.pages - worker.held,
            steps=self._steps,
            prompt_tokens=round(sum(request.left for request in worker.prompts)),
            ungranted=len(worker.waiting),
            counters=counters,
            counters_left_out=not tells,
        )

    def _act(self, start_s: float) -> None:
        now = self.now
        if self.autoscaler is not None and self._steps:
            self.autoscaler.tick()
        for action in self.core.tick():
            match action:
                case StartWorker():
                    self._starting.append((action, None))
                case KillWorker():
                    key = action.name, action.incarnation
                    self._starting = [one for one in self._starting if (one[0].name, one[0].incarnation) != key]
        waiting, self._starting = self._starting, []
        for start, over in waiting:
            there = len(self.workers) + sum(end is not None for _, end in self._starting)
            if over is None and there < self.places:
                self.core.placed(start.name, start.incarnation, NODE)
                self._starting.append((start, now + start_s))
            elif over is not None and now >= over and self.breaks(start):
                self.core.died(start.name, start.incarnation, "it could not start")
            elif over is None or now < over:
                self._starting.append((start, over))
            else:
                self._register(start)
        if not self._steps:
            for start, _ in self._starting:
                self._register(start)
            self._starting = []

    def _register(self, start: StartWorker) -> None:
        fits = WorkerLimits(10**6, 10**6)
        record = WorkerRecord(start.name, start.role, start.incarnation, 1, NODE.host, "", "", fits, NODE.node_id)
        if not self.core.register(record).fenced:
            self.workers[start.name] = ModelWorker(start.name, start.role, start.incarnation, self.now)


def changes(sizes: Sequence[tuple[float, int, int]]) -> int:
    """How often a pool's number of workers changed after the beginning."""
    return sum(
        before[1 + which] != after[1 + which]
        for before, after in itertools.pairwise(sizes)
        for which in range(len(PAIR))
    )
