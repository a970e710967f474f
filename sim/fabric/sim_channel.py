"""The control channels of rooms over the simulated network: implements `transfer.net.control_channel.ControlTransport`.

Channels behave as ZMQ's do: one to an endpoint that no process serves waits for ever, and one that is reset comes back
by itself, without the messages that were in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from twinpool.sim.fabric.sim_network import SimNetwork, SimPipe
from twinpool.sim.fabric.sim_process import SimProcess
from twinpool.transfer.net.control_channel import ProcessIdentity as Mark

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
        exchange.inboxes[self.endpoint] = self

    def arrive(self, channel: SimChannel, data: bytes) -> None:
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
            there = self._network.pipe(process, inbox.process, self._reset)
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

    def _reset(self) -> None:
        """Handle a reset of the way there: messages in flight back are lost as well."""
        if self._pipes is not None and not self._closed:
            self._pipes[1].lose()
            self._cut, self._down = True, True
            self._wake()

    def cut(self) -> bool:
        cut, self._cut = self._cut, False
        return cut

    @property
    def up(self) -> bool:
        """Whether the channel is connected; it connects again as soon as its inbox can be reached."""
        inbox = self._inbox
        if inbox is None or not inbox.process.alive:
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
