"""The supervisor carries out what the controller decides, and tells it what has died.

A loop without a mind of its own: deaths go in, starts and kills come out, and the operator reads one line about each.
A death is heard in two ways, whichever is first: the launcher sees the process end, or the controller misses renewals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.controller import Controller, Forget, Kill, Report, Start
from cluster.controller_service import ControllerServer
from cluster.launcher import Ended, Launcher
from cluster.worker_process import WorkerPlan

log = logging.getLogger("twinpool.supervisor")


class Supervisor:
    """Joins one controller and one launcher."""

    def __init__(
        self,
        server: ControllerServer,
        launcher: Launcher,
        plan: Callable[[Start], WorkerPlan],
        say: Callable[[str], None],
    ) -> None:
        """`plan` turns a granted start into all that a process needs; `say` shows a line to the operator."""
        self._server = server
        self._launcher = launcher
        self._plan = plan
        self._say = say

    def poll(self, timeout_s: float) -> None:
        """One round: do what is due, then wait up to `timeout_s` for a death."""
        for action in self._server.call(Controller.tick):
            match action:
                case Start():
                    log.info("starting", extra={"worker": action.name, "incarnation": action.incarnation})
                    self._launcher.start(self._plan(action))
                case Kill():
                    self._launcher.kill(action.name, action.incarnation, action.pid, action.node)
                case Forget():
                    self._launcher.forget(action.name, action.before)
                case Report():
                    log.warning(action.text)
                    self._say(action.text)
        for ended in self._launcher.ended(timeout_s):
            self._report(ended)

    def _report(self, ended: Ended) -> None:
        name, incarnation, reason = ended.name, ended.incarnation, ended.reason
        log.info("process ended", extra={"worker": name, "incarnation": incarnation, "reason": reason})
        self._server.call(lambda brain: brain.died(name, incarnation, reason))
