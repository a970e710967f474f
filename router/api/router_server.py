"""The HTTP server of one router: its listeners, its drain and end, and its leaving for a process that replaces it.

SIGTERM and SIGINT are a drain: ``/health`` says so at once, new requests are refused, and the server ends when the
answers that run have ended, at the latest after `cluster.stop_timeout_s`; what is left ends with an error then. Signals
within `ONE_REQUEST_S` are one; a later one cuts the answers off.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import uvicorn

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import RereadFiles
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.json_logs import log
from twinpool.contracts.wire.socket_acceptor import SocketAcceptor
from twinpool.router.api.admin_models import health_problems
from twinpool.router.api.app import App
from twinpool.router.api.http_protocol import BoundedHttpProtocol, ClientConnections
from twinpool.router.service.router_service import RouterService


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


GRACE_S = 2.0
"""How long connections may take to end after a signal."""
KEEP_ALIVE_S = 65
"""How long an idle connection is kept."""
ADMIN_CONNECTIONS = 64
"""Connections to the operators' port; clients of the endpoint can't take their place."""
LIVE_CONNECTIONS = 8
"""Connections to the socket at which this router is asked whether it lives."""
TICKS = 10
"""Ticks of the server between two looks at the certificate's files, a tenth of a second each."""
HEALTHY_S = 60.0
"""How long a router that replaces another one waits for links to workers that there are, before it accepts connections
all the same: its predecessor may be no healthier."""
POLL_INTERVAL_S = 0.05
ONE_REQUEST_S = 1.0
"""Signals within so many seconds are one request to end."""
CLOSE = (b"connection", b"close")


class AdminListener(NamedTuple):
    """The operators' port: its application and its listening socket."""

    app: App
    bound: socket.socket


class RouterListeners(NamedTuple):
    """What one router listens on besides its endpoint."""

    admin: AdminListener | None = None
    """The operators' port, where they have one."""
    live: socket.socket | None = None
    """The Unix socket at which whoever keeps this router asks whether it lives: several routers share a port."""
    handover: socket.socket | None = None
    """The Unix socket at which a process that replaces this one takes the listening sockets over."""


def _links_lack(service: RouterService) -> bool:
    """Whether a service can't serve yet, and may be able to once it is linked to all workers that there are."""
    links = service.worker_links
    return not links.known or bool(links.missing and health_problems(service))


