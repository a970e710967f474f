"""The simulated router's links to workers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.router.links.worker_links import MAX_RETRY_S, RETRY_FIRST_S
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.fabric.sim_network import pack_commands, unpack_commands, unpack_events
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_worker import SimHost

KEEPALIVE_S = 20.0
"""Seconds without a sign of life after which gRPC closes a connection: `keepalive_time` and `keepalive_timeout`."""
CONNECT_S = 5.0
MAX_LATE_S = 3.0
"""Seconds after which the router hears of a reset at the latest."""


class LinkOwner(Protocol):
    """The router, as its links see it."""

    world: SimWorld
    process: SimProcess

    def linked(self, key: WorkerKey) -> None: ...

    def unlinked(self, key: WorkerKey, end: StreamEnd) -> None: ...

    def events(self, key: WorkerKey, events: Sequence[Event]) -> None: ...


class SimLink:
    """The router's connection to one incarnation of one worker, made again whenever it ends."""

    def __init__(self, router: LinkOwner, key: WorkerKey, host: SimHost) -> None:
        self.router, self.key, self.host = router, key, host
        self.closed = False
        self._pause = RETRY_FIRST_S
        self._number = 0
        self._session: SessionId | None = None
        self._connect()

    def _connect(self) -> None:
        """Open a connection and ask for a session; messages of earlier tries are ignored from now on."""
        if self.closed:
            return
        self._number += 1
        number, network = self._number, self.router.world.exchange.network
        mine, theirs = self.router.process, self.host.process
        self._heard = self.router.world.agenda.now()
        self.linked = False
        self._there = network.pipe(mine, theirs, lambda: self._reset(number))
        self._back = network.pipe(theirs, mine)
        there, back = self._there, self._back

        def arrived() -> None:
            if self.host.incarnation != self.key[1]:
                back.send(lambda: self._broken(number, "it is another incarnation"))
                return
            session = self.host.open_session(
                lambda frame: back.send(lambda: self._events(number, frame)),
                lambda end: back.send(lambda: self._broken(number, end.reason, end.left)),
            )
            if session is None:
                back.send(lambda: self._broken(number, "the worker has ended"))
            else:
                self._session = session
                # The worker learns of a reset from its own end; a message from here might be lost with the next reset.
                back.on_reset = lambda: self.host.close_session(session)
                mine.on_death(lambda: there.send(lambda: self.host.close_session(session)))
                back.send(lambda: self._opened(number))

        if theirs.alive:
            there.send(lambda: theirs.do(arrived))
        else:
            self.router.process.later(0.001, lambda: self._broken(number, "connection refused"))
        self._watch(number)

    def _reset(self, number: int) -> None:
        """Hear of a reset: at once or, where a firewall dropped the packet that said so, long after the worker. It is
        drawn here, so that resets move nothing else that a seed draws."""
        rng = random.Random(f"{self.key[0]}:{number}:{self.router.world.agenda.now()}")
        late_s = rng.choice((0.0, rng.uniform(0.0, MAX_LATE_S)))
        self.router.process.later(late_s, lambda: self._broken(number, "the connection was reset"))

    def _watch(self, number: int) -> None:
        """Watch the connection as keepalive does: close it when nothing comes back for too long."""

        def look() -> None:
            if self.closed or number != self._number:
                return
            network, now = self.router.world.exchange.network, self.router.world.agenda.now()
            answers = not self.host.process.stopped and network.reaches(self.router.process, self.host.process)
            if answers:
                self._heard = now
            silent = now - self._heard
            if silent >= (KEEPALIVE_S if self.linked else CONNECT_S):
                self._broken(number, "nothing was heard of it for too long")
            else:
                self.router.process.later(1.0, look)

        self.router.process.later(1.0, look)

    def _opened(self, number: int) -> None:
        if number == self._number and not self.closed:
            self.linked, self._pause = True, RETRY_FIRST_S
            self.router.linked(self.key)

    def _events(self, number: int, frame: bytes) -> None:
        if number == self._number and not self.closed:
            self.router.events(self.key, unpack_events(self.key[1], frame))

    def _broken(self, number: int, reason: str, left: bool = False) -> None:
        if number != self._number or self.closed:
            return
        self._hang_up()
        self._number += 1
        if self.linked:
            self.linked = False
            self.router.unlinked(self.key, StreamEnd(reason, left))
        self.router.process.later(self._pause, self._connect)
        self._pause = min(2 * self._pause, MAX_RETRY_S)

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._there.send(lambda: self.host.close_session(session))

    def send(self, commands: list[Command]) -> None:
        if self.linked and self._session is not None:
            for frame in pack_commands(commands):
                self._there.send(partial(self._arrived, self._session, frame))

    def _arrived(self, session: SessionId, frame: bytes) -> None:
        self.host.send(session, unpack_commands(frame))

    def close(self, *, left: bool = False) -> None:
        self._hang_up()
        self.closed = True
        if self.linked:
            self.linked = False
            self.router.unlinked(self.key, StreamEnd("the controller no longer shows it as alive", left))
