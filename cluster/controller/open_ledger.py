"""The choice of the ledger's keeper, an SQLite file or a Valkey or Redis server; and the ledger in a file, for the
controllers of one machine.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from twinpool.cluster.controller.leadership import LeasedLedger, LedgerLeader, LedgerLost
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.config.ledger_place import NAME, check_ledger, on_server
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.contracts.wire.redis_connection import RedisAccess

BUSY_S = 5.0
"""Seconds that a write waits for another process that has the file locked."""
PAUSE_S = 0.02
_KEPT = (
    "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS writer (one INTEGER PRIMARY KEY, term INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO writer VALUES (1, 0)",
)
"""The table of the cluster, and the term of who writes it."""
_LEASED = (
    "CREATE TABLE IF NOT EXISTS lease.leader (one INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, host TEXT NOT NULL, "
    "until REAL NOT NULL, lease_s REAL NOT NULL, boot TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS lease.standbys (endpoint TEXT PRIMARY KEY, until REAL NOT NULL, boot TEXT NOT NULL)",
)
"""Who leads and who waits, in a file beside that."""
T = TypeVar("T")


class SqliteLedger:
    """A ledger in an SQLite file with a write-ahead log, synced at each commit: it survives `kill -9` and a power cut.

    SQLite, because it is in Python's standard library and keeps its promise of durability on every file system that
    locks; a network file system that doesn't is no place for it. The leader's lease goes by this machine's monotonic
    clock, which all its processes read alike: one that was written before the machine was started again is over. So it
    need not survive that, and is in a file of its own (`-lease`), through a connection of its own: its renewals aren't
    synced and wait for no sync of the table, which on a busy disk may take longer than the lease.
    """

    def __init__(self, path: Path, clock: Clock | None = None, boot: str = "") -> None:
        """`boot`: names this start of the machine, by default as the kernel does. Raises `ConfigError` where the file
        can't be opened or is no ledger."""
        self._path, self._clock, self._boot = path, clock or SystemClock(), boot or _boot_id()
        self._term = 0
        self._taken: Mapping[str, str] | None = None
        try:
            self._store = _opened(path, _KEPT)
            self._lease = _opened(path, _LEASED, Path(f"{path}-lease"))
        except sqlite3.Error as error:
            raise ConfigError(f"can't keep the controller's table in {path}: {error}") from None

    def begin(self) -> Mapping[str, str]:
        taken, self._taken = self._taken, None
        if taken is not None:
            return taken
        try:
            return self._store.transaction(lambda: self._next_term(self._store))
        except OSError as error:
            raise ConfigError(str(error)) from None

    def put(self, key: str, value: str) -> None:
        def store() -> None:
            self._check_term(self._store)
            self._store.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))

        self._store.transaction(store)

    def check(self) -> list[str]:
        return []

    def take(self, endpoint: str, host: str, lease_s: float, *, first: bool) -> bool:
        def take() -> bool:
            leader = self._leader()
            begun = self._lease.execute("SELECT term FROM writer").fetchone()[0] > 0
            if (leader is not None and leader.endpoint != endpoint) or not (begun or first):
                return False
            self._taken = self._next_term(self._lease)
            self._lead(endpoint, host, lease_s)
            return True

        return self._lease.transaction(take)

    def renew(self, lease_s: float) -> None:
        def renew() -> None:
            until = self._clock.now() + lease_s
            # Before the look at the term: whoever takes the ledger writes here, too, and now waits.
            self._lease.execute(
                "UPDATE lease.leader SET until = ?, lease_s = ?, boot = ?", (until, lease_s, self._boot)
            )
            self._check_term(self._lease)

        self._lease.transaction(renew, both=False)

    def resign(self) -> None:
        def resign() -> None:
            self._lease.execute("DELETE FROM lease.leader")
            self._check_term(self._lease)

        with contextlib.suppress(LedgerLost):
            self._lease.transaction(resign, both=False)

    def leader(self) -> LedgerLeader | None:
        return self._lease.transaction(self._leader, both=False)

    def stand_by(self, endpoint: str, for_s: float) -> None:
        row = (endpoint, self._clock.now() + for_s, self._boot)
        insert = "INSERT OR REPLACE INTO lease.standbys VALUES (?, ?, ?)"
        self._lease.transaction(lambda: self._lease.execute(insert, row), both=False)

    def standbys(self) -> tuple[str, ...]:
        now = (self._boot, self._clock.now())
        query = "SELECT endpoint FROM lease.standbys WHERE boot = ? AND until > ? ORDER BY endpoint"
        rows = self._lease.transaction(lambda: self._lease.execute(query, now).fetchall(), both=False)
        return tuple(endpoint for (endpoint,) in rows)

    def forget(self) -> None:
        def forget() -> None:
            if self._holds_term(self._lease):
                self._lease.execute("DELETE FROM kept")
                self._lease.execute("DELETE FROM lease.leader")

        self._lease.transaction(forget)

    def close(self) -> None:
        self._store.close()
        self._lease.close()

    # ------------------------------------------------------------ inside a transaction

    def _next_term(self, connection: _LedgerConnection) -> Mapping[str, str]:
        connection.execute("UPDATE writer SET term = term + 1")
        self._term = connection.execute("SELECT term FROM writer").fetchone()[0]
        return dict(connection.execute("SELECT key, value FROM kept ORDER BY key"))

    def _holds_term(self, connection: _LedgerConnection) -> bool:
        return bool(connection.execute("SELECT term FROM writer").fetchone()[0] == self._term)

    def _check_term(self, connection: _LedgerConnection) -> None:
        if not self._holds_term(connection):
            raise LedgerLost(f"another controller keeps its table in {self._path} now")

    def _lead(self, endpoint: str, host: str, lease_s: float) -> None:
        row = (endpoint, host, self._clock.now() + lease_s, lease_s, self._boot)
        self._lease.execute("INSERT OR REPLACE INTO lease.leader VALUES (1, ?, ?, ?, ?, ?)", row)
        self._lease.execute("DELETE FROM lease.standbys WHERE endpoint = ?", (endpoint,))

    def _leader(self) -> LedgerLeader | None:
        row = self._lease.execute("SELECT endpoint, host, until, lease_s, boot FROM lease.leader").fetchone()
        if row is None:
            return None
        endpoint, host, until, lease_s, boot = row
        left_s = min(until - self._clock.now(), lease_s)
        if left_s <= 0 or boot != self._boot:
            return None
        term = self._lease.execute("SELECT term FROM writer").fetchone()[0]
        return LedgerLeader(endpoint, host, term, left_s)


