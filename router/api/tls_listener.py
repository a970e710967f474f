"""A listening socket of the HTTP endpoint that speaks TLS: every connection is counted from its first packet, and
handshakes have a deadline.

An ASGI server that speaks TLS itself hands a connection over when its handshake is done: until then nobody counts it,
and clients that never finish theirs could take every descriptor. Here the limit on connections knows a connection from
the moment at which it was accepted, and may close it. Each handshake takes the certificate of its moment.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from contracts.config.router_config import RouterConfig
from router.api.connection_limits import BoundedHttpProtocol
from router.security.https_certificate import HttpsCertificate
from router.state.router_log import log

SHUTDOWN_S = 1.0
"""How long a client may take to end TLS in order, less than the router's end takes."""
ACCEPTED = 64
"""Connections that are accepted in one turn of the event loop at most."""
PAUSE_S = 1.0
"""How long nothing is accepted after the process had no descriptor left."""


class TlsHandshake:
    """One connection between its acceptance and the end of its handshake, as the limit on connections sees it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        """Whether the task has run at all: one that is cancelled before runs none of its lines."""

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
        self._bound, self._make, self._certificate, self._handshake_s = bound, make, certificate, handshake_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        bound.setblocking(False)
        self._loop.add_reader(bound, self._accept)

    def close(self) -> None:
        """Accept nothing any more, and end handshakes that are under way; connections go on. Idempotent."""
        if self._bound.fileno() >= 0:
            self._loop.remove_reader(self._bound)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(ACCEPTED):
            try:
                connection, client = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log("no connection can be accepted", level=logging.ERROR, reason=str(error))
                self._loop.remove_reader(self._bound)
                self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._bound, self._accept)
                return
            self._begin(connection, client)

    def _begin(self, connection: socket.socket, client: Any) -> None:
        connection.setblocking(False)
        http, handshake = self._make(), TlsHandshake(client)
        http.on_made(lambda: http.registry.closed(handshake))
        task = handshake.task = self._loop.create_task(self._shake_hands(connection, handshake, http))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            http.registry.closed(handshake)
            if not handshake.begun:
                connection.close()
            elif not task.cancelled() and (error := task.exception()) is not None:
                log("a handshake failed inside", level=logging.ERROR, reason=repr(error))

        task.add_done_callback(ended)
        http.registry.opened(handshake)

    async def _shake_hands(self, connection: socket.socket, handshake: TlsHandshake, http: BoundedHttpProtocol) -> None:
        handshake.begun = True
        try:
            await self._loop.connect_accepted_socket(
                lambda: http,
                connection,
                ssl=self._certificate.context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except (OSError, TimeoutError):  # `ssl.SSLError` is an OSError.
            _hang_up(connection)
        except asyncio.CancelledError:
            _hang_up(connection)
            raise


def _hang_up(connection: socket.socket) -> None:
    """End a connection for both sides: the loop's transport, which closes the descriptor, would wait for the client's
    last word."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
