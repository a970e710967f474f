"""Ledgers: where the controller's table outlives the controller.

A ledger keeps texts under keys, and has one writer at a time: beginning with a ledger refuses every later write of who
had it before (a *fencing token*, as in Kleppmann's "How to do distributed locking"), so that a controller that was
stopped and has been replaced can grant nothing when it goes on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from contracts.errors import ConfigError, TwinpoolError

BUSY_S = 5.0
"""Seconds that a write waits for another process that has the file locked."""


class LedgerLost(TwinpoolError):
    """Raised by a write to a ledger that another controller has begun with since."""


class ControllerLedger(Protocol):
    """The controller's table, kept beyond its life."""

    def begin(self) -> Mapping[str, str]:
        """Become the ledger's one writer; returns all that it holds, by key."""

    def put(self, key: str, value: str) -> None:
        """Store `value` under `key`; returns once it is safe. Raises `LedgerLost`, and `OSError` where it can't be
        stored; nothing that depends on it may be handed out then."""


class MemoryLedger:
    """A ledger in memory, for clusters that live no longer than their controller."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def begin(self) -> Mapping[str, str]:
        return dict(self.rows)

    def put(self, key: str, value: str) -> None:
        self.rows[key] = value


class SqliteLedger:
    """A ledger in an SQLite file with a write-ahead log, synced at each commit: it survives `kill -9` and a power cut.

    SQLite, because it is in Python's standard library and keeps its promise of durability on every file system that
    locks; a network file system that doesn't is no place for it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` where the file can't be opened or is no ledger."""
        self._path = path
        self._term = 0
        try:
            # Autocommit: each statement is a transaction, but for those that begin one.
            self._store = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._store.execute("PRAGMA journal_mode=WAL")
            self._store.execute("PRAGMA synchronous=FULL")
            self._store.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
            self._store.execute("CREATE TABLE IF NOT EXISTS writer (one INTEGER PRIMARY KEY, term INTEGER NOT NULL)")
            self._store.execute("INSERT OR IGNORE INTO writer VALUES (1, 0)")
        except sqlite3.Error as error:
            raise ConfigError(f"can't keep the controller's table in {path}: {error}") from None

    def begin(self) -> Mapping[str, str]:
        try:
            with self._store:
                self._store.execute("BEGIN IMMEDIATE")
                self._store.execute("UPDATE writer SET term = term + 1")
                self._term = self._store.execute("SELECT term FROM writer").fetchone()[0]
                return dict(self._store.execute("SELECT key, value FROM kept"))
        except sqlite3.Error as error:
            raise ConfigError(f"can't read the controller's table in {self._path}: {error}") from None

    def put(self, key: str, value: str) -> None:
        try:
            with self._store:
                self._store.execute("BEGIN IMMEDIATE")
                if self._store.execute("SELECT term FROM writer").fetchone()[0] != self._term:
                    raise LedgerLost(f"another controller keeps its table in {self._path} now")
                self._store.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))
        except sqlite3.Error as error:
            raise OSError(f"can't write {self._path}: {error}") from None

    def close(self) -> None:
        self._store.close()
