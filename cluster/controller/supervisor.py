"""The supervisor: carries out the controller's actions, and tells the controller which processes have ended.

It decides nothing itself: deaths go in, starts and kills come out, and the operator reads one line about each. A death
is noticed in two ways, whichever is first: the launcher sees the process end, or the controller misses renewals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.controller.controller import Controller
from cluster.controller.controller_actions import ForgetArenas, KillWorker, OperatorNote, StartWorker
from cluster.controller.controller_service import ControllerServer
from cluster.controller.worker_launcher import WorkerEnded, WorkerLauncher
from cluster.worker_process.worker_plan import WorkerPlan
from contracts.clock import Clock

log = logging.getLogger("twinpool.supervisor")

STANDSTILL_S = 2.0
"""Seconds between two rounds, the wait for a death included, from which this process counts as having stood still."""


class Supervisor:
    """Connects one controller with one launcher. Used from one thread."""

    def __init__(
        self,
        server: ControllerServer,
        launcher: WorkerLauncher,
        plan: Callable[[StartWorker], WorkerPlan],
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """`plan` turns a granted start into the plan that its process gets; `say` shows a line to the operator."""
        self._clock = clock
        self._looked_at: float | None = None
        self._server = server
        self._launcher = launcher
        self._plan = plan
        self._say = say

    def poll(self, timeout_s: float) -> None:
        """Do one round: carry out all actions that are due, then wait up to `timeout_s` for a process to end."""
        self._take_time()
        self._place()
        for action in self._server.call(Controller.tick):
            match action:
                case StartWorker():
                    log.info("starting", extra={"worker": action.name, "incarnation": action.incarnation})
                    self._launcher.start(self._plan(action), action.avoid)
                case KillWorker():
                    self._launcher.kill(action.name, action.incarnation, action.pid, action.node)
                case ForgetArenas():
                    self._launcher.forget(action.name, action.before)
                case OperatorNote():
                    log.warning(action.text)
                    self._say(action.text)
        for ended in self._launcher.ended(timeout_s):
            self._report(ended)

    def _take_time(self) -> None:
        """Tell the controller when this process stood still (a suspended machine, a blocked disk): meanwhile the
        controller heard no heartbeat either."""
        now = self._clock.now()
        before, self._looked_at = self._looked_at, now
        if before is not None and now - before > STANDSTILL_S:
            log.warning("the controller stood still", extra={"seconds": round(now - before, 1)})
            self._server.call(lambda core: core.stood_still(now - before))

    def _place(self) -> None:
        """Tell the controller which nodes there are, and on which of them its starts were placed."""
        nodes, placed = self._launcher.nodes(), self._launcher.placed()

        def tell(core: Controller) -> None:
            core.set_nodes(nodes)
            for at in placed:
                core.placed(at.name, at.incarnation, at.node)

        self._server.call(tell)

    def _report(self, ended: WorkerEnded) -> None:
        name, incarnation, reason = ended.name, ended.incarnation, ended.reason
        log.info("process ended", extra={"worker": name, "incarnation": incarnation, "reason": reason})
        self._server.call(lambda core: core.died(name, incarnation, reason))
