"""The controllers of a cluster, as routers are told of them."""

from __future__ import annotations

from typing import NamedTuple


class ControlPlane(NamedTuple):
    """Who leads the controllers, and who waits to."""

    leader: str
    """Where the leader is reached, ``host:port``."""
    term: int
    """How many controllers have led so far, it included."""
    standbys: tuple[str, ...]
    """Where those that wait are reached."""
    away: bool = False
    """Whether no controller answers this router now; the rest is what it was told last."""