class _LedgerConnection:
    """A connection to the file of the table, with another one attached as ``lease`` if need be; safe from any thread.

    What is written to the table is synced before a transaction returns; what is written to the attached file isn't, and
    a power cut takes the latest of it.
    """

    def __init__(self, path: Path, tables: Sequence[str], attached: Path | None = None) -> None:
        """`tables`: what makes those that aren't there yet. Raises `sqlite3.Error`."""
        self._path, self._lock = path, threading.Lock()
        # Autocommit: each statement is a transaction, but for those that begin one.
        self._store = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._store.execute("PRAGMA main.journal_mode=WAL")
            self._store.execute("PRAGMA main.synchronous=FULL")
            if attached is not None:
                self._store.execute("ATTACH ? AS lease", (str(attached),))
                self._store.execute("PRAGMA lease.journal_mode=WAL")
                self._store.execute("PRAGMA lease.synchronous=NORMAL")
            for statement in tables:
                self._store.execute(statement)
        except sqlite3.Error:
            self._store.close()
            raise

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self._store.execute(statement, values)

    def transaction(self, run: Callable[[], T], *, both: bool = True) -> T:
        """Run `run` as one transaction. `both`: it is alone with all files from its beginning on; else with a file from
        its first write to that on. Raises what it raises, and `OSError` where the files can't be read or written."""
        try:
            with self._lock, self._store:
                self._store.execute("BEGIN IMMEDIATE" if both else "BEGIN")
                return run()
        except sqlite3.Error as error:
            raise OSError(f"can't keep the controller's table in {self._path}: {error}") from None

    def close(self) -> None:
        self._store.close()


def _opened(path: Path, tables: Sequence[str], attached: Path | None = None) -> _LedgerConnection:
    """Return a connection. Processes that make a file's first one at a time find it locked, whatever their
    timeout is: tried again for `BUSY_S`."""
    pause, deadline = threading.Event(), time.monotonic() + BUSY_S
    while True:
        try:
            return _LedgerConnection(path, tables, attached)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        pause.wait(PAUSE_S)


def _boot_id() -> str:
    """What names this start of the machine; the same text always where the system has no such name: then a lease from
    before it was started again is waited for."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


PASSWORD_VARIABLE = "TWINPOOL_LEDGER_PASSWORD"
"""The server's password, where the URL has none: a configuration is read by more people than an environment."""


def open_ledger(
    place: str,
    name: str,
    replicas: int = 0,
    environment: Mapping[str, str] = os.environ,
    security: SecurityConfig | None = None,
) -> LeasedLedger:
    """Open the ledger of the cluster `name` at `place`, a path or a server's URL, with the files that `security` names
    and the password that `environment` has, where there is no file of it.

    Raises `ConfigError` where it can't be used; a server need not be there yet.
    """
    check_ledger(place, "the ledger")
    if not on_server(place):
        return SqliteLedger(Path(place))
    if not NAME.fullmatch(name):
        raise ConfigError(
            "a ledger on a server needs the cluster's name, under which its table is kept: set cluster.name to "
            f"letters, digits, dots and dashes, 64 at most; got {name!r:.80}"
        )
    try:
        from twinpool.cluster.controller.redis_ledger import RedisLedger
    except ImportError:
        raise ConfigError("a ledger on a server needs the package redis: pip install 'twinpool[redis]'") from None
    return RedisLedger(place, name, access=ledger_access(security or SecurityConfig(), environment), replicas=replicas)


def ledger_access(security: SecurityConfig, environment: Mapping[str, str]) -> RedisAccess:
    """By what the ledger's server lets controllers in. Raises `ImportError` without the client's package."""
    from twinpool.contracts.wire.redis_connection import RedisAccess

    return RedisAccess(
        password=environment.get(PASSWORD_VARIABLE, ""),
        password_file=security.ledger_password_file,
        ca=security.ledger_ca,
        cert=security.ledger_cert,
        key=security.ledger_key,
    )
