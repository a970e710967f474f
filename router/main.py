"""The process of one router: ``python -m router.main --model DIR --controller HOST:PORT --port N``.

The process logs JSON lines to standard error and prints nothing. With ``--ready-fd`` it writes one line to that
descriptor once it listens. On SIGTERM or SIGINT it cancels its requests on the workers, ends running answers with an
error and exits, all within seconds.
Exit codes: 0 after SIGINT, the signal's own after SIGTERM, 1 when something failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn

from contracts.checkpoint.model_spec import read_model_spec
from contracts.config.cluster_config import Config
from contracts.config.load_config import config_from_dict
from contracts.errors import ConfigError, TwinpoolError
from contracts.interfaces.discovery import WorkerDirectory
from contracts.json_logs import log_to_stream
from router.api.app import App, create_app
from router.api.connection_limits import BoundedHttpProtocol, ClientConnections, raise_descriptor_limit
from router.links.controller_directory import ControllerDirectory
from router.service.router_service import RouterService
from router.state.router_log import log
from router.tokenizer_pool.c_heap import map_large_buffers

BACKLOG = 2048
GRACE_S = 2.0
"""How long connections may take to end after a signal."""
KEEP_ALIVE_S = 65
"""How long an idle connection is kept."""


class RouterServer(uvicorn.Server):
    """Uvicorn's server, which at shutdown ends all answers first and waits for connections then.

    `ready_fd`: a descriptor that gets one line once the server listens, and is closed then.
    """

    def __init__(self, app: App, service: RouterService, ready_fd: int | None = None) -> None:
        self.connections = ClientConnections(service.config)
        service.metrics.sources.append(self.connections.metrics)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=cast(type[asyncio.Protocol], partial(BoundedHttpProtocol, registry=self.connections)),
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
        await super().startup(sockets)
        if self.started and self._ready_fd is not None:
            os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.close()
        await super().shutdown(sockets)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="router.main", description="One router of a Twinpool cluster.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config-json", type=Path, help="the whole configuration as JSON")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor that is told when the router listens")
    return parser.parse_args(arguments)


def read_config(path: Path | None) -> Config:
    """Read the configuration from a JSON file; without a path it is all defaults.

    Raises `ConfigError` for a file that can't be read or a key that is wrong.
    """
    if path is None:
        return Config()
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the configuration {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the configuration {path} must hold a JSON object")
    return config_from_dict(tree)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket, of a free port for 0. Raises `ConfigError` for an address that can't be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error}") from None
    # Accepted connections inherit the option. Without it a small write waits up to 40 ms for the acknowledgement of the
    # write before.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def serve(
    spec_folder: Path, config: Config, directory: WorkerDirectory, bound: socket.socket, ready_fd: int | None
) -> None:
    """Serve requests on `bound` until SIGTERM or SIGINT."""
    service = RouterService(read_model_spec(spec_folder), config, directory)
    log("router listens", address="{}:{}".format(*bound.getsockname()[:2]), model=service.spec.name, pid=os.getpid())
    RouterServer(create_app(service), service, ready_fd).run([bound])


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    log_to_stream("router")
    raise_descriptor_limit()
    map_large_buffers()
    try:
        config = read_config(options.config_json)
        directory = ControllerDirectory(options.controller, config.transfer.link_timeout_s)
        with listen(options.host, options.port) as bound:
            serve(options.model, config, directory, bound, options.ready_fd)
    except TwinpoolError as error:
        log("router failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
