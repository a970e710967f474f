"""The simulated network: connections as TCP gives them, between processes on nodes that may be partitioned.

    order       messages in one pipe arrive in the order in which they were sent, each once; pipes are independent
    delay       drawn for each message, by the speed of the network at the moment
    partition   no message arrives between two nodes; messages wait until the partition ends, as TCP sends again
                whatever isn't acknowledged
    stall       a partition of two processes
    reset       a connection is cut: messages in its pipes are lost, and `on_reset` of each pipe is called
    death       a message that arrives at a dead process is lost, and its connection is cut
    silence     heartbeats reset a connection whose ends didn't hear each other for `timeout_s` seconds

A connection that was cut must be made anew by the process that made it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from twinpool.sim.fabric.sim_process import SimProcess
from twinpool.sim.fabric.virtual_time import VirtualTime


class SimPipe:
    """One direction of a connection between two processes."""

    def __init__(
        self, network: SimNetwork, source: SimProcess, target: SimProcess, on_reset: Callable[[], None] | None = None
    ) -> None:
        self._network = network
        self.on_reset = on_reset
        self.source, self.target = source, target
        self._under_way: deque[tuple[float, Callable[[], None]]] = deque()
        self._last = 0.0
        self._busy = False
        self.closed = False

    def send(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` when the message arrives. It stands for the target's socket: a stopped target receives too."""
        if self.closed:
            return
        held_s = max(0.0, self.source.computes_until - self._network.agenda.now())
        self._last = max(self._last, self._network.arrival() + held_s)
        self._under_way.append((self._last, deliver))
        self._go_on()

    def close(self) -> None:
        """Lose the messages in flight, and ignore all later ones."""
        self.closed = True
        self.lose()

    def lose(self) -> int:
        """Lose the messages in flight; returns how many."""
        lost = len(self._under_way)
        self._under_way.clear()
        return lost

    def _go_on(self) -> None:
        if self._under_way and not self._busy:
            self._busy = True
            self._network.agenda.after(self._under_way[0][0] - self._network.agenda.now(), self._arrive)

    def _arrive(self) -> None:
        self._busy = False
        if not self._under_way:
            return
        if self._under_way[0][0] > self._network.agenda.now():
            self._go_on()
            return
        if not self._network.reaches(self.source, self.target):
            self._busy = True
            self._network.hold(self)
            return
        _, deliver = self._under_way.popleft()
        if self.target.alive:
            deliver()
        elif self.source.alive:
            self.lose()
            if self.on_reset is not None:
                self.on_reset()
        self._go_on()

    def resume(self) -> None:
        self._arrive()


class SimNetwork:
    """The pipes between processes, their partitions and their delays."""

    def __init__(self, agenda: VirtualTime, rng: random.Random, delay_s: float, timeout_s: float) -> None:
        self.agenda, self.timeout_s = agenda, timeout_s
        self._rng = rng
        self._delay_s = delay_s
        self.slow = 1.0
        """A factor on delays."""
        self._cut: list[tuple[str, str]] = []
        """Pairs of nodes, or of names of processes, that don't reach each other; the second may be ``*``."""
        self._held: list[SimPipe] = []
        self._pipes: list[SimPipe] = []

    def arrival(self) -> float:
        """Draw the time at which a message that is sent now arrives, if no partition holds it up."""
        delay = self._delay_s * self.slow * (0.2 + self._rng.expovariate(1.25))
        return self.agenda.now() + delay

    def pipe(self, source: SimProcess, target: SimProcess, on_reset: Callable[[], None] | None = None) -> SimPipe:
        pipe = SimPipe(self, source, target, on_reset)
        self._pipes.append(pipe)
        return pipe

    def reset(self, one: str, other: str) -> int:
        """Reset all connections between two processes, by name; returns how many messages were lost."""
        return self._reset(lambda pipe: {pipe.source.name, pipe.target.name} == {one, other})

    def silence(self) -> None:
        """Reset the connections whose ends haven't heard each other for `timeout_s` seconds."""
        self._reset(lambda p: p.source.stopped or p.target.stopped or not self.reaches(p.source, p.target))

    def _reset(self, chosen: Callable[[SimPipe], bool]) -> int:
        self._pipes = [p for p in self._pipes if not p.closed and p.source.alive and p.target.alive]
        lost = 0
        for pipe in [p for p in self._pipes if chosen(p)]:
            lost += pipe.lose()
            if pipe.on_reset is not None:
                pipe.on_reset()
        return lost

    def part(self, one: str, other: str) -> None:
        """Separate two nodes, or two names of processes, until `join`; `other` may be ``*``: all others."""
        pair = one, other
        self._cut.append(pair)
        self.agenda.after(self.timeout_s, lambda: self.silence() if pair in self._cut else None)

    def join(self, one: str, other: str) -> None:
        """Undo one `part`; messages that waited arrive."""
        if (one, other) in self._cut:
            self._cut.remove((one, other))
        held, self._held = self._held, []
        for pipe in held:
            pipe.resume()

    def reaches(self, one: SimProcess, other: SimProcess) -> bool:
        if one.node == other.node and not any(_is_name(pair) for pair in self._cut):
            return True
        return not any(_parts(pair, one, other) or _parts(pair, other, one) for pair in self._cut)

    def hold(self, pipe: SimPipe) -> None:
        self._held.append(pipe)


def _is_name(pair: tuple[str, str]) -> bool:
    return not pair[0].startswith("node-")


def _parts(pair: tuple[str, str], one: SimProcess, other: SimProcess) -> bool:
    """Whether `pair` separates two processes. Partitions of nodes never separate processes of one node (loopback)."""
    if _is_name(pair):
        return pair[0] == one.name and pair[1] in ("*", other.name)
    return one.node != other.node and pair[0] == one.node and pair[1] in ("*", other.node)
