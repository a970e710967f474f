"""The end of a router's stream to a worker, as the router is told it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a stream has ended."""

    reason: str
    left: bool = False
    """Whether the worker has left in order: all that it had begun is done and handed over."""
