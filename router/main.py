"""The process of one router: ``python -m twinpool.router.main --model DIR --controller HOST:PORT[,…] --port N``.

With ``--models FILE`` it serves several models, each over a cluster of its own (`router.api.models_app`); the file says
of each what the flags say of one.

The process logs JSON lines to standard error and prints nothing. With ``--ready-fd`` it writes one line to that
descriptor once it listens. With ``--take-over`` it gets the listening sockets of the router that it replaces, which
ends once its answers have. On SIGTERM or SIGINT it drains and ends (`router.api.router_server`).
Exit codes: 0 after a signal, 1 when something failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import read_config_json
from twinpool.contracts.config.setting_effects import routers_digest
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.json_logs import log, log_to_stream
from twinpool.contracts.messages.router_report import RoutedModel, RouterIdentity
from twinpool.contracts.wire.socket_acceptor import listening
from twinpool.router.api.app import create_admin_app, create_app
from twinpool.router.api.http_protocol import raise_descriptor_limit
from twinpool.router.api.router_server import (
    LIVE_CONNECTIONS,
    AdminListener,
    Predecessor,
    RouterListeners,
    RouterServer,
)
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.controller_port import ControllerPorts
from twinpool.router.models_app import create_models_admin_app, create_models_app
from twinpool.router.service.router_service import RouterService
from twinpool.router.tokenizer_pool.tokenizer_process import map_large_buffers

BACKLOG = 2048


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="twinpool.router.main", description="One router of a Twinpool cluster."
    )
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("--model", type=Path, help="checkpoint folder")
    served.add_argument("--models", type=Path, metavar="FILE", help="several models, as JSON: a list of RoutedModel")
    parser.add_argument("--controller", default="", metavar="HOST:PORT", help="with --model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="router", help="name in its logs")
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other routers of this machine")
    parser.add_argument("--admin-port", type=int, help="the operators' port, instead of security.admin_port")
    parser.add_argument("--live-socket", type=Path, help="Unix socket at which it is asked whether it lives")
    parser.add_argument("--handover-socket", type=Path, help="Unix socket at which another router replaces it")
    parser.add_argument("--take-over", type=Path, help="the --handover-socket of a router that this one replaces")
    parser.add_argument("--kept", action="store_true", help="a supervisor keeps it, and replaces it")
    parser.add_argument("--config-json", type=Path, help="the whole configuration as JSON")
    parser.add_argument("--kv-index", type=Path, help="the table of this host's KV index")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor that is told when the router listens")
    return parser.parse_args(arguments)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket as `listening` does. Raises `ConfigError` for an address that can't be had."""
    try:
        bound = listening(host, port, backlog=BACKLOG, shared=shared)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error}") from None
    # Accepted connections inherit the option. Without it a small write waits up to 40 ms for the acknowledgement of the
    # write before.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def routed_models(options: argparse.Namespace) -> list[RoutedModel]:
    """The models that the flags name, the one that leads first. Raises `ConfigError` for a file that can't be read."""
    if options.models is None:
        settings, index = options.config_json or "", options.kv_index or ""
        return [RoutedModel(str(options.model), options.controller, str(settings), str(index))]
    try:
        return msgspec.json.decode(options.models.read_bytes(), type=list[RoutedModel])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"can't read the models {options.models}: {error}") from None


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


def end_within(seconds: float) -> None:
    """Have the kernel end this process after `seconds`, whatever it does then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds))


def service_of(
    routed: RoutedModel, config: Config, quotas: ControllerDirectory | None, identity: RouterIdentity
) -> tuple[RouterService, ControllerDirectory]:
    """The service of one model, and the directory of its cluster. `quotas`: the controller that leases tenants' limits,
    where it is another model's. Raises `ConfigError` and `CheckpointError`."""
    directory = ControllerDirectory(routed.controllers, config.transfer.link_timeout_s, config.security.cluster)
    service = RouterService(
        read_model_spec(Path(routed.model), config.engine.context),
        config,
        directory,
        ports=ControllerPorts(
            lessor=quotas or directory,
            reporter=directory,
            recorder=directory,
            dashboard=directory.dashboard,
            control_plane=directory.control_plane,
            reachable=directory.reachable,
            identity=identity,
        ),
        kv_index=Path(routed.kv_index) if routed.kv_index else None,
        name=identity.name,
    )
    return service, directory


def serve(options: argparse.Namespace, routed: Sequence[RoutedModel], configs: Sequence[Config]) -> None:
    """Serve requests until SIGTERM or SIGINT, or until another process has taken the port over. `configs`: of each
    model. Raises `ConfigError`."""
    predecessor = Predecessor.reach(options.take_over) if options.take_over is not None else None
    with ExitStack() as stack:
        taken = [stack.enter_context(one) for one in predecessor.sockets] if predecessor is not None else []
        admin: socket.socket | None
        if taken:
            bound, admin = taken[0], taken[1] if len(taken) > 1 else None
        else:
            bound = stack.enter_context(listen(options.host, options.port, shared=options.reuse_port))
            admin = stack.enter_context(listen_for_operators(configs[0], options.admin_port))
        live = stack.enter_context(listen_at(options.live_socket))
        handover = stack.enter_context(listen_at(options.handover_socket))
        address = "{}:{}".format(*bound.getsockname()[:2])
        services: list[RouterService] = []
        quotas: ControllerDirectory | None = None
        for one, config in zip(routed, configs, strict=True):
            identity = RouterIdentity(options.name, address, routers_digest(config), options.kept)
            service, directory = service_of(one, config, quotas, identity)
            services.append(service)
            quotas = quotas or directory
        lead, *others = services
        log(
            "router listens",
            address=address,
            model=", ".join(service.spec.name for service in services),
            pid=os.getpid(),
            build=build_id(),
            taken_over=predecessor is not None,
        )
        app = create_models_app(services) if others else create_app(lead)
        operators: AdminListener | None = None
        if admin is not None:
            operators = AdminListener(create_models_admin_app(services) if others else create_admin_app(lead), admin)
        listeners = RouterListeners(operators, live, handover)
        gc.collect()
        gc.freeze()  # A full collection would look through all modules again, while every stream stands still.
        server = RouterServer(app, lead, options.ready_fd, listeners, predecessor, end_within, others)
        server.run([bound])


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    log_to_stream(options.name)
    raise_descriptor_limit()
    map_large_buffers()
    try:
        routed = routed_models(options)
        configs = [read_config_json(Path(one.settings) if one.settings else None) for one in routed]
        if (certificate := configs[0].security.cluster) is not None:
            certificate.check()
        serve(options, routed, configs)
    except TwinpoolError as error:
        log("router failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
