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

The control channels of rooms run over it (`transfer.net.control_channel.ControlTransport`). They behave as ZMQ does:
one to an endpoint that no process serves waits for ever, and one that is reset comes back by itself, without the
messages that were in flight.

Messages cross it as the bytes of production: each is encoded by its sender and decoded by its receiver, by
`contracts.wire.message_codec` and the codecs beside the services, so a field that they lose or round is lost or rounded
here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.wire.message_codec import (
    FrameWriter,
    decode,
    decode_commands,
    decode_events,
    encode,
    encode_events,
)
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualTime
from twinpool.transfer.net.control_channel import ProcessIdentity as Mark

MessageT = TypeVar("MessageT", bound=Message)


def pack_commands(commands: Sequence[Command]) -> list[bytes]:
    """Encode commands as frames of a router's stream."""
    return list(FrameWriter().frames(commands))


def unpack_commands(frame: bytes) -> Sequence[Command]:
    commands, left_out = decode_commands(frame)
    assert not left_out, "both ends are of one build"
    return commands


def pack_events(incarnation: Incarnation, events: Sequence[Event]) -> bytes:
    """Encode events as a frame of a worker's stream."""
    return encode_events(incarnation, events)


def unpack_events(incarnation: Incarnation, frame: bytes) -> Sequence[Event]:
    """Decode a frame of a worker's stream. Raises `WireError` for a frame of another incarnation."""
    message, left_out = decode_events(frame)
    assert not left_out, "both ends are of one build"
    if message.incarnation != incarnation:
        raise WireError(f"a frame of incarnation {message.incarnation} came on {incarnation}'s stream")
    return message.events


def there(message: MessageT) -> MessageT:
    """Return a message of the controller's calls as its receiver decodes it."""
    return decode(type(message), encode(message))[0]


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


SimWake = Callable[[], None]


class SimSwitch:
    """The directory of the network: inboxes by endpoint, and processes by pid."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.inboxes: dict[str, SimInbox] = {}
        self.processes: dict[int, SimProcess] = {}


class SimInbox:
    """Implements `transfer.net.control_channel.ControlInbox`."""

    def __init__(self, exchange: SimSwitch, process: SimProcess, wake: SimWake) -> None:
        self.endpoint = f"sim://{process.label}"
        self.process = process
        self._exchange, self._wake = exchange, wake
        self._arrived: deque[tuple[bytes, bytes]] = deque()
        self._routes: dict[bytes, SimChannel] = {}
        self.closed = False
        """Whether nobody serves the endpoint any more, though the process may go on."""
        exchange.inboxes[self.endpoint] = self

    def arrive(self, channel: SimChannel, data: bytes) -> None:
        if self.closed:
            channel.reset()
            return
        self._routes[channel.identity] = channel
        self._arrived.append((channel.identity, data))
        self._wake()

    def receive(self) -> list[tuple[bytes, bytes]]:
        arrived, self._arrived = list(self._arrived), deque()
        return arrived

    def send(self, identity: bytes, data: bytes) -> None:
        channel = self._routes.get(identity)
        if channel is not None:
            channel.back(data)

    def close(self) -> None:
        self.closed = True
        self._exchange.inboxes.pop(self.endpoint, None)


class SimChannel:
    """Implements `transfer.net.control_channel.Channel`."""

    def __init__(self, exchange: SimSwitch, process: SimProcess, endpoint: str, identity: bytes, wake: SimWake) -> None:
        self.identity = identity
        self._wake = wake
        self._arrived: deque[bytes] = deque()
        self._closed = False
        inbox = exchange.inboxes.get(endpoint)
        self._inbox = inbox
        self._network, self._process = exchange.network, process
        self._pipes: tuple[SimPipe, SimPipe] | None = None
        self._cut, self._down = False, False
        if inbox is not None:
            there = self._network.pipe(process, inbox.process, self.reset)
            self._pipes = there, self._network.pipe(inbox.process, process)

    def send(self, data: bytes) -> None:
        if self._pipes is not None and self._inbox is not None:
            inbox = self._inbox
            self._pipes[0].send(lambda: inbox.arrive(self, data))

    def back(self, data: bytes) -> None:
        """Send from the inbox's end to this one."""
        if self._pipes is not None:
            self._pipes[1].send(lambda: self._arrive(data))

    def _arrive(self, data: bytes) -> None:
        if not self._closed:
            self._arrived.append(data)
            self._wake()

    def receive(self) -> bytes | None:
        return self._arrived.popleft() if self._arrived else None

    def reset(self) -> None:
        """Handle a reset of the way there: messages in flight are lost, both ways."""
        if self._pipes is not None and not self._closed:
            for pipe in self._pipes:
                pipe.lose()
            self._cut, self._down = True, True
            self._wake()

    def cut(self) -> bool:
        cut, self._cut = self._cut, False
        return cut

    @property
    def up(self) -> bool:
        """Whether the channel is connected; it connects again as soon as its inbox can be reached."""
        inbox = self._inbox
        if inbox is None or inbox.closed or not inbox.process.alive:
            return False
        if self._down and not inbox.process.stopped and self._network.reaches(self._process, inbox.process):
            self._down = False
        return not self._down

    def close(self) -> None:
        """Receive nothing any more. Messages already sent still arrive, as with a closed socket."""
        self._closed = True


class SimWatch:
    """Implements `transfer.net.control_channel.Watch`."""

    def __init__(self, processes: Sequence[SimProcess], wake: SimWake) -> None:
        self.pid = processes[0].pid
        self._processes = processes
        for process in processes:
            process.on_death(wake)

    @property
    def dead(self) -> bool:
        return not any(process.alive for process in self._processes)

    def close(self) -> None: ...


class SimControlTransport:
    """Implements `transfer.net.control_channel.ControlTransport` for one process, which arriving messages wake."""

    def __init__(self, exchange: SimSwitch, process: SimProcess, wake: SimWake) -> None:
        self._exchange, self._process, self._wake = exchange, process, wake
        exchange.processes[process.pid] = process

    def mine(self) -> Mark:
        return self._process.pid, 1, self._process.node

    def listen(self) -> SimInbox:
        return SimInbox(self._exchange, self._process, self._wake)

    def connect(self, endpoint: str, identity: bytes) -> SimChannel:
        return SimChannel(self._exchange, self._process, endpoint, identity, self._wake)

    def watch(self, processes: Sequence[Mark]) -> SimWatch | None:
        """Watch processes of this node; None for others. Raises `ProcessLookupError` where all are dead."""
        if any(node != self._process.node for _, _, node in processes):
            return None
        found = [self._exchange.processes[pid] for pid, _, _ in processes]
        if not any(process.alive for process in found):
            raise ProcessLookupError(f"pid {processes[0][0]} is dead")
        return SimWatch(found, self._wake)
