"""The run of a plan: builds the cluster, runs its events, and reports violations.

What must hold, whatever the plan:

    ends        every request ends, within `GRACE_S` of virtual time after the last fault
    answers     every token and log-probability is the one that `recite` computes from the prompt alone, with the
                version of the weights that the router names, each delivered once; only a client that left, whose own
                deadline was short, or whose answer's weights an operator has changed, gets less
    prefixes    cached tokens that a worker reports of a request were in an earlier request under the same salt, since
                the worker's weights were first served
    damage      no state is found damaged where no fault damages state, even if a check saved the answer
    audits      computing an answer again from its tokens never gives another answer
    rules       no worker, router or controller raises: an event outside its table, a broken assertion
    books       `check()` of every worker and the router finds nothing, from time to time and at the end
    rest        once all requests have ended, every page and slot of every pool is free or only cached, within `GRACE_S`
    background  no more of them decode in a step with others than `decode.background_rows`
    weights     a change of them is through or was given up by then, and every worker has the cluster's
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import RequestId
from twinpool.sim.fabric.plane_faults import StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimNetwork, SimSwitch
from twinpool.sim.fabric.sim_storage import SimArenas, SimStore
from twinpool.sim.fabric.virtual_time import VirtualLoop, VirtualTime
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_controller import SimControl
from twinpool.sim.nodes.sim_router import SimRouter, SimRouterProcess
from twinpool.sim.nodes.sim_worker import SimHost
from twinpool.sim.run.faults import count, schedule
from twinpool.sim.run.sim_clients import SimClients
from twinpool.sim.scenario.scenario import ClusterShape, Scenario

GRACE_S = 180.0
_LINK_TIMEOUT_S = 3.0
_STORE_FAULTS = 0.04
"""Share of one-sided writes that a fault befalls."""
_ENOUGH = 5
"""How many violations stop a run: later ones follow from the first."""
_SUSPECT = (
    "pages_damaged",
    "pages_invalidated",
    "stale_pages",
    "states_damaged_swapped",
    "pages_damaged_in_storage",
    "pages_damaged_on_host",
)
"""Counters of workers that count state found damaged."""
_DAMAGING = ("corrupt", "metadata", "notice", "flip", "rot")
"""Faults that damage state."""
_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The result of a run."""

    seed: int
    violations: tuple[str, ...]
    seconds: float
    """How many seconds of virtual time it took."""
    events: int
    counts: Counter[str]
    log: tuple[str, ...] = ()


