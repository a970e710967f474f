"""The worker's end of the routers' streams: one connection for each router, one frame for each step with events.

The streams run on the service's event loop, beside the engine thread; events cross over by `call_soon_threadsafe`.
What waits for a router is bounded by bytes: one that reads slower than its worker writes is cut off (and its requests
are cancelled), so that it can't fill this process's memory.

A router's first frame names the incarnation that it wants, and has the cluster's token where there is a secret; the
worker's first frame says yes, or why not. A stream that ends for any reason drops its session at the worker.
"""

from __future__ import annotations

import asyncio
import hmac
import logging

from twinpool.cluster.worker_process.grpc_service import LINK_TIMEOUT_S
from twinpool.cluster.worker_process.worker_thread import WorkerClosed, WorkerThread
from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.stream_frames import OLDEST, WEIGHTS_SINCE, StreamEnd, refusal
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.wire.frame_connection import FrameConnection, FrameListener
from twinpool.contracts.wire.message_codec import (
    COMMANDS_BYTES,
    decode_commands,
    decode_opening,
    encode_events,
    opens_version_1,
    refusal_of_version_1,
)
from twinpool.contracts.wire.socket_acceptor import listening

log = logging.getLogger("twinpool.service")

OUTBOX_BYTES = 16 * 1024 * 1024
MAX_ROUTERS = 256
"""The most routers that a worker serves at once; another one is refused."""
OPENING_S = 10.0
"""How long a connection may take until its first frame is there."""
LAST_FRAME_S = 2.0
"""How long a router may take to read why its stream ends."""
BACKLOG = 128


class RouterStream:
    """One router's stream. Used on the service's loop only."""

    def __init__(self, streams: RouterStreams, connection: FrameConnection) -> None:
        self._streams, self._connection = streams, connection
        self._session: SessionId | None = None
        connection.on_frame, connection.on_end = self._open, self._ended
        self._deadline = asyncio.get_running_loop().call_later(OPENING_S, self.end, "the first frame didn't come")

    def end(self, reason: str, left: bool = False) -> None:
        """End the stream, after what was sent; the router is told the reason, and whether the worker has left in order.
        Idempotent."""
        self._close(encode_events(self._streams.incarnation, end=StreamEnd(reason, left)), reason)

    def _close(self, last: bytes, reason: str) -> None:
        self._connection.send(last)
        self._connection.close(LAST_FRAME_S)
        self._ended(reason)

    def _ended(self, reason: str) -> None:
        self._deadline.cancel()
        self._streams.ended(self, self._connection)
        session, self._session = self._session, None
        if session is not None:
            self._streams.host.close_session(session)

    def _open(self, frame: bytes) -> None:
        """Take the first frame."""
        if opens_version_1(frame):
            too_old = refusal("this router", 1)
            log.warning("a router was refused: %s", too_old)
            self._close(refusal_of_version_1(too_old), too_old)
            return
        if why_not := self._streams.refusal(frame):
            self.end(why_not)
            return
        loop = asyncio.get_running_loop()

        def deliver(events: list[Event]) -> None:
            loop.call_soon_threadsafe(self._send, events)

        def ended(end: StreamEnd) -> None:
            loop.call_soon_threadsafe(self.end, end.reason, end.left)

        try:
            self._session = self._streams.host.open_session(deliver, ended)
        except WorkerClosed as error:
            self.end(str(error))
            return
        self._deadline.cancel()
        self._streams.admitted(self, self._connection)
        self._connection.max_bytes = COMMANDS_BYTES
        self._connection.on_frame = self._commands
        self._connection.send(encode_events(self._streams.incarnation))

    def _commands(self, frame: bytes) -> None:
        try:
            commands, others = decode_commands(frame)
        except WireError as error:
            log.warning("a router broke the protocol: %s", error)
            self.end(f"protocol error: a frame can't be read: {error}")
            return
        if others:
            log.warning("%d commands of kinds that this build doesn't know are left out", others)
        if self._session is not None:
            self._streams.host.send(self._session, commands)

    def _send(self, events: list[Event]) -> None:
        if self._session is None:
            return
        # A single frame may be larger than the limit: long prompts have long scores.
        if (waiting := self._connection.unread_bytes) > self._streams.outbox_bytes:
            log.warning("a router that reads too slowly is cut off")
            self.end(f"the router reads too slowly: {waiting} bytes wait for it")
            return
        try:
            frame = encode_events(self._streams.incarnation, events)
        except (ValueError, TypeError, OverflowError) as error:
            # A stream from which events are missing would hang its requests.
            log.exception("events can't be sent")
            self.end(f"an event can't be sent: {error}")
            return
        self._connection.send(frame)


