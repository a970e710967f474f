"""Faults of router, controller and supervisor, and what operators do to the pools meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.sim.run.fault_target import FaultTarget, UndoFault, nothing
from twinpool.sim.scenario.scenario import PlannedFault

RESTART_S = 0.5
"""Seconds after which a router that died is started again."""
ROLLED_S = 15.0
"""Seconds that a worker which restarts for its settings has to be back, before the next one is told to."""
_LOOK_S = 0.25


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
    if run.control.away:
        return None
    run.control.kill()
    return run.control.start_again  # type: ignore[no-any-return]


def _cutoff(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Cut the controller off from all others: it lives, ends leases that it doesn't hear of, and starts anew."""
    name = run.control.process.name
    run.network.part(name, "*")

    def end() -> None:
        run.network.join(name, "*")
        if not run.control.away:
            run.control.publish()  # Who watches its table connects again, and gets all of it.

    return end


def _supervisor(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    if not run.control.supervised:
        return None
    run.control.kill_supervisor()
    return run.control.start_supervisor  # type: ignore[no-any-return]


def _drain(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    name = WorkerName(fault.target)
    if not run.router.process.alive or not run.router.drain(name):
        return None
    return lambda: _undrain(run, name)


def _undrain(run: FaultTarget, name: WorkerName) -> None:
    if run.router.process.alive:
        run.router.drain(name, undo=True)


def _role(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    host = run.control.hosts.get(WorkerName(fault.target))
    if host is None or not host.process.alive or not run.router.process.alive:
        return None
    other = Role.DECODE if host.role is Role.PREFILL else Role.PREFILL
    return nothing if run.router.change_role(host.name, other) else None


def _restart(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    if not run.router.process.alive or not run.router.restart(WorkerName(fault.target)):
        return None
    return nothing


def _add(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Add a worker of the role that another one has, and scale the pool back afterwards."""
    host = run.control.hosts.get(WorkerName(fault.target))
    if host is None or not run.router.process.alive or not run.control.reaches(run.router.process):
        return None
    role, pools = host.role, run.control.core.pools
    try:
        run.control.wants(pools.add_some(role, 1))
    except ConfigError:  # No node has room for it.
        return None

    def end() -> None:
        if not run.router.process.alive or not run.control.reaches(run.router.process):
            return
        staying = [view for view in run.control.core.views() if view.record.role is role and _stays(view.status.state)]
        if len(staying) > 1:
            run.control.wants_no_more(run.control.core.pools.scale({role: len(staying) - 1}))

    return end


def _stays(state: str) -> bool:
    return state in ("starting", "ready")


def _cordon(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Cordon a node: who serves there goes on, and nobody starts there."""
    if not run.router.process.alive or not run.control.reaches(run.router.process):
        return None
    run.control.core.pools.cordon(fault.target)

    def end() -> None:
        if run.control.away or not run.control.reaches(run.router.process):
            run.agenda.after(_LOOK_S, end)  # The operator asks again.
        else:
            run.control.core.pools.uncordon(fault.target)

    return end


def _apply(run: FaultTarget, fault: PlannedFault) -> UndoFault | None:
    """Change settings of the workers, and restart them one by one, as `twinpool apply` does."""
    if not run.control.reaches(run.router.process):
        return None
    run.control.change_settings()
    _roll(run, sorted(name for name, host in run.control.hosts.items() if host.process.alive))
    return nothing


def _roll(run: FaultTarget, names: list[WorkerName]) -> None:
    """Restart the first of `names`, and when it is back, or that takes too long, the next."""
    if not names:
        return
    name, *rest = names
    before = run.control.hosts[name].incarnation
    if not run.router.process.alive or not run.router.restart(name):
        _roll(run, rest)
        return
    deadline = run.agenda.now() + ROLLED_S

    def look() -> None:
        host = run.control.hosts[name]
        if (host.incarnation > before and host.lease.held) or run.agenda.now() >= deadline:
            _roll(run, rest)
        else:
            run.agenda.after(_LOOK_S, look)

    run.agenda.after(_LOOK_S, look)


CLUSTER_FAULTS: dict[str, Callable[[FaultTarget, PlannedFault], UndoFault | None]] = {
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
}
