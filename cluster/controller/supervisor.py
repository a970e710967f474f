"""The supervisor: carries out the controller's orders, and tells the controller which processes have ended.

It decides nothing itself: deaths go in, starts and kills come out, and the operator reads one line about each. A death
is noticed in two ways, whichever is first: the launcher sees the process end, or the controller misses renewals. While
the controller is away nothing is started or killed; what ends meanwhile is told when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from twinpool.cluster.controller.controller_actions import (
    ControllerAction,
    EndedProcess,
    ForgetArenas,
    KillWorker,
    OperatorNote,
    PlacedProcess,
    StartFailed,
    StartWorker,
)
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace
from twinpool.cluster.controller.worker_launcher import WorkerLauncher
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.messages.settings_change import SettingsAnswer, SettingsChange

log = logging.getLogger("twinpool.supervisor")


class ControllerLine(Protocol):
    """The supervisor's side of its stream to the controller (`cluster.controller.controller_client`)."""

    def orders(self) -> list[ControllerAction]: ...

    def report(
        self,
        ended: Sequence[EndedProcess] = (),
        placed: Sequence[PlacedProcess] = (),
        nodes: Sequence[NodePlace] | None = None,
        settings: Sequence[SettingsAnswer] = (),
        room: ClusterRoom | None = None,
    ) -> None: ...


class Supervisor:
    """Connects one controller with one launcher. Used from one thread."""

    def __init__(
        self,
        controller: ControllerLine,
        launcher: WorkerLauncher,
        plan: Callable[[StartWorker], WorkerPlan],
        say: Callable[[str], None],
        change: Callable[[SettingsChange], SettingsAnswer],
        room: Callable[[], ClusterRoom | None] = lambda: None,
    ) -> None:
        """`plan` turns a granted start into the plan that its process gets, and raises `TwinpoolError` where there can
        be none; `say` shows a line to the operator; `change` changes the settings that plans are made by; `room`: what
        nodes have for workers, None where that is as it was."""
        self._controller = controller
        self._launcher = launcher
        self._plan = plan
        self._say = say
        self._change = change
        self._room = room
        self._nodes: tuple[NodePlace, ...] = ()
        self.failed: dict[WorkerName, str] = {}
        """Workers that have died and were never ready, each with the reason of its last death."""

    def poll(self, timeout_s: float) -> None:
        """Do one round: carry out all orders that have come, then wait up to `timeout_s` for a process to end."""
        nodes, placed = self._launcher.nodes(), self._launcher.placed()
        self._controller.report(placed=placed, nodes=nodes if nodes != self._nodes else None, room=self._room())
        self._nodes = nodes
        for order in self._controller.orders():
            match order:
                case StartWorker():
                    self._start(order)
                case KillWorker():
                    self._launcher.kill(order.name, order.incarnation, order.pid, order.node)
                case ForgetArenas():
                    self._launcher.forget(order.name, order.before)
                case StartFailed():
                    self.failed[order.name] = order.reason
                case OperatorNote():
                    log.warning(order.text)
                    self._say(order.text)
                case SettingsChange():
                    self._controller.report(settings=[self._change(order)])
        ended = self._launcher.ended(timeout_s)
        for one in ended:
            log.info("process ended", extra={"worker": one.name, "incarnation": one.incarnation, "reason": one.reason})
        self._controller.report(ended=ended)

    def _start(self, order: StartWorker) -> None:
        """Start a worker's process, or tell the controller why there is none."""
        log.info("starting", extra={"worker": order.name, "incarnation": order.incarnation})
        try:
            plan = self._plan(order)
        except TwinpoolError as error:
            self._controller.report(ended=[EndedProcess(order.name, order.incarnation, str(error))])
        else:
            self._launcher.start(plan, order.avoid, order.only, order.successor_of)
