"""Virtual time, and the processes that live in it.

The clock stands still while code runs; a queue holds the events that are due. A stopped process (SIGSTOP, a swapped-out
machine, a long pause of its runtime) does nothing; messages that arrive meanwhile wait in its sockets. A dead process
does nothing ever again, and messages that arrive are lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class TimerEntry:
    """An event that will run, unless it is cancelled."""

    run: Callable[[], None] | None

    def cancel(self) -> None:
        self.run = None


class VirtualTime:
    """Implements `contracts.clock.Clock`. Events that are due at the same time run in the order of their entry."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, TimerEntry]] = []
        self._entered = 0

    def now(self) -> float:
        return self._now

    def after(self, delay_s: float, run: Callable[[], None]) -> TimerEntry:
        """Call `run` in `delay_s` seconds; a negative delay counts as 0."""
        entry = TimerEntry(run)
        self._entered += 1
        heapq.heappush(self._heap, (self._now + max(0.0, delay_s), self._entered, entry))
        return entry

    def next(self) -> bool:
        """Advance to the next event and run it; False when there is none."""
        while self._heap:
            at, _, entry = heapq.heappop(self._heap)
            if entry.run is not None:
                self._now = at
                run, entry.run = entry.run, None
                run()
                return True
        return False


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
