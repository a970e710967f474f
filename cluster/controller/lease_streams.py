"""The controller's end of workers' lease streams: renewals come and grants go as frames, one connection a worker.

A gRPC call costs the controller about 0.3 ms, a frame a tenth of that, and a thousand workers renew two thousand times
a second. Registration is a call; its grant says where the stream is.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable

from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.calls import CALLS_VERSION
from twinpool.contracts.messages.leases import RENEWAL_BYTES, SILENCE_S, UNREAD_BYTES, LeaseGrant, Renewal
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
