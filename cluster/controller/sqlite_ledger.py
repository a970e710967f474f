"""The ledger in an SQLite file: for the controllers of one machine."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cluster.controller.controller_ledger import LedgerLeader, LedgerLost
from contracts.clock import Clock, SystemClock
from contracts.errors import ConfigError

BUSY_S = 5.0
"""Seconds that a write waits for another process that has the file locked."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS writer (one INTEGER PRIMARY KEY, term INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO writer VALUES (1, 0)",
    "CREATE TABLE IF NOT EXISTS leader (one INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, host TEXT NOT NULL, "
    "until REAL NOT NULL, lease_s REAL NOT NULL, boot TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS standbys (endpoint TEXT PRIMARY KEY, until REAL NOT NULL, boot TEXT NOT NULL)",
)
T = TypeVar("T")


class SqliteLedger:
    """A ledger in an SQLite file with a write-ahead log, synced at each commit: it survives `kill -9` and a power cut.

    SQLite, because it is in Python's standard library and keeps its promise of durability on every file system that
    locks; a network file system that doesn't is no place for it. The leader's lease goes by this machine's monotonic
    clock, which all its processes read alike: one that was written before the machine was started again is over.
    """

    def __init__(self, path: Path, clock: Clock | None = None, boot: str = "") -> None:
        """`boot`: names this start of the machine, by default as the kernel does. Raises `ConfigError` where the file
        can't be opened or is no ledger."""
        self._path, self._clock, self._boot = path, clock or SystemClock(), boot or _boot_id()
        self._term = 0
        self._taken: Mapping[str, str] | None = None
        self._lock = threading.Lock()
        try:
            # Autocommit: each statement is a transaction, but for those that begin one.
            self._store = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._store.execute("PRAGMA journal_mode=WAL")
            self._store.execute("PRAGMA synchronous=FULL")
            for statement in _TABLES:
                self._store.execute(statement)
        except sqlite3.Error as error:
            raise ConfigError(f"can't keep the controller's table in {path}: {error}") from None

    def begin(self) -> Mapping[str, str]:
        taken, self._taken = self._taken, None
        if taken is not None:
            return taken
        try:
            return self._transaction(self._next_term)
        except OSError as error:
            raise ConfigError(str(error)) from None

    def put(self, key: str, value: str) -> None:
        def store() -> None:
            self._check_term()
            self._store.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))

        self._transaction(store)

    def check(self) -> list[str]:
        return []

    def take(self, endpoint: str, host: str, lease_s: float, *, first: bool) -> bool:
        def take() -> bool:
            leader = self._leader()
            begun = self._store.execute("SELECT term FROM writer").fetchone()[0] > 0
            if (leader is not None and leader.endpoint != endpoint) or not (begun or first):
                return False
            self._taken = self._next_term()
            self._lead(endpoint, host, lease_s)
            return True

        return self._transaction(take)

    def renew(self, lease_s: float) -> None:
        def renew() -> None:
            self._check_term()
            until = self._clock.now() + lease_s
            self._store.execute("UPDATE leader SET until = ?, lease_s = ?, boot = ?", (until, lease_s, self._boot))

        self._transaction(renew)

    def resign(self) -> None:
        def resign() -> None:
            if self._holds_term():
                self._store.execute("DELETE FROM leader")

        self._transaction(resign)

    def leader(self) -> LedgerLeader | None:
        return self._transaction(self._leader)

    def stand_by(self, endpoint: str, for_s: float) -> None:
        row = (endpoint, self._clock.now() + for_s, self._boot)
        self._transaction(lambda: self._store.execute("INSERT OR REPLACE INTO standbys VALUES (?, ?, ?)", row))

    def standbys(self) -> tuple[str, ...]:
        now = (self._boot, self._clock.now())
        query = "SELECT endpoint FROM standbys WHERE boot = ? AND until > ? ORDER BY endpoint"
        rows = self._transaction(lambda: self._store.execute(query, now).fetchall())
        return tuple(endpoint for (endpoint,) in rows)

    def forget(self) -> None:
        def forget() -> None:
            if self._holds_term():
                self._store.execute("DELETE FROM kept")
                self._store.execute("DELETE FROM leader")

        self._transaction(forget)

    def close(self) -> None:
        self._store.close()

    # ------------------------------------------------------------ inside a transaction

    def _next_term(self) -> Mapping[str, str]:
        self._store.execute("UPDATE writer SET term = term + 1")
        self._term = self._store.execute("SELECT term FROM writer").fetchone()[0]
        return dict(self._store.execute("SELECT key, value FROM kept ORDER BY key"))

    def _holds_term(self) -> bool:
        return bool(self._store.execute("SELECT term FROM writer").fetchone()[0] == self._term)

    def _check_term(self) -> None:
        if not self._holds_term():
            raise LedgerLost(f"another controller keeps its table in {self._path} now")

    def _lead(self, endpoint: str, host: str, lease_s: float) -> None:
        row = (endpoint, host, self._clock.now() + lease_s, lease_s, self._boot)
        self._store.execute("INSERT OR REPLACE INTO leader VALUES (1, ?, ?, ?, ?, ?)", row)
        self._store.execute("DELETE FROM standbys WHERE endpoint = ?", (endpoint,))

    def _leader(self) -> LedgerLeader | None:
        row = self._store.execute("SELECT endpoint, host, until, lease_s, boot FROM leader").fetchone()
        if row is None:
            return None
        endpoint, host, until, lease_s, boot = row
        left_s = min(until - self._clock.now(), lease_s)
        if left_s <= 0 or boot != self._boot:
            return None
        term = self._store.execute("SELECT term FROM writer").fetchone()[0]
        return LedgerLeader(endpoint, host, term, left_s)

    def _transaction(self, run: Callable[[], T]) -> T:
        """Run `run` as one transaction. Raises what it raises, and `OSError` where the file can't be read or
        written."""
        try:
            with self._lock, self._store:
                self._store.execute("BEGIN IMMEDIATE")
                return run()
        except sqlite3.Error as error:
            raise OSError(f"can't keep the controller's table in {self._path}: {error}") from None


def _boot_id() -> str:
    """What names this start of the machine; the same text always where the system has no such name: then a lease from
    before it was started again is waited for."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
