"""Ports for servers that tests start themselves, and start again on the port that they had."""

from __future__ import annotations

from twinpool.cluster.processes import free_port as production


def free_port() -> int:
    """A port of loopback on which nobody listens, and which the kernel gives to nobody."""
    return production.free_port("127.0.0.1", 0)