class RouterStreams:
    """The listener for routers, and their streams. Used on one event loop."""

    def __init__(
        self,
        host: WorkerThread,
        incarnation: int,
        secret: str = "",
        link_timeout_s: float = LINK_TIMEOUT_S,
        certificate: CertificateFiles | None = None,
        outbox_bytes: int = OUTBOX_BYTES,
    ) -> None:
        """With a `secret`, routers must have its token (`contracts.cluster_secret`). One that is silent for
        `link_timeout_s` counts as gone. `certificate`: this node's; with it only nodes of the cluster are served, None:
        without TLS. Raises `ConfigError` where it can't be used."""
        self.host, self.outbox_bytes = host, outbox_bytes
        self.incarnation, self._link_timeout_s = Incarnation(incarnation), link_timeout_s
        self._access = access_token(secret)
        self._tls = NodeTls(certificate) if certificate is not None else None
        self._listener: FrameListener | None = None
        self._routers: set[RouterStream] = set()
        self._connections: set[FrameConnection] = set()
        """Those whose socket is open."""

    async def start(self, address: str) -> int:
        """Listen on a free port of `address`; returns the port. Raises `OSError` when the address can't be bound."""
        bound = listening(address, backlog=BACKLOG)
        self._listener = FrameListener(bound, self._take, self._link_timeout_s, self._tls)
        return int(bound.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Listen no more, and end all streams after what was sent to them, within `grace_s`. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        await listener.close()
        for stream in list(self._routers):
            stream.end("the worker ends")
        if flushing := [connection.lost for connection in self._connections]:
            await asyncio.wait(flushing, timeout=grace_s)
        for connection in self._connections:
            connection.abort()

    def _take(self, connection: FrameConnection) -> None:
        self._connections.add(connection)
        connection.lost.add_done_callback(lambda _: self._connections.discard(connection))
        RouterStream(self, connection)

    # ------------------------------------------------------------ for the streams, on the loop

    def refusal(self, frame: bytes) -> str:
        """Return why a router with this first frame isn't admitted; empty where it is."""
        try:
            opening = decode_opening(frame)
        except WireError:
            return "protocol error: the first frame can't be read"
        if self._access and not hmac.compare_digest(opening.access.encode(), self._access.encode()):
            log.warning("a router without the cluster's token was refused")
            return "this stream lacks the cluster's token"
        if opening.incarnation != self.incarnation:
            return f"this is incarnation {self.incarnation}, the call is for incarnation {opening.incarnation}"
        oldest = WEIGHTS_SINCE if self.host.changed_weights else OLDEST
        if too_old := refusal("this router", opening.protocol, oldest=oldest):
            log.warning("a router was refused: %s", too_old)
            return too_old
        if len(self._routers) >= MAX_ROUTERS:
            return f"{MAX_ROUTERS} routers are served already"
        return ""

    def admitted(self, stream: RouterStream, connection: FrameConnection) -> None:
        """Count a stream among the routers'."""
        self._routers.add(stream)
        if self._listener is not None:
            self._listener.release(connection)

    def ended(self, stream: RouterStream, connection: FrameConnection) -> None:
        """Count a stream no more. Idempotent."""
        self._routers.discard(stream)
        if self._listener is not None:
            self._listener.release(connection)
