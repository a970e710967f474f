"""A listening socket that accepts `FrameConnection`s; with certificates only from nodes of the cluster.

A connection is a *stranger* from its first packet until `release`: strangers are few, the oldest is cut for a newer
one, so that whoever connects and says nothing takes neither descriptors nor anybody's place.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.socket_acceptor import SocketAcceptor

HANDSHAKE_S = 10.0
"""How long TLS may take."""
STRANGERS = 64


class FrameListener:
    """Accepts connections on `bound` until it is closed. Used on the event loop on which it was made."""

    def __init__(
        self, bound: socket.socket, take: Callable[[FrameConnection], None], silence_s: float, tls: NodeTls | None
    ) -> None:
        """`take` is called with each connection before anything of it is read; `silence_s`: as `FrameConnection`
        takes it. `tls`: this node's, None: without TLS."""
        self._bound, self._take, self._silence_s, self._tls = bound, take, silence_s, tls
        self._strangers: dict[FrameConnection, asyncio.Task[None]] = {}
        self._acceptor = SocketAcceptor(bound, self._begin)

    def release(self, connection: FrameConnection) -> None:
        """Count a connection as a stranger no more: it was admitted, or has ended. Idempotent."""
        self._strangers.pop(connection, None)

    async def close(self) -> None:
        """Accept nothing any more, and cut strangers; admitted connections go on. Idempotent."""
        self._acceptor.close()
        while self._strangers:
            self._cut_oldest("the listener is closed")
        await self._acceptor.wait_closed()
        self._bound.close()

    def _begin(self, accepted: socket.socket, peer: Any) -> None:
        connection = FrameConnection(self._silence_s)
        self._take(connection)
        opening = self._open(accepted, connection)
        self._strangers[connection] = self._acceptor.begin(accepted, opening, lambda _: connection.unmade())
        if len(self._strangers) > STRANGERS:
            self._cut_oldest("others came, and its first frame hadn't")

    def _cut_oldest(self, reason: str) -> None:
        connection, task = next(iter(self._strangers.items()))
        self.release(connection)
        task.cancel()
        connection.fail(reason)

    async def _open(self, accepted: socket.socket, connection: FrameConnection) -> None:
        context = self._tls.server() if self._tls is not None else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_S if context else None
        )
