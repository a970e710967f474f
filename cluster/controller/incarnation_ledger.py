"""Ledgers of granted incarnations, which outlive the controller."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class IncarnationLedger(Protocol):
    """The largest granted incarnation of each worker, kept beyond the controller's life."""

    def load(self) -> Mapping[str, int]: ...

    def record(self, name: str, incarnation: int) -> None:
        """Store the number granted to worker `name`; returns once it is safe, and only then may it be handed out."""


class MemoryLedger:
    """A ledger in memory, for clusters that live no longer than their controller."""

    def __init__(self) -> None:
        self.granted: dict[str, int] = {}

    def load(self) -> Mapping[str, int]:
        return dict(self.granted)

    def record(self, name: str, incarnation: int) -> None:
        self.granted[name] = incarnation


class FileLedger:
    """A ledger in one JSON file, replaced atomically and synced at each record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._granted: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}

    def load(self) -> Mapping[str, int]:
        return dict(self._granted)

    def record(self, name: str, incarnation: int) -> None:
        self._granted[name] = incarnation
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(self._granted, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
