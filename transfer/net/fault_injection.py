"""Faults on purpose, for tests and rehearsals: `faults.*` in the configuration.

With `faults.proxy` peers reach a worker's endpoints by way of a relay, so that a rehearsal can cut, slow and silence
real connections. The worker asks the relay once for each endpoint: it sends one line ``KIND NAME HOST:PORT`` on a
connection of its own, and the relay answers with the ``HOST:PORT`` that leads to the endpoint. The worker advertises
that address; nothing else changes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import torch

from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, WorkerName

TIMEOUT_S = 5.0


def via_proxy(endpoint: str, kind: str, name: str, proxy: str) -> str:
    """Return the address of `endpoint` (``host:port`` or ``tcp://host:port``) by way of the relay at `proxy`, in the
    same form; `endpoint` itself where `proxy` is empty.

    Raises `ConfigError` where the relay doesn't answer, or has no way to the endpoint.
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
    """Counts writes of pages; stops the process in the n-th, corrupts the n-th, or slows all of them, as `config`
    says."""

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._writes = 0
        self._corrupted = 0

    @property
    def corrupts(self) -> bool:
        """Whether some write is to be corrupted."""
        return self._config.corrupt_page > 0

    @property
    def stops(self) -> bool:
        """Whether the process is to stop itself in some write."""
        return self._config.stop_in_write > 0

    def in_write(self) -> None:
        """To be called in the middle of each write of pages. In shared memory half of it is with the reader by then."""
        self._writes += 1
        if self._writes == self._config.stop_in_write:
            os.kill(os.getpid(), signal.SIGSTOP)

    def slow(self, nbytes: int) -> None:
        """To be called after each write of pages, on the thread that wrote these `nbytes`."""
        if self._config.link_bytes_per_s:
            time.sleep(nbytes / self._config.link_bytes_per_s)

    def after_seal(self, region: torch.Tensor, offset: int) -> None:
        """To be called once for each pool of a write. `offset`: a byte in `region` (uint8, flat) of a sealed page that
        the reader gets."""
        self._corrupted += 1
        if self._corrupted == self._config.corrupt_page:
            region[offset] ^= 0x40


FIRST = Incarnation(1)
"""Only the first incarnation of a worker hangs, so that the next one can show that it serves."""


def hang_at(faults: str, name: WorkerName, incarnation: Incarnation) -> int | None:
    """The number of steps after which this incarnation hangs, or None. Raises `ConfigError` where `faults` isn't
    NAME:STEP, several with commas."""
    steps: dict[str, int] = {}
    for part in filter(None, faults.split(",")):
        worker, _, step = part.strip().rpartition(":")
        if not worker or not step.isdigit() or not int(step):
            raise ConfigError(f"config key faults.hang takes WORKER:STEP, as in decode-0:20; got {part!r}")
        steps[worker] = int(step)
    return steps.get(name) if incarnation == FIRST else None


class HangFault:
    """Hangs the thread that calls it, for ever, once `step` steps have ended; None: never."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def __call__(self, steps: int) -> None:
        if self._step is not None and steps >= self._step:
            threading.Event().wait()
