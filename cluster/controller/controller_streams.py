"""The controller's ends of streams: orders to a supervisor, changes to a router, leases of workers.

Changes of settings are passed on as orders to the supervisor, which has the settings (`SettingsOrders`); the controller
keeps none, and waits for the answer. Making a change again is safe, so one whose answer is lost, with the supervisor or
with its stream, is made again by whoever asked.

Workers' leases (`LeaseStreams`): renewals come and grants go as frames, one connection a worker. A gRPC call costs the
controller about 0.3 ms, a frame a tenth of that, and a thousand workers renew two thousand times a second. Registration
is a call; its grant says where the stream is.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from twinpool.cluster.controller.controller_actions import ControllerAction
from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import ConfigError, WireError
from twinpool.contracts.messages.calls import CALLS_VERSION
from twinpool.contracts.messages.cluster_view import ClusterView
from twinpool.contracts.messages.leases import RENEWAL_BYTES, SILENCE_S, UNREAD_BYTES, LeaseGrant, Renewal
from twinpool.contracts.messages.pool_changes import MAX_SETTINGS_BYTES, SettingsAnswer, SettingsChange
from twinpool.contracts.messages.stream_frames import StreamOpening
from twinpool.contracts.wire.frame_connection import FrameConnection, FrameListener
from twinpool.contracts.wire.message_codec import decode, encode
from twinpool.contracts.wire.socket_acceptor import listening

log = logging.getLogger("twinpool.controller")

BACKLOG = 1024
MAX_STREAMS = 8192
"""The most workers that have a stream at once; others renew by calls."""


class LeaseStreams:
    """The listener for workers, and their streams. Used on one event loop."""

    def __init__(
        self,
        renew: Callable[[Renewal], LeaseGrant],
        secret: str,
        certificate: CertificateFiles | None,
    ) -> None:
        """`renew` answers a renewal, and raises `WireError` where it can't. Other
        arguments are those of `RouterStreams`."""
        self._renew, self._access = renew, access_token(secret)
        self._tls = NodeTls(certificate) if certificate is not None else None
        self._listener: FrameListener | None = None
        self._streams: set[FrameConnection] = set()

    async def start(self, address: str) -> int:
        """Listen on a free port of `address`; returns the port. Raises `OSError` when the address can't be bound."""
        bound = listening(address, backlog=BACKLOG)
        self._listener = FrameListener(bound, self._take, SILENCE_S, self._tls)
        return int(bound.getsockname()[1])

    async def stop(self) -> None:
        """Listen no more, and end all streams. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        for stream in list(self._streams):
            stream.abort()
        self._streams.clear()

    def _take(self, connection: FrameConnection) -> None:
        connection.on_frame = lambda frame: self._open(connection, frame)
        connection.on_end = lambda reason: self._ended(connection)

    def _ended(self, connection: FrameConnection) -> None:
        self._streams.discard(connection)
        if self._listener is not None:
            self._listener.release(connection)

    def _open(self, connection: FrameConnection, frame: bytes) -> None:
        """Take a stream's first frame, in which the worker proves that it belongs to the cluster."""
        try:
            opening = decode(StreamOpening, frame)[0]
        except WireError as error:
            log.warning("a lease stream whose opening can't be read was refused: %s", error)
            connection.fail(f"its opening can't be read: {error}")
            return
        if self._access and not hmac.compare_digest(opening.access.encode(), self._access.encode()):
            log.warning("a lease stream without the cluster's token was refused")
            connection.fail("it lacks the cluster's token")
            return
        if opening.protocol != CALLS_VERSION:
            log.warning("a lease stream of version %d was refused", opening.protocol)
            connection.fail(f"it is of version {opening.protocol}, and this controller speaks {CALLS_VERSION}")
            return
        if len(self._streams) >= MAX_STREAMS:
            connection.fail("there are too many")
            return
        self._streams.add(connection)
        if self._listener is not None:
            self._listener.release(connection)
        connection.max_bytes = RENEWAL_BYTES
        connection.on_frame = lambda renewal: self._answer(connection, renewal)

    def _answer(self, connection: FrameConnection, frame: bytes) -> None:
        if (waiting := connection.unread_bytes) > UNREAD_BYTES:
            log.warning("a lease stream whose worker reads no grants is ended: %d bytes wait for it", waiting)
            connection.fail(f"its worker reads no grants: {waiting} bytes wait for it")
            return
        try:
            grant = self._renew(decode(Renewal, frame)[0])
        except WireError as error:
            log.warning("a renewal that makes no sense ends its stream: %s", error)
            connection.fail(str(error))
        else:
            connection.send(encode(grant))


