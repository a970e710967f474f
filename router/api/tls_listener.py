"""A listening socket of the HTTP endpoint that speaks TLS: every connection is counted from its first packet, and
handshakes have a deadline.

An ASGI server that speaks TLS itself hands a connection over when its handshake is done: until then nobody counts it,
and clients that never finish theirs could take every descriptor. Here the limit on connections knows a connection from
the moment at which it was accepted, and may close it. Each handshake takes the certificate of its moment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.wire.socket_acceptor import SocketAcceptor
from twinpool.router.api.connection_limits import BoundedHttpProtocol
from twinpool.router.security.https_certificate import HttpsCertificate

SHUTDOWN_S = 1.0
"""How long a client may take to end TLS in order, less than the router's end takes."""


class TlsHandshake:
    """One connection between its acceptance and the end of its handshake, as the limit on connections sees it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.task: asyncio.Task[None] | None = None

    def cut(self) -> None:
        """Close the connection at once."""
        if self.task is not None:
            self.task.cancel()

    def late(self, now: float, config: RouterConfig) -> str | None:
        """Return nothing: the handshake has a deadline of its own."""
        return None


class TlsListener:
    """Accepts connections on `bound` until it is closed. Used on one event loop; a server of it, as `asyncio`'s are.

    `make` makes the protocol that has a connection from the end of its handshake on, which may take `handshake_s`
    seconds. Whoever speaks something else is cut off without an answer.
    """

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], BoundedHttpProtocol],
        certificate: HttpsCertificate,
        handshake_s: float,
    ) -> None:
        self._make, self._certificate, self._handshake_s = make, certificate, handshake_s
        self._acceptor = SocketAcceptor(bound, self._begin)

    def stop_accepting(self) -> None:
        """Accept nothing any more; handshakes that are under way go on, and so do connections. Idempotent."""
        self._acceptor.stop_accepting()

    def close(self) -> None:
        """Accept nothing any more, and end handshakes that are under way; connections go on. Idempotent."""
        self._acceptor.close()

    async def wait_closed(self) -> None:
        """Wait until no handshake is under way."""
        await self._acceptor.wait_closed()

    def _begin(self, connection: socket.socket, client: Any) -> None:
        http, handshake = self._make(), TlsHandshake(client)
        http.on_made(lambda: http.registry.closed(handshake))
        opening = self._shake_hands(connection, http)
        handshake.task = self._acceptor.begin(connection, opening, lambda _: http.registry.closed(handshake))
        http.registry.opened(handshake)

    async def _shake_hands(self, connection: socket.socket, http: BoundedHttpProtocol) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: http,
            connection,
            ssl=self._certificate.context,
            ssl_handshake_timeout=self._handshake_s,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