class ScenarioRun:
    """One run of one plan."""

    def __init__(self, plan: Scenario, keep_log: bool = False) -> None:
        self.plan = plan
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.log: list[str] | None = [] if keep_log else None
        self.agenda = VirtualTime()
        shape, rng = plan.shape, random.Random(f"run {plan.seed}")
        self.network = SimNetwork(self.agenda, rng, shape.delay_s, _LINK_TIMEOUT_S)
        configs = {name: config_from_dict(_config(one.config)) for name, one in plan.shapes.items()}
        storages = [one.cache.storage for one in configs.values() if one.cache.storage.backend != "none"]
        self.store = (
            SimStore(f"simulated {next(_runs)}", storages[0].max_bytes, rng, 5 * shape.delay_s) if storages else None
        )
        sleeps = any(one.cluster.sleep_after_s for one in configs.values())
        self.loop = VirtualLoop(self.agenda, self.violated) if sleeps else None
        self.world = SimWorld(
            self.agenda,
            rng,
            shape,
            configs[""],
            SimSwitch(self.network),
            {},
            WireDamage(),
            StoreFaults(random.Random(f"stores {plan.seed}"), _STORE_FAULTS),
            SimArenas(),
            self.store if configs[""].cache.storage.backend != "none" else None,
            self.say,
            self.violated,
            frozenset((ask.sampling.seed, ask.sampling.choice) for ask in plan.asks if ask.background),
            foreign=partial(self._foreign, ""),
            loop=self.loop,
        )
        self.clusters = {
            name: SimControl(self._world_of(name, one, configs[name])) for name, one in plan.shapes.items()
        }
        self.control = self.clusters[""]
        self.clients = SimClients(self)
        self._router_starts = 0
        self.routers = [self._new_router(index) for index in range(shape.routers)]

    def _world_of(self, model: str, shape: ClusterShape, config: Config) -> SimWorld:
        """What the processes of a model's cluster share."""
        if not model:
            return self.world
        return replace(
            self.world,
            shape=shape,
            config=config,
            planes={},
            arenas=SimArenas(),
            store=self.store if config.cache.storage.backend != "none" else None,
            model=model,
            place=list(self.plan.shapes).index(model),
            foreign=partial(self._foreign, model),
        )

    def _foreign(self, model: str, request_id: RequestId) -> bool:
        """Whether a request is one of clients, and of another model."""
        number = request_id[1:].partition(".")[0]
        return request_id.startswith("r") and number.isdigit() and self.clients.model_of(int(number)) != model

    # ------------------------------------------------------------ what is said

    def say(self, who: str, what: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.agenda.now():10.4f}  {who:14}  {what}")

    def violated(self, what: str) -> None:
        self.violations.append(f"{self.agenda.now():.4f} {what}")
        self.say("VIOLATION", what)

    # ------------------------------------------------------------ clients

    @property
    def router(self) -> SimRouterProcess:
        """The first router that lives, or the first."""
        return next((router for router in self.routers if router.process.alive), self.routers[0])

    def _new_router(self, index: int) -> SimRouterProcess:
        first = self._router_starts + 1
        process, services = self.control.new_process(f"router-{index}#{first}", "node-head"), {}
        for name, control in self.clusters.items():
            self._router_starts += 1
            services[name] = SimRouter(control.world, control, process, self._router_starts, self.clients)
        return SimRouterProcess(process, index, services)

    def restart_router(self, index: int) -> None:
        """Start a router again; clients whose connections ended with it, and who found no other, ask again."""
        before, self.routers[index] = self.routers[index], self._new_router(index)
        self.clients.restarted(before)

    def lost_router(self, router: SimRouterProcess) -> None:
        self.clients.lost(router)

    # ------------------------------------------------------------ the run

    def run(self, until: Callable[[], bool] = lambda: False) -> ScenarioResult:
        """Run to the end, or until `until()`, which is called before each event, returns True."""
        self.clients.begin()
        calm = max([schedule(self, fault) for fault in self.plan.faults], default=0.0)
        calm = max(calm, max((ask.at for ask in self.plan.asks), default=0.0))
        events = 0
        try:
            events = self._until(lambda: until() or self.clients.over, calm + GRACE_S)
            if self.violations or until():
                return self._result(events)
            self.violations += self.clients.unended()
            if not self.violations:
                events += self._rest(calm)
            return self._result(events)
        finally:
            if self.store is not None:
                self.store.close()
            if self.loop is not None:
                self.loop.end()

    def _until(self, reached: Callable[[], bool], deadline: float) -> int:
        events = 0
        while not reached() and len(self.violations) < _ENOUGH and self.agenda.now() < deadline:
            try:
                if not self.agenda.next():
                    break
            except Exception as error:
                self.violated(f"{type(error).__name__}: {error}")
                self.say("", repr(error))
                break
            events += 1
        return events

    def _rest(self, calm: float) -> int:
        """Run until nothing is held any more, then check all parts; returns the number of events."""
        events = self._until(lambda: False, max(calm, self.agenda.now()) + 0.5)
        deadline, unrest = self.agenda.now() + GRACE_S, ["nothing was looked at"]
        while unrest and self.agenda.now() < deadline and not self.violations:
            events += self._until(lambda: False, self.agenda.now() + 1.0)
            unrest = self._unrest()
        self.violations += unrest
        for host in [host for host in self._hosts if host.ended is None]:
            self.violations += [f"{host.process}: {line}" for line in host.worker.check().violations]
        self.violations += [f"{r.process.name}: {line}" for r in self.routers for line in r.check() if r.process.alive]
        self.violations += self._found_damaged()
        return events

    def _found_damaged(self) -> list[str]:
        if any(self.counts[kind] for kind in _DAMAGING):
            return []
        hosts = [(host, host.snapshot.counters) for host in self._hosts]
        found = [(host, name, counters.get(name, 0)) for host, counters in hosts for name in _SUSPECT]
        return [f"{host.process}: {name} is {n:g}, and nothing was damaged" for host, name, n in found if n]

    @property
    def _hosts(self) -> list[SimHost]:
        """All incarnations of all workers of all models."""
        return [host for control in self.clusters.values() for host in control.all_hosts]

    def _unrest(self) -> list[str]:
        return [line for control in self.clusters.values() for line in control.unrest()]

    def _result(self, events: int) -> ScenarioResult:
        count(self)
        return ScenarioResult(
            self.plan.seed, tuple(self.violations), self.agenda.now(), events, self.counts, tuple(self.log or ())
        )


def _config(drawn: dict[str, dict[str, object]]) -> dict[str, object]:
    """The configuration, with leases and timeouts short enough to save virtual time, and long enough for all faults."""
    plain: dict[str, dict[str, object]] = {
        "cluster": {"heartbeat_s": 0.25, "lease_s": 2.0, "start_timeout_s": 6.0, "stall_s": 4.0, "restart_limit": 100},
        "router": {"replay_limit": 100, "worker_wait_s": 120.0},
        "transfer": {
            "plane": "local",
            "room_timeout_s": 5.0,
            "connect_timeout_s": 2.0,
            "link_timeout_s": _LINK_TIMEOUT_S,
            "layers": True,
            "layer_group_bytes": 1,
        },
    }
    return {**plain, **{name: plain.get(name, {}) | section for name, section in drawn.items()}}


class _IntoLog(logging.Handler):
    """Copies the log lines of router cores into the run's log."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.name, record.getMessage())


@contextmanager
def _logging(run: ScenarioRun) -> Iterator[None]:
    root, handler, before = logging.getLogger(), _IntoLog(run.say), logging.root.manager.disable
    root.addHandler(handler)
    if run.log is None:
        logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


def run_plan(plan: Scenario, *, keep_log: bool = False) -> ScenarioResult:
    """Run a plan from beginning to end. Deterministic: the same plan gives the same result."""
    run = ScenarioRun(plan, keep_log)
    with _logging(run):
        return run.run()
