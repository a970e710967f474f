"""The worker's end of its lease stream (`cluster.controller.lease_streams`): renewals go and grants come as frames."""

from __future__ import annotations

import asyncio
from collections import deque

from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.messages.calls import CALLS_VERSION
from twinpool.contracts.messages.leases import GRANT_BYTES, SILENCE_S, LeaseGrant, Renewal
from twinpool.contracts.messages.stream_frames import StreamOpening
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.message_codec import decode, encode


class LeaseStream:
    """One open stream to the controller. Used on one event loop."""

    def __init__(self) -> None:
        self._connection = FrameConnection(SILENCE_S)
        self._connection.max_bytes = GRANT_BYTES
        self._connection.on_frame, self._connection.on_end = self._granted, self._ended
        self._asked: deque[asyncio.Future[LeaseGrant]] = deque()
        self._over = ""

    @classmethod
    async def open(
        cls,
        endpoint: str,
        incarnation: Incarnation,
        secret: str,
        certificate: CertificateFiles | None,
        *,
        timeout_s: float,
    ) -> LeaseStream:
        """Open a stream to ``host:port``, for this incarnation.

        Raises `ConnectionError` where that takes longer than `timeout_s`, or it can't be reached, and `ConfigError`
        where the certificate can't be read.
        """
        stream, (host, _, port) = cls(), endpoint.rpartition(":")
        context = NodeTls(certificate).client() if certificate is not None else None
        name = NODE_NAME if context is not None else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: stream._connection, host, int(port), ssl=context, server_hostname=name
                )
        except (OSError, ValueError, TimeoutError) as error:
            stream.close()
            raise ConnectionError(f"the controller's stream at {endpoint}: {error or 'no answer'}") from None
        except asyncio.CancelledError:  # Nobody has it to close it any more.
            stream.close()
            raise
        stream._connection.send(encode(StreamOpening(CALLS_VERSION, incarnation, access_token(secret))))
        return stream

    async def renew(self, renewal: Renewal, timeout_s: float) -> LeaseGrant:
        """Send a renewal and return its grant. Raises `ConnectionError` where none comes within `timeout_s`."""
        if self._over:
            raise ConnectionError(self._over)
        asked: asyncio.Future[LeaseGrant] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._connection.send(encode(renewal))
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        except TimeoutError:
            raise ConnectionError(f"no answer in {timeout_s:g} s") from None

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._connection.abort()
        self._ended("the stream was closed")

    def _granted(self, frame: bytes) -> None:
        try:
            grant, _ = decode(LeaseGrant, frame)
        except WireError as error:
            self._connection.abort()
            self._ended(f"a grant that can't be read: {error}")
            return
        if self._asked and not (asked := self._asked.popleft()).done():
            asked.set_result(grant)

    def _ended(self, reason: str) -> None:
        self._over = self._over or reason
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ConnectionError(reason))
        self._asked.clear()
