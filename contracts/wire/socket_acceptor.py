"""Listening sockets, and acceptance of connections on one, as an event loop's own server does it, but each from its
first packet on is its owner's to count, to bound and to cut: a server that speaks TLS hands a connection over only when
its handshake is done.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

log = logging.getLogger("twinpool.wire")

ACCEPTED = 64
"""Connections that are accepted in one turn of the event loop at most."""
PAUSE_S = 1.0
"""How long nothing is accepted after the process had no descriptor left."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def listening(host: str, port: int = 0, *, backlog: int, shared: bool = False) -> socket.socket:
    """Return a listening TCP socket, of a free port for 0; `shared` with other sockets of this user, among which the
    kernel deals connections. Raises `OSError`."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=shared)


class SocketAcceptor:
    """Accepts connections on `bound` until it is closed. Used on the event loop on which it was made."""

    def __init__(self, bound: socket.socket, accepted: Callable[[socket.socket, Any], None]) -> None:
        """`accepted` is called with each connection, which doesn't block, and its peer's address."""
        self._bound, self._accepted = bound, accepted
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        bound.setblocking(False)
        self._loop.add_reader(bound, self._accept)

    def begin(
        self,
        connection: socket.socket,
        opening: Coroutine[Any, Any, None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> asyncio.Task[None]:
        """Run `opening`, which makes a transport of a connection that was accepted; `ended` is called after it. Where
        it is cancelled, or raises an error of the connection's, the connection is closed."""
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            try:
                await opening
            except (OSError, TimeoutError):  # `ssl.SSLError` is an OSError.
                _hang_up(connection)
            except asyncio.CancelledError:
                _hang_up(connection)
                raise

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not begun:  # A task that is cancelled before its first turn runs none of its lines.
                opening.close()
                connection.close()
            elif not task.cancelled() and (error := task.exception()) is not None:
                log.error("a connection failed inside", extra={"reason": repr(error)})
            ended(task)

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(over)
        return task

    def stop_accepting(self) -> None:
        """Accept nothing any more; what is opening goes on. Idempotent."""
        if self._bound.fileno() >= 0:
            self._loop.remove_reader(self._bound)
        if self._pause is not None:
            self._pause.cancel()

    def close(self) -> None:
        """Accept nothing any more, and end what is opening; connections that are open go on. Idempotent."""
        self.stop_accepting()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is opening."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(ACCEPTED):
            try:
                connection, peer = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("no connection can be accepted", extra={"reason": str(error)})
                self._loop.remove_reader(self._bound)
                self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._bound, self._accept)
                return
            connection.setblocking(False)
            self._accepted(connection, peer)


def _hang_up(connection: socket.socket) -> None:
    """End a connection for both sides: the loop's transport, which closes the descriptor, would wait for the peer's
    last word."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
