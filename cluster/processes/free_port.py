"""The port of a server that is started later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from twinpool.contracts.errors import ConfigError

LOWEST = 20_000
"""Ray's workers have 10,002 to 19,999 (`ray start --min-worker-port`); Ray refuses to start where its control store's
port is among them."""
_TRIED = 16


def free_port(host: str, port: int) -> int:
    """Returns `port`, or a free port for 0. Raises `ConfigError` when the port is taken or `host` isn't this machine's.

    The port is released again, and whoever it is for binds it some seconds later. So a free one is chosen below those
    that the kernel gives to connections and to who asks it for any (one of these is soon another process's), and above
    those of Ray's workers.
    """
    try:
        family, _, _, _, (address, _, *rest) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} can't be resolved: {error.strerror}") from None
    refusal = ""
    for chosen in [port] if port else [*_below_the_kernels(), 0]:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, chosen, *rest))
                return int(probe.getsockname()[1])
            except OSError as error:
                refusal = str(error.strerror)
    if port:
        raise ConfigError(f"can't listen on {host}:{port} ({refusal}); choose another --port, or 0 for any")
    raise ConfigError(f"can't listen on --host {host} ({refusal})")


def _below_the_kernels() -> list[int]:
    """Some ports by chance below those that the kernel gives away; none where it says nothing of them, or gives nearly
    all."""
    try:
        below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    ports = range(LOWEST, below)
    return random.SystemRandom().sample(ports, _TRIED) if len(ports) > _TRIED else []
