"""Ports for servers that tests start themselves, and start again on the port that they had."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST, _TRIES = 10_000, 100


def free_port() -> int:
    """A port of loopback on which nobody listens, below those that the kernel gives to connections and to whoever asks
    for any: one of these may be another process's before its server has it."""
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    draw = random.SystemRandom()  # Tests set the seed of the others.
    for _ in range(_TRIES):
        port = draw.randrange(_LOWEST, below)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of {_TRIES} ports from {_LOWEST} to {below} is free")
