"""The effects of a plan's faults on a run. Each fault ends by itself, at a time known in advance."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.contracts.ids import WorkerName
from twinpool.sim.nodes.sim_worker import SimHost
from twinpool.sim.run.cluster_faults import CLUSTER_FAULTS, RESTART_S
from twinpool.sim.run.fault_target import FaultTarget, UndoFault, nothing
from twinpool.sim.scenario.scenario import PlannedFault

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


def _host(run: FaultTarget, name: str) -> SimHost | None:
    host = run.control.hosts.get(WorkerName(name))
    return host if host is not None and host.process.alive else None


def _crash(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    if host is None:
        return None
    host.process.die()
    return nothing


def _stop(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    if host is None or host.process.stopped:
        return None
    process = host.process
    process.stop()
    run.agenda.after(run.network.timeout_s, lambda: run.network.silence() if process.stopped else None)
    return process.go_on


def _hang(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    if host is None or host.process.stopped:
        return None
    host.hang()
    return nothing


def _rank(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    ranks = host.built.followers.ranks if host is not None and host.built.followers is not None else []
    alive = [rank.process for rank in ranks if rank.process.alive]
    if not alive:
        return None
    run.world.rng.choice(alive).die()
    return nothing


def _halt(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
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
    host = _host(run, fault.target)
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


_BEGIN: dict[str, Callable[[FaultTarget, PlannedFault], UndoFault | None]] = {
    "crash": _crash,
    "stop": _stop,
    "hang": _hang,
    "halt": _halt,
    **CLUSTER_FAULTS,
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
}
