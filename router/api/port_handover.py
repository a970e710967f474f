"""The hand-over of a router's listening sockets to the process that replaces it, so that no connection is refused or
reset in between.

The successor connects to the predecessor's Unix socket and gets its listening sockets (SCM_RIGHTS, `unix(7)`), the
method of HAProxy's and Envoy's restarts: both processes have the same queue of connections that wait to be accepted.
It says `SERVING` once it accepts from them; the predecessor then accepts nothing any more, finishes the answers that it
has, and ends. A successor that goes away before that changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from twinpool.contracts.errors import ConfigError
from twinpool.router.state.router_log import log

SERVING = b"serving"
REACH_S = 5.0
"""How long a predecessor may take to answer."""
TAKE_S = 120.0
"""How long a successor may take from getting the sockets to serving."""
MAX_SOCKETS = 2


class Predecessor:
    """The router that this process replaces, from the moment at which this process has its sockets."""

    def __init__(self, connection: socket.socket, sockets: list[socket.socket]) -> None:
        self._connection = connection
        self.sockets = sockets
        """Its listening sockets: of the endpoint, and of the operators' port where there is one."""

    @classmethod
    def reach(cls, path: Path) -> Predecessor | None:
        """Get the sockets of the router whose Unix socket is at `path`; None where no router answers there: it has
        ended. Raises `ConfigError` where one answers something else."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(REACH_S)
        try:
            connection.connect(str(path))
            word, descriptors, _, _ = socket.recv_fds(connection, 16, MAX_SOCKETS)
        except OSError:
            connection.close()
            return None
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if not sockets:
            connection.close()
            if not word:
                return None
            raise ConfigError(f"what answers at {path} hands over no listening sockets")
        return cls(connection, sockets)

    def serving(self) -> None:
        """Tell it that this process accepts connections now. It may be gone."""
        with suppress(OSError):
            self._connection.send(SERVING)
        self._connection.close()


class PortHandover:
    """The predecessor's side: hands `sockets` to whoever connects to `bound`, one at a time. Used on one event loop."""

    def __init__(self, bound: socket.socket, sockets: list[socket.socket], leave: Callable[[], None]) -> None:
        """`bound`: a listening Unix socket, which this user alone can reach. `leave` is called once, when a successor
        serves."""
        self._bound, self._sockets, self._leave = bound, sockets, leave
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._bound.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Hand over nothing any more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._bound)
            with connection:
                if await self._hand_over(connection):
                    self._bound.close()
                    self._leave()
                    return

    async def _hand_over(self, connection: socket.socket) -> bool:
        """Hand the sockets over; returns whether the successor serves."""
        log("ports are handed over")
        try:
            descriptors = [one.fileno() for one in self._sockets]
            socket.send_fds(connection, [b"%d" % os.getpid()], descriptors)
            async with asyncio.timeout(TAKE_S):
                return await asyncio.get_running_loop().sock_recv(connection, 16) == SERVING
        except (OSError, TimeoutError) as error:
            log("the ports were not taken over", reason=str(error) or type(error).__name__)
            return False