class RouterServer(uvicorn.Server):
    """Uvicorn's server, which drains when it is asked to end; then it ends all answers, and waits for connections.

    `ready_fd`: a descriptor that gets one line once the server listens, and is closed then. `predecessor`: the router
    whose sockets it has, which serves until this one can. `must_end` is told when this router leaves or drains:
    after so many seconds its process must be gone. `others`: the services of further models that `app` serves; what is
    said of connections, HTTPS and times is `service`'s. Raises `ConfigError` where the certificate of HTTPS can't be
    used.
    """

    def __init__(
        self,
        app: App,
        service: RouterService,
        ready_fd: int | None = None,
        listeners: RouterListeners = RouterListeners(),  # noqa: B008
        predecessor: Predecessor | None = None,
        must_end: Callable[[float], object] = lambda seconds: None,
        others: Sequence[RouterService] = (),
    ) -> None:
        self.connections = ClientConnections(service.config)
        self._admin_connections = ClientConnections(service.config, ADMIN_CONNECTIONS)
        self._live_connections = ClientConnections(service.config, LIVE_CONNECTIONS)
        service.metrics.of_process.append(self.connections.metrics)
        self._listeners, self._predecessor, self._must_end = listeners, predecessor, must_end
        files = service.security.https
        self.certificate = HttpsCertificate(files) if files is not None else None
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                backlog=self.connections.backlog,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(GRACE_S),
            )
        )
        self._service, self._services = service, (service, *others)
        self._ready_fd = ready_fd
        self._handover: PortHandover | None = None
        self._leaving = False
        self._drain_began: float | None = None
        self._bound: list[socket.socket] = []
        """The listening sockets of the endpoint and of the operators' port."""
        self._probes: list[Any] = []
        """Servers that go on while this router leaves."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if not self.started:
            return
        admin, live, handover = self._listeners
        bound = list(sockets or [])
        if live is not None:
            loop = asyncio.get_running_loop()
            self._probes.append(await loop.create_unix_server(self._protocols(self._live_connections), sock=live))
        if self._predecessor is not None:
            await self._until_healthy()
        # Closed by uvicorn at the end.
        servers = cast(list[Any], self.servers)
        servers += [await self._listen(one, self.connections) for one in bound]
        if admin is not None:
            servers.append(await self._listen(admin.bound, self._admin_connections, admin.app))
            bound.append(admin.bound)
        self._bound = bound
        if self._predecessor is not None:
            self._predecessor.serving()
        if handover is not None:
            self._handover = PortHandover(handover, bound, self.leave)
            self._handover.start()
        if self._ready_fd is not None:
            os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Have the event loop act on a signal: a handler runs within whatever the main thread does, another handler
        included, which may hold a lock. Instead of uvicorn's, which ends at once, and after the end has the signal kill
        the process."""
        asyncio.get_running_loop().call_soon_threadsafe(self.asked_to_end)

    def asked_to_end(self) -> None:
        """Drain, or end at once where a drain has been asked for before."""
        now = self._service.clock.now()
        if self._drain_began is None:
            self._drain(now)
        elif now - self._drain_began >= ONE_REQUEST_S:
            self.should_exit = True

    def _drain(self, now: float) -> None:
        self._drain_began = now
        if not self.started:
            self.should_exit = True
            return
        within_s = self._service.stop_timeout_s
        log("draining: asked to end", answering=self._answering, within_s=within_s)
        for service in self._services:
            service.draining = True
        self._say_close()
        self._must_end(within_s + 2 * GRACE_S)

    @property
    def _answering(self) -> int:
        return sum(service.answering for service in self._services)

    @property
    def _drained(self) -> bool:
        """Whether a drain is over, by the end of all answers or of their time."""
        if self._drain_began is None:
            return False
        waited_s = self._service.clock.now() - self._drain_began
        return self._answering == 0 or waited_s >= self._service.stop_timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._handover is not None:
            self._handover.close()
        for service in self._services:
            await service.close()
        for probe in self._probes:
            probe.close()
        await super().shutdown(sockets)

    def leave(self) -> None:
        """Accept nothing any more, finish the answers that there are, and end: another process has the sockets.

        Connections are closed after their next answer, or once they have been idle for `KEEP_ALIVE_S`: closing an idle
        one now would cross the request that its client may just be sending.
        """
        within_s = self._service.config.max_timeout_s + 2 * KEEP_ALIVE_S
        log("leaving: another process has the port", connections=len(self.server_state.connections), within_s=within_s)
        self._leaving = True
        for service in self._services:
            service.leaving = True
            if service.controller.dashboard is not None:
                service.controller.dashboard.close()  # Its streams would go on for ever.
        for server in cast(list[Any], self.servers):
            server.stop_accepting() if isinstance(server, TlsListener) else server.close()
        for one in self._bound:
            one.close()  # Else it would listen on, with nobody who accepts, once the successor has ended.
        self._say_close()
        self._must_end(within_s)

    @property
    def leaving(self) -> bool:
        """Whether another process has the sockets, and this one ends."""
        return self._leaving

    async def on_tick(self, counter: int) -> bool:
        if self.certificate is not None and counter % TICKS == 0:
            self.certificate.refresh()
        ending = await super().on_tick(counter) or self._drained
        if self._drain_began is not None:
            self._say_close()
        if not self._leaving:
            return ending
        self._say_close()
        clients = self.connections.all | self._admin_connections.all
        return ending or not clients

    def _say_close(self) -> None:
        """Have all answers from now on close their connection; uvicorn makes these headers anew now and then."""
        headers = self.server_state.default_headers
        if CLOSE not in headers:
            headers.append(CLOSE)

    async def _until_healthy(self) -> None:
        """Wait until this router could serve, or is linked to all workers that there are; `HEALTHY_S` at most."""
        waited = 0.0
        while unhealthy := [one for one in self._services if _links_lack(one)]:
            if waited >= HEALTHY_S or self.should_exit:
                problems = [problem for one in unhealthy for problem in health_problems(one)]
                log("the port is taken over, though this router can't serve yet", problems=problems)
                return
            await asyncio.sleep(POLL_INTERVAL_S)
            waited += POLL_INTERVAL_S

    async def _listen(self, bound: socket.socket, connections: ClientConnections, app: App | None = None) -> Any:
        """Accept connections on `bound`, over TLS where there is a certificate; returns the server."""
        make = self._protocols(connections, app)
        if self.certificate is not None:
            return TlsListener(bound, make, self.certificate, self._service.config.header_timeout_s)
        return await asyncio.get_running_loop().create_server(make, sock=bound, backlog=connections.backlog)

    def _protocols(self, connections: ClientConnections, app: App | None = None) -> Callable[[], BoundedHttpProtocol]:
        """Return what makes the protocol of a new connection, which `connections` counts; `app`: another application
        than the endpoint's."""
        return partial(
            BoundedHttpProtocol,
            registry=connections,
            app=app,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