MAX_ORDERS = 64 * 1024
"""Orders that may wait for a supervisor that doesn't read, before its stream is ended."""


class SupervisorLine:
    """Orders on their way to one supervisor."""

    def __init__(self) -> None:
        self._orders: list[ControllerAction] = []
        self._more = asyncio.Event()
        self.ended = ""
        """Why the line is over; empty while it is not."""

    def send(self, orders: Sequence[ControllerAction]) -> None:
        self._orders += orders
        if len(self._orders) > MAX_ORDERS:
            self.end("the supervisor doesn't read its orders")
        elif orders:
            self._more.set()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._more.set()

    async def next(self) -> list[ControllerAction]:
        """The orders since the last call, once there are some; none when the line has ended."""
        await self._more.wait()
        self._more.clear()
        orders, self._orders = self._orders, []
        return [] if self.ended else orders


class WatcherLine:
    """Changes of the table on their way to one watcher."""

    def __init__(self, takes_changes: bool, answers: bool = False) -> None:
        self.answers = answers
        """Whether it answers questions about requests."""
        self.takes_changes = takes_changes
        """Whether changes will do; else the watcher gets the whole table each time."""
        self.changes: list[ClusterView] = []
        self.more = asyncio.Event()


ANSWER_S = 15.0
"""Seconds that a supervisor has to answer: it may be starting again, measuring a node, or starting processes."""
Send = Callable[[SettingsChange], None]


class SettingsOrders:
    """The one change that is under way at a time. Use it on one event loop."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._numbers = itertools.count(1)
        self._waiting: tuple[int, asyncio.Future[SettingsAnswer]] | None = None
        self._sent = False
        """Whether the change that waits for its answer was sent: one that waits for a supervisor goes to the next."""
        self._send: Send | None = None
        self._there = asyncio.Event()

    def come(self, send: Send) -> None:
        """Note that a supervisor has come; `send` sends it an order."""
        self._send = send
        self._there.set()

    async def change(self, change: SettingsChange) -> SettingsAnswer:
        """Have the supervisor make a change, once there is one.

        Raises `ConfigError` where it refuses, isn't there or doesn't answer in time, or goes away.
        """
        if len(change.settings) > MAX_SETTINGS_BYTES:
            raise ConfigError(f"settings have at most {MAX_SETTINGS_BYTES} bytes, got {len(change.settings)}")
        if self._waiting is not None:
            raise ConfigError("another change of settings is being made; try again")
        number = next(self._numbers)
        future: asyncio.Future[SettingsAnswer] = asyncio.get_running_loop().create_future()
        self._waiting = number, future
        self._sent = sent = False
        try:
            async with asyncio.timeout(self._answer_s):
                while (send := self._send) is None:
                    await self._there.wait()
                send(replace(change, number=number))
                self._sent = sent = True
                answer = await future
        except TimeoutError:
            text = f"the supervisor has not answered in {self._answer_s:g} s, and may yet make the change; try again"
            away = f"no supervisor is there to change the settings (waited {self._answer_s:g} s for it); try again"
            raise ConfigError(text if sent else away) from None
        finally:
            self._waiting = None
        if answer.refusal:
            raise ConfigError(answer.refusal)
        return answer

    def take(self, answers: Iterable[SettingsAnswer]) -> None:
        """Take in what a supervisor answers; nobody waits for the answer to an earlier change any more."""
        for answer in answers:
            if self._waiting is not None and self._waiting[0] == answer.number and not self._waiting[1].done():
                self._waiting[1].set_result(answer)

    def lost(self) -> None:
        """Note that the supervisor is gone, or another one has come."""
        self._send = None
        self._there.clear()
        if self._sent and self._waiting is not None and not self._waiting[1].done():
            text = "the supervisor went away before it had answered, and may have made the change; try again"
            self._waiting[1].set_exception(ConfigError(text))
