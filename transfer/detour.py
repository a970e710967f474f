"""Endpoints by way of a relay: `faults.proxy`, so that a rehearsal can cut, slow and silence real connections.

The relay is asked once for each endpoint: one line ``KIND NAME HOST:PORT`` on a connection to it, answered with the
``HOST:PORT`` that leads there. That is what the worker advertises then; nothing else changes.
"""

from __future__ import annotations

import socket

from contracts.errors import ConfigError

TIMEOUT_S = 5.0


def detour(endpoint: str, kind: str, name: str, proxy: str) -> str:
    """`endpoint` (``host:port`` or ``tcp://host:port``) by way of `proxy`; itself without one.

    Raises `ConfigError` where the relay doesn't answer.
    """
    scheme, separator, address = endpoint.rpartition("://")
    if not proxy or not address:
        return endpoint
    host, _, port = proxy.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as line:
            line.sendall(f"{kind} {name} {address}\n".encode())
            with line.makefile() as answer:
                found = answer.readline().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"config key faults.proxy: the relay at {proxy!r} doesn't answer: {error}") from None
    if not found:
        raise ConfigError(f"config key faults.proxy: the relay at {proxy!r} has no way to {address}")
    return f"{scheme}{separator}{found}"
