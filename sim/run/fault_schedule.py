"""The effects of a plan's faults on a run. Each fault ends by itself, at a time known in advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from contracts.ids import Role, WorkerName
from sim.nodes.sim_worker import SimHost
from sim.scenario.scenario import PlannedFault


class FaultTarget(Protocol):
    """The parts of a running scenario that faults act on."""

    agenda: Any
    counts: Counter[str]
    network: Any
    control: Any
    router: Any
    store: Any
    world: Any
    plan: Any

    def say(self, who: str, what: str) -> None: ...
    def restart_router(self) -> None: ...


RESTART_S = 0.5
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


def _nothing() -> None:
    return


UndoFault = Callable[[], None]


def _host(run: FaultTarget, name: str) -> SimHost | None:
    host = run.control.hosts.get(WorkerName(name))
    return host if host is not None and host.process.alive else None


def _crash(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    if host is None:
        return None
    host.process.die()
    return _nothing


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
    return _nothing


def _rank(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    ranks = host.built.followers.ranks if host is not None and host.built.followers is not None else []
    alive = [rank.process for rank in ranks if rank.process.alive]
    if not alive:
        return None
    run.world.rng.choice(alive).die()
    return _nothing


def _router(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Restart the router: its clients lose their connections, and ask again."""
    if not run.router.process.alive:
        return None
    run.router.process.die()
    run.agenda.after(RESTART_S, run.restart_router)
    return _nothing


def _controller(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Kill the controller: nobody renews or starts until it is back, and who can't wait so long ends."""
    if run.control.away:
        return None
    run.control.kill()
    return run.control.start_again  # type: ignore[no-any-return]


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
    return _nothing


def _drain(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    name = WorkerName(fault.target)
    if not run.router.process.alive or not run.router.drain(name):
        return None
    return lambda: _undrain(run, name)


def _role(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = _host(run, fault.target)
    if host is None or not run.router.process.alive:
        return None
    other = Role.DECODE if host.role is Role.PREFILL else Role.PREFILL
    return _nothing if run.router.change_role(host.name, other) else None


def _undrain(run: FaultTarget, name: WorkerName) -> None:
    if run.router.process.alive:
        run.router.drain(name, undo=True)


def _stall(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    run.network.part(fault.target, fault.other)
    return lambda: run.network.join(fault.target, fault.other)


def _reset(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    lost = run.network.reset(fault.target, fault.other)
    run.say("fault", f"{lost} messages are lost")
    return _nothing


def _slow(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    run.network.slow = _SLOW

    def end() -> None:
        run.network.slow = 1.0

    return end


def _damage(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    run.world.damage.due[fault.kind] += 1
    return _nothing


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
    return _nothing


def _errors(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    store = run.store
    if store is None:
        return None
    store.failing = _FAILING

    def end() -> None:
        store.failing = 0.0

    return end


def _rot(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    return _nothing if run.store is not None and run.store.damage() else None


def _forget(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    return _nothing if run.store is not None and run.store.lose() else None


_BEGIN: dict[str, Callable[[FaultTarget, PlannedFault], UndoFault | None]] = {
    "crash": _crash,
    "stop": _stop,
    "hang": _hang,
    "halt": _halt,
    "router": _router,
    "controller": _controller,
    "drain": _drain,
    "role": _role,
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
