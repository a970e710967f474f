"""Listening sockets of the HTTP endpoint: TLS on them, and their hand-over to the process that replaces a router.

**TLS** (`TlsListener`). Every connection is counted from its first packet, and handshakes have a deadline. The
certificate is read again whenever its files change. An ASGI server that speaks TLS itself hands a connection over when
its handshake is done: until then nobody counts it, and clients that never finish theirs could take every descriptor.
Here the limit on connections knows a connection from the moment at which it was accepted, and may close it. Each
handshake takes the certificate of its moment.

**Hand-over** (`PortHandover`, `Predecessor`). No connection is refused or reset in between. The successor connects to
the predecessor's Unix socket and gets its listening sockets (SCM_RIGHTS, `unix(7)`), the method of HAProxy's and
Envoy's restarts: both processes have the same queue of connections that wait to be accepted. It says `SERVING` once it
accepts from them; the predecessor then accepts nothing any more, finishes the answers that it has, and ends. A
successor that goes away before that changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import RereadFiles
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.json_logs import log
from twinpool.contracts.wire.socket_acceptor import SocketAcceptor
from twinpool.router.api.http_protocol import BoundedHttpProtocol


class HttpsCertificate:
    """The certificate of the endpoint. Raises `ConfigError` where it can't be used at first; later bad files change
    nothing. `context` is for the connections that come from now on; those that are open keep theirs."""

    def __init__(self, files: CertificateFiles) -> None:
        files.check()
        self._contexts = RereadFiles(files, _read)
        self.context = self._contexts.latest()

    def refresh(self) -> None:
        """Read the files again if they aren't those that were read last."""
        self.context = self._contexts.latest()


def _read(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"can't use the certificate {files.cert}: {error}") from None
    return context


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
