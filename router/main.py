"""The process of one router: ``python -m router.main --model DIR --controller HOST:PORT --port N``.

The process logs JSON lines to standard error and prints nothing. With ``--ready-fd`` it writes one line to that
descriptor once it listens. On SIGTERM or SIGINT it cancels its requests on the workers, ends running answers with an
error and exits, all within seconds.
Exit codes: 0 after SIGINT, the signal's own after SIGTERM, 1 when something failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import uvicorn

from contracts.checkpoint.model_spec import read_model_spec
from contracts.config.cluster_config import Config
from contracts.config.load_config import read_config_json
from contracts.errors import ConfigError, TwinpoolError
from contracts.json_logs import log_to_stream
from router.api.app import App, create_admin_app, create_app
from router.api.connection_limits import BoundedHttpProtocol, ClientConnections, raise_descriptor_limit
from router.api.tls_listener import TlsListener
from router.links.controller_directory import ControllerDirectory
from router.security.https_certificate import HttpsCertificate
from router.service.router_service import RouterService
from router.state.router_log import log
from router.tokenizer_pool.c_heap import map_large_buffers

BACKLOG = 2048
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


class RouterServer(uvicorn.Server):
    """Uvicorn's server, which at shutdown ends all answers first and waits for connections then.

    `ready_fd`: a descriptor that gets one line once the server listens, and is closed then. Raises `ConfigError` where
    the certificate of HTTPS can't be used.
    """

    def __init__(
        self,
        app: App,
        service: RouterService,
        ready_fd: int | None = None,
        listeners: RouterListeners = RouterListeners(),  # noqa: B008
    ) -> None:
        self.connections = ClientConnections(service.config)
        self._admin_connections = ClientConnections(service.config, ADMIN_CONNECTIONS)
        self._live_connections = ClientConnections(service.config, LIVE_CONNECTIONS)
        service.metrics.sources.append(self.connections.metrics)
        self._admin, self._live = listeners
        files = service.security.https
        self.certificate = HttpsCertificate(files) if files is not None else None
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=cast(type[asyncio.Protocol], self._protocol),
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
        self._service = service
        self._ready_fd = ready_fd

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        plain = sockets if self.certificate is None else []
        await super().startup(plain)
        if not self.started:
            return
        loop, servers = asyncio.get_running_loop(), cast(list[Any], self.servers)  # Closed by uvicorn at the end.
        if self.certificate is not None:
            servers += [self._tls_listener(bound, self._protocol) for bound in sockets or []]
        if self._admin is not None and self.certificate is not None:
            servers.append(self._tls_listener(self._admin.bound, self._admin_protocol))
        elif self._admin is not None:
            backlog = self._admin_connections.backlog
            servers.append(await loop.create_server(self._admin_protocol, sock=self._admin.bound, backlog=backlog))
        if self._live is not None:
            servers.append(await loop.create_unix_server(self._live_protocol, sock=self._live))
        if self._ready_fd is not None:
            os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self.certificate is not None and counter % TICKS == 0:
            self.certificate.refresh()
        return await super().on_tick(counter)

    def _protocol(self, **options: Any) -> BoundedHttpProtocol:
        """Make the protocol of a client's connection; `options` are uvicorn's."""
        return BoundedHttpProtocol(registry=self.connections, **(self._options() | options))

    def _admin_protocol(self) -> BoundedHttpProtocol:
        assert self._admin is not None
        http = BoundedHttpProtocol(registry=self._admin_connections, **self._options())
        http.app = self._admin.app
        return http

    def _live_protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(registry=self._live_connections, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}

    def _tls_listener(self, bound: socket.socket, make: Callable[[], BoundedHttpProtocol]) -> TlsListener:
        assert self.certificate is not None
        return TlsListener(bound, make, self.certificate, self._service.config.header_timeout_s)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="router.main", description="One router of a Twinpool cluster.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="router", help="name in its logs")
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other routers of this machine")
    parser.add_argument("--admin-port", type=int, help="the operators' port, instead of security.admin_port")
    parser.add_argument("--live-socket", type=Path, help="Unix socket at which it is asked whether it lives")
    parser.add_argument("--config-json", type=Path, help="the whole configuration as JSON")
    parser.add_argument("--kv-index", type=Path, help="the table of this host's KV index")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor that is told when the router listens")
    return parser.parse_args(arguments)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening TCP socket, of a free port for 0; `shared` with other routers of this user, among which the
    kernel deals connections. Raises `ConfigError` for an address that can't be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error}") from None
    # Accepted connections inherit the option. Without it a small write waits up to 40 ms for the acknowledgement of the
    # write before.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


@contextmanager
def listen_for_operators(config: Config, port: int | None = None) -> Iterator[socket.socket | None]:
    """Yield the listening socket of the operators' port, None where they have none; `port`: another than
    `security.admin_port`. Raises `ConfigError`."""
    if not config.security.admin_port:
        yield None
        return
    with listen(config.security.admin_host, port or config.security.admin_port) as bound:
        yield bound


@contextmanager
def listen_at(path: Path | None) -> Iterator[socket.socket | None]:
    """Yield a listening Unix socket that only this user can reach, None without a path. Raises `ConfigError`."""
    if path is None:
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            path.unlink(missing_ok=True)
            before = os.umask(0o077)
            try:
                bound.bind(str(path))
            finally:
                os.umask(before)
            bound.listen(LIVE_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"can't listen at {path}: {error}") from None
        yield bound


def serve(
    spec_folder: Path,
    config: Config,
    directory: ControllerDirectory,
    bound: socket.socket,
    admin: socket.socket | None,
    live: socket.socket | None,
    ready_fd: int | None,
    kv_index: Path | None = None,
) -> None:
    """Serve requests on `bound`, operators' on `admin`, and whoever asks whether this router lives on `live`, until
    SIGTERM or SIGINT. `kv_index`: where the KV index's table is, None where there is none."""
    spec = read_model_spec(spec_folder)
    service = RouterService(spec, config, directory, lessor=directory, reporter=directory, kv_index=kv_index)
    log("router listens", address="{}:{}".format(*bound.getsockname()[:2]), model=service.spec.name, pid=os.getpid())
    operators = AdminListener(create_admin_app(service), admin) if admin is not None else None
    RouterServer(create_app(service), service, ready_fd, RouterListeners(operators, live)).run([bound])


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    log_to_stream(options.name)
    raise_descriptor_limit()
    map_large_buffers()
    try:
        config = read_config_json(options.config_json)
        if (certificate := config.security.cluster) is not None:
            certificate.check()
        directory = ControllerDirectory(options.controller, config.transfer.link_timeout_s, certificate)
        with (
            listen(options.host, options.port, shared=options.reuse_port) as bound,
            listen_for_operators(config, options.admin_port) as admin,
            listen_at(options.live_socket) as live,
        ):
            serve(options.model, config, directory, bound, admin, live, options.ready_fd, options.kv_index)
    except TwinpoolError as error:
        log("router failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
