"""Faults on purpose, for tests and rehearsals: `faults.*` in the configuration.

With `faults.proxy` endpoints are reached by way of a relay, so that a rehearsal can cut, slow and silence real
connections. The relay is asked once for each endpoint: one line ``KIND NAME HOST:PORT`` on a connection to it, answered
with the ``HOST:PORT`` that leads there. That is what the worker advertises then; nothing else changes.
"""

from __future__ import annotations

import os
import signal
import socket

import torch

from contracts.config.cluster_config import FaultsConfig
from contracts.errors import ConfigError

TIMEOUT_S = 5.0


def via_proxy(endpoint: str, kind: str, name: str, proxy: str) -> str:
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


class WriteFaults:
    """Counts writes of pages and strikes at the n-th."""

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._writes = 0
        self._corrupted = 0

    def in_write(self) -> None:
        """Called in the middle of each write of pages: half of it is in the reader's memory."""
        self._writes += 1
        if self._writes == self._config.stop_in_write:
            os.kill(os.getpid(), signal.SIGSTOP)

    def after_seal(self, region: torch.Tensor, offset: int) -> None:
        """Called with where the first byte of a page was written at the reader."""
        self._corrupted += 1
        if self._corrupted == self._config.corrupt_page:
            region[offset] ^= 0x40
