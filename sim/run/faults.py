"""Faults of a plan: how each strikes the parts of a run, and how it ends.

Each ends by itself, at a time known in advance. Faults of router, controller and supervisor come last, with what
operators do to the pools meanwhile.

What a run met is counted by the counters of workers, routers and stand-ins, and by the kinds of requests
(`sim.run.run_scenario`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.pool_changes import PauseCluster, SleepCluster
from twinpool.router.verification.audits import AuditResult as Audited
from twinpool.sim.fabric.hash_answers import penalised, recite
from twinpool.sim.fabric.sim_network import SimNetwork
from twinpool.sim.fabric.sim_storage import SimStore
from twinpool.sim.fabric.virtual_time import VirtualTime
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_controller import SimControl
from twinpool.sim.nodes.sim_router import SimRouter, SimRouterProcess
from twinpool.sim.nodes.sim_worker import SimHost
from twinpool.sim.scenario.scenario import PlannedFault, Scenario, ScenarioRequest

UndoFault = Callable[[], None]


class FaultTarget(Protocol):
    """The parts of a running scenario that faults act on, and that count what it met."""

    agenda: VirtualTime
    counts: Counter[str]
    network: SimNetwork
    clusters: dict[str, SimControl]
    """By model."""
    store: SimStore | None
    world: SimWorld
    plan: Scenario

    @property
    def routers(self) -> Sequence[SimRouterProcess]: ...

    @property
    def router(self) -> SimRouterProcess:
        """One that lives, where there is one."""

    def say(self, who: str, what: str) -> None: ...
    def restart_router(self, index: int) -> None: ...
    def lost_router(self, router: SimRouterProcess) -> None: ...


def nothing() -> None:
    """The end of a fault that leaves nothing to undo."""


RESTART_S = 0.5
"""Seconds after which a router that died is started again."""
ROLLED_S = 15.0
"""Seconds that a worker which restarts for its settings has to be back, before the next one is told to."""
_LOOK_S = 0.25
_FAILING = 0.34
_SLOW = 20.0


def schedule(run: FaultTarget, fault: PlannedFault) -> float:
    """Enter a fault into the run's agenda; returns the time at which it, and a restart after it, are over."""

    def begin() -> None:
        undo = _BEGIN[fault.kind](run, fault)
        if undo is None:
            return
        run.counts[fault.kind] += 1
        run.say("fault", str(fault))
        if fault.lasts:

            def end() -> None:
                run.say("fault", f"over: {fault}")
                undo()

            run.agenda.after(fault.lasts, end)

    run.agenda.after(fault.at, begin)
    return fault.at + fault.lasts + RESTART_S


def _host(run: FaultTarget, fault: PlannedFault) -> SimHost | None:
    host = run.clusters[fault.model].hosts.get(WorkerName(fault.name))
    return host if host is not None and host.process.alive else None


def _service(run: FaultTarget, fault: PlannedFault) -> SimRouter | None:
    """The service of the fault's model at a router that lives."""
    return run.router.services.get(fault.model) if run.router.process.alive else None


def _reaching(run: FaultTarget, fault: PlannedFault) -> SimRouter | None:
    """`_service` where its router reaches the model's controller."""
    service = _service(run, fault)
    return service if service is not None and service.control.reaches(service.process) else None


def _crash(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault)
    if host is None:
        return None
    host.process.die()
    return nothing


def _stop(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault)
    if host is None or host.process.stopped:
        return None
    process = host.process
    process.stop()
    run.agenda.after(run.network.timeout_s, lambda: run.network.silence() if process.stopped else None)
    return process.go_on


def _hang(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault)
    if host is None or host.process.stopped:
        return None
    host.hang()
    return nothing


def _rank(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault)
    ranks = host.built.followers.ranks if host is not None and host.built.followers is not None else []
    alive = [rank.process for rank in ranks if rank.process.alive]
    if not alive:
        return None
    run.world.rng.choice(alive).die()
    return nothing


def _halt(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault)
    if host is None or run.plan.shape.plane not in ("shm", "nixl"):
        return None
    process = host.process

    def died() -> None:
        run.counts["killed_in_write"] += process.stopped

    def halt() -> None:
        run.say("fault", f"{process} stands still in mid-write for {fault.lasts:.2f} s")
        process.stop()
        process.on_death(died)
        run.agenda.after(run.network.timeout_s, lambda: run.network.silence() if process.stopped else None)
        run.agenda.after(fault.lasts, process.go_on)

    host.built.plane.halt = halt
    return nothing


