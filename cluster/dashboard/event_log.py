"""The dashboard's log: what has happened to the cluster, in words, the latest entries of it."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Any

KEPT = 200
TEXT_CHARS = 400


class EventKind(StrEnum):
    """Who or what an entry is about, by which the page marks it."""

    WORKER = "worker"
    SCALE = "scale"
    OPERATOR = "operator"
    CONTROL = "control"
    ROUTER = "router"
    DAMAGE = "damage"


class EventLog:
    """The latest `KEPT` entries. They are numbered, so that whoever has missed some sees how many."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._count = 0

    def add(self, at: float, kind: EventKind, text: str) -> None:
        """Add an entry. `at`: seconds since 1970."""
        self._count += 1
        self._events.append({"n": self._count, "at": round(at, 3), "kind": kind, "text": text[:TEXT_CHARS]})

    def latest(self, most: int = KEPT) -> list[dict[str, Any]]:
        """The latest entries as JSON has them, the oldest first."""
        return list(self._events)[-most:]
