"""A process of the simulated cluster: running, stopped or dead.

A stopped process (SIGSTOP, a swapped-out machine, a long pause of its runtime) does nothing; messages that arrive
meanwhile wait in its sockets. A dead process does nothing ever again, and messages that arrive are lost.
"""

from __future__ import annotations

from collections.abc import Callable

from twinpool.sim.fabric.virtual_time import TimerEntry, VirtualTime


class SimProcess:
    """One process on one node."""

    def __init__(self, agenda: VirtualTime, label: str, node: str, pid: int) -> None:
        self.label, self.node, self.pid = label, node, pid
        self.name = label.partition("#")[0]
        """Its label without the incarnation."""
        self.alive = True
        self.stopped = False
        self.computes_until = 0.0
        """When the step under way is over: what the process sends before leaves it then."""
        self._agenda = agenda
        self._deferred: list[Callable[[], None]] = []
        self._on_death: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return self.label

    def do(self, run: Callable[[], None]) -> None:
        """Run a function in the process: now, or when it goes on if it is stopped, or never if it is dead."""
        if not self.alive:
            return
        if self.stopped:
            self._deferred.append(run)
        else:
            run()

    def later(self, delay_s: float, run: Callable[[], None]) -> TimerEntry:
        """`do` after `delay_s` seconds."""
        return self._agenda.after(delay_s, lambda: self.do(run))

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        if not self.stopped:
            return
        self.stopped = False
        deferred, self._deferred = self._deferred, []
        for at, run in enumerate(deferred):
            if self.stopped:
                self._deferred += deferred[at:]
                return
            self.do(run)

    def on_death(self, run: Callable[[], None]) -> None:
        """Call `run` as soon as the process dies, as the system tells watchers."""
        self._on_death.append(run)

    def die(self) -> None:
        """End the process, and call the listeners of `on_death`. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._deferred.clear()
        listeners, self._on_death = self._on_death, []
        for listener in listeners:
            listener()
