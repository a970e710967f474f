"""The network: connections as TCP gives them, between processes on nodes that may lose sight of each other.

    order       what is sent down one pipe arrives in that order, each once; two pipes know nothing of each other
    delay       drawn for each message, by the speed of the network at the moment
    partition   between two nodes nothing arrives; it waits, as TCP repeats what isn't acknowledged, until they meet
    stall       the same for two processes
    reset       a connection is cut: what is in its pipes is lost, and its ends hear of it if they ask to
    silence     heartbeats cut a connection whose ends didn't hear each other for `timeout_s`

Whoever made a connection that was cut makes it anew.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from sim.fabric.sim_process import SimProcess
from sim.fabric.virtual_time import VirtualTime


class SimPipe:
    """One direction of a connection."""

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
        """Have `deliver` called when it arrives: it stands for the target's socket, so it works on a stopped target."""
        if self.closed:
            return
        self._last = max(self._last, self._network.arrival())
        self._under_way.append((self._last, deliver))
        self._go_on()

    def close(self) -> None:
        """Lose what is under way; nothing can be sent any more."""
        self.closed = True
        self.lose()

    def lose(self) -> int:
        """Lose what is under way; returns how many messages."""
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
            self._network.park(self)
            return
        _, deliver = self._under_way.popleft()
        if self.target.alive:
            deliver()
        self._go_on()

    def swap_in(self) -> None:
        self._arrive()


class SimNetwork:
    """Who reaches whom, and how fast."""

    def __init__(self, agenda: VirtualTime, rng: random.Random, delay_s: float, timeout_s: float) -> None:
        self.agenda, self.timeout_s = agenda, timeout_s
        self._rng = rng
        self._delay_s = delay_s
        self.slow = 1.0
        """Delays are so many times as long."""
        self._cut: list[tuple[str, str]] = []
        """Pairs of nodes or processes that don't reach each other."""
        self._parked: list[SimPipe] = []
        self._pipes: list[SimPipe] = []

    def arrival(self) -> float:
        """When what is sent now would arrive if nothing held it up."""
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
        """Some ends have not heard each other for `timeout_s`."""
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
        """From now on these two (nodes, or names of workers; ``*``: all others) don't reach each other."""
        pair = one, other
        self._cut.append(pair)
        self.agenda.after(self.timeout_s, lambda: self.silence() if pair in self._cut else None)

    def join(self, one: str, other: str) -> None:
        """Undo one `part`; what waited arrives."""
        if (one, other) in self._cut:
            self._cut.remove((one, other))
        parked, self._parked = self._parked, []
        for pipe in parked:
            pipe.swap_in()

    def reaches(self, one: SimProcess, other: SimProcess) -> bool:
        if one.node == other.node and not any(_is_name(pair) for pair in self._cut):
            return True
        return not any(_parts(pair, one, other) or _parts(pair, other, one) for pair in self._cut)

    def park(self, pipe: SimPipe) -> None:
        self._parked.append(pipe)


def _is_name(pair: tuple[str, str]) -> bool:
    return not pair[0].startswith("node-")


def _parts(pair: tuple[str, str], one: SimProcess, other: SimProcess) -> bool:
    """Whether `pair` keeps these two apart. Processes of one node meet through the loopback, whatever its network."""
    if _is_name(pair):
        return pair[0] == one.name and pair[1] in ("*", other.name)
    return one.node != other.node and pair[0] == one.node and pair[1] in ("*", other.node)