def _stall(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    run.network.part(fault.target, fault.other)
    return lambda: run.network.join(fault.target, fault.other)


def _reset(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    lost = run.network.reset(fault.target, fault.other)
    run.say("fault", f"{lost} messages are lost")
    return nothing


def _slow(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    run.network.slow = _SLOW

    def end() -> None:
        run.network.slow = 1.0

    return end


def _damage(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    run.world.damage.due[fault.kind] += 1
    return nothing


def _flip(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Flip a bit in each page of the host tier, except null pages, which no request depends on."""
    host = _host(run, fault)
    pools = host.built.manager.host if host is not None else None
    if pools is None:
        return None
    rng = run.world.rng
    for pool, count in pools.layout.counts.items():
        for index in range(1, count):
            buffer = rng.choice(pools.layout.buffers[pool])
            at = buffer.offset(rng.randrange(buffer.spec.layers), index) + rng.randrange(buffer.entry_bytes)
            pools.region[at] ^= 0x20
    return nothing


def _errors(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    store = run.store
    if store is None:
        return None
    store.failing = _FAILING

    def end() -> None:
        store.failing = 0.0

    return end


def _rot(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    return nothing if run.store is not None and run.store.damage() else None


def _forget(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    return nothing if run.store is not None and run.store.lose() else None


def _router(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Restart a router: its clients lose their connections, and ask another one, or it when it is back."""
    index = int(fault.target.rpartition("-")[2] or 0)
    router = run.routers[index] if index < len(run.routers) else run.router
    if not router.process.alive:
        return None
    router.process.die()
    run.agenda.after(RESTART_S, lambda: run.restart_router(router.index))
    run.lost_router(router)
    return nothing


def _controller(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Kill the controller: nobody renews or starts until it is back, and who can't wait so long ends."""
    control = run.clusters[fault.model]
    if control.away:
        return None
    control.kill()
    return control.start_again


def _cutoff(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Cut the controller off from all others: it lives, ends leases that it doesn't hear of, and starts anew."""
    control = run.clusters[fault.model]
    name = control.process.name
    run.network.part(name, "*")

    def end() -> None:
        run.network.join(name, "*")
        if not control.away:
            control.publish()  # Who watches its table connects again, and gets all of it.

    return end


def _supervisor(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    control = run.clusters[fault.model]
    if not control.supervised:
        return None
    control.kill_supervisor()
    return control.start_supervisor


def _drain(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    service = _service(run, fault)
    if service is None or not service.drain(WorkerName(fault.name)):
        return None
    return lambda: _undrain(run, fault)


def _undrain(run: FaultTarget, fault: PlannedFault) -> None:
    if (service := _service(run, fault)) is not None:
        service.drain(WorkerName(fault.name), undo=True)


def _role(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host, service = _host(run, fault), _service(run, fault)
    if host is None or service is None:
        return None
    other = Role.DECODE if host.role is Role.PREFILL else Role.PREFILL
    return nothing if service.change_role(host.name, other) else None


def _restart(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    service = _service(run, fault)
    return nothing if service is not None and service.restart(WorkerName(fault.name)) else None


def _add(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Add a worker of the role that another one has, and scale the pool back afterwards."""
    control = run.clusters[fault.model]
    host = control.hosts.get(WorkerName(fault.name))
    if host is None or _reaching(run, fault) is None:
        return None
    role, pools = host.role, control.core.pools
    try:
        control.wants(pools.add_some(role, 1))
    except ConfigError:  # No node has room for it.
        return None

    def end() -> None:
        if _reaching(run, fault) is None:
            return
        staying = [view for view in control.core.views() if view.record.role is role and _stays(view.status.state)]
        if len(staying) > 1:
            control.wants_no_more(control.core.pools.scale({role: len(staying) - 1}))

    return end


def _stays(state: str) -> bool:
    return state in ("starting", "ready")


def _cordon(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Cordon a node: who serves there goes on, and nobody starts there."""
    control = run.clusters[fault.model]
    if _reaching(run, fault) is None:
        return None
    control.core.pools.cordon(fault.name)

    def end() -> None:
        if control.away or not control.reaches(run.router.process):
            run.agenda.after(_LOOK_S, end)  # The operator asks again.
        else:
            control.core.pools.uncordon(fault.name)

    return end


def _apply(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Change settings of the workers, and restart them one by one, as `twinpool apply` does."""
    control = run.clusters[fault.model]
    if not control.reaches(run.router.process):
        return None
    control.change_settings()
    _roll(run, fault, sorted(name for name, host in control.hosts.items() if host.process.alive))
    return nothing


def _change(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Change what is served: an operator's pause, and sleep, end after a while."""
    assert fault.change is not None
    control = run.clusters[fault.model]
    if _reaching(run, fault) is None or not control.change(fault.change):
        return None

    def end() -> None:
        back = PauseCluster(paused=False) if isinstance(fault.change, PauseCluster) else SleepCluster(0)
        if control.away or not control.reaches(run.router.process):
            run.agenda.after(_LOOK_S, end)  # The operator asks again.
        else:
            control.change(back)

    return end


def _roll(run: FaultTarget, fault: PlannedFault, names: list[WorkerName]) -> None:
    """Restart the first of `names`, and when it is back, or that takes too long, the next."""
    if not names:
        return
    name, *rest = names
    hosts, service = run.clusters[fault.model].hosts, _service(run, fault)
    before = hosts[name].incarnation
    if service is None or not service.restart(name):
        _roll(run, fault, rest)
        return
    deadline = run.agenda.now() + ROLLED_S

    def look() -> None:
        host = hosts[name]
        if (host.incarnation > before and host.lease.held) or run.agenda.now() >= deadline:
            _roll(run, fault, rest)
        else:
            run.agenda.after(_LOOK_S, look)

    run.agenda.after(_LOOK_S, look)


_BEGIN: dict[str, Callable[[FaultTarget, PlannedFault], UndoFault | None]] = {
    "crash": _crash,
    "stop": _stop,
    "hang": _hang,
    "halt": _halt,
    "stall": _stall,
    "partition": _stall,
    "reset": _reset,
    "slow": _slow,
    "corrupt": _damage,
    "metadata": _damage,
    "notice": _damage,
    "rank": _rank,
    "errors": _errors,
    "flip": _flip,
    "rot": _rot,
    "forget": _forget,
    "router": _router,
    "controller": _controller,
    "cutoff": _cutoff,
    "supervisor": _supervisor,
    "drain": _drain,
    "role": _role,
    "restart": _restart,
    "add": _add,
    "cordon": _cordon,
    "apply": _apply,
    "weights": _change,
    "flush": _change,
    "pause": _change,
    "sleep": _change,
}

_TOLD = (
    "stale_pages",
    "pages_damaged",
    "late_messages",
    "preemptions",
    "pages_evicted",
    "pages_invalidated",
    "retractions",
    "resumptions",
    "recomputed",
    "arena_pages_adopted",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_storage",
    "prompt_tokens_held",
    "tokens_drafted",
    "drafts_accepted",
)
"""Counters of workers that are reported as events of a run."""


def count(run: FaultTarget) -> None:
    """Count into `run.counts` what its parts have counted."""
    counts = run.counts
    for host in [host for control in run.clusters.values() for host in control.all_hosts]:
        for name in _TOLD:
            counts[name] += int(host.snapshot.counters.get(name, 0))
        if host.built.followers is not None:
            counts["late_orders"] += host.built.followers.late_orders
    damaged = run.world.damage.done
    counts["damaged_metadata"], counts["damaged_notices"] = damaged["metadata"], damaged["notice"]
    counts["damaged_writes"] = damaged["corrupt"]
    counts.update({f"stores_{kind}": met for kind, met in run.world.store_faults.done.items()})
    if run.store is not None:
        counts["cancelled_running"] = run.store.cancelled_running
    for service in [service for router in run.routers for service in router.services.values()]:
        _count_router(counts, service)
    if not run.plan.shape.config["faults"]["retract_every"]:
        counts["pressed_out"] = counts["retractions"]
        counts["pressed_seeds"] = int(counts["retractions"] > 0)


def _count_router(counts: Counter[str], router: SimRouter) -> None:
    core = router.core
    counts["audited"] += core.audits.counts.results[Audited.EXACT]
    counts["migrated"] += core.migrations.counts.migrated
    counts["stayed"] += core.migrations.counts.stayed
    counts["replays"] += core.counts.replays
    counts["woken"] += router.demand.wakes
    counts.update({f"local_{why}": met for why, met in core.counts.local_prompts.items()})


def kinds_of(ask: ScenarioRequest, spec: PoolSetSpec) -> list[str]:
    """Return the kinds that a request that was answered is of."""
    sampling = ask.sampling
    free = replace(sampling, min_tokens=0)
    kinds = {
        "salted": bool(ask.salt),
        "prioritised": ask.priority != 0,
        "penalised": penalised(sampling),
        "biased": bool(sampling.logit_bias),
        "masked": bool(sampling.allowed_token_ids),
        "structured": bool(sampling.grammar),
        "held_open": sampling.min_tokens > 0 and sampling.min_tokens > len(recite(spec, ask.prompt, free).tokens),
        "logprobs": sampling.logprobs is not None,
        "scored": sampling.prompt_logprobs is not None,
        "chosen_again": sampling.choice > 0,
        "adapted": sampling.adapter is not None,
        "background": ask.background,
    }
    return [kind for kind, so in kinds.items() if so]
