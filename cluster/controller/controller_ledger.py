"""Ledgers: where the controller's table outlives the controller.

A ledger keeps texts under keys, and has one writer at a time: beginning with a ledger refuses every later write of who
had it before (a *fencing token*, as in Kleppmann's "How to do distributed locking"), so that a controller that was
stopped and has been replaced can grant nothing when it goes on.

A ledger that several controllers reach also keeps who leads: a lease, which the leader renews, and which another
controller takes over once it has run out (`cluster.controller.leadership`). The lease says when a controller may begin;
that its predecessor can't write any more is the fencing's doing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from twinpool.contracts.errors import TwinpoolError


class LedgerLost(TwinpoolError):
    """Raised by a write to a ledger that another controller has begun with since."""


class LedgerLeader(NamedTuple):
    """The controller whose lease of a ledger has not run out."""

    endpoint: str
    """Where it is reached, ``host:port``."""
    host: str
    """The machine's name."""
    term: int
    """How many controllers have begun with the ledger, it included."""
    left_s: float
    """Seconds until its lease runs out, unless it renews it."""


class ControllerLedger(Protocol):
    """The controller's table, kept beyond its life."""

    def begin(self) -> Mapping[str, str]:
        """Become the ledger's one writer; returns all that it holds, by key."""

    def put(self, key: str, value: str) -> None:
        """Store `value` under `key`; returns once it is safe. Raises `LedgerLost`, and `OSError` where it can't be
        stored; nothing that depends on it may be handed out then."""


class LeasedLedger(ControllerLedger, Protocol):
    """A ledger that controllers lead in turn. Every call raises `OSError` where the ledger can't be reached, in a time
    that is bounded. Methods may be called from any thread."""

    def check(self) -> list[str]:
        """What may be lost of what was written, in words, one line each; none where `put` keeps its word whatever
        happens. Raises `ConfigError` where the ledger must not be used."""

    def take(self, endpoint: str, host: str, lease_s: float, *, first: bool) -> bool:
        """Become the one writer, and lead for `lease_s`, unless another endpoint leads; returns whether that is so.
        `begin` then returns what the ledger held at that moment. `first`: also where nobody has begun with the ledger
        yet. An endpoint that leads already is taken over at once: whoever listens there now has replaced it."""

    def renew(self, lease_s: float) -> None:
        """Lead for `lease_s` from now on. Raises `LedgerLost` where another controller has begun since."""

    def resign(self) -> None:
        """Lead no more, so that another controller begins at once. Nothing where another leads already."""

    def leader(self) -> LedgerLeader | None:
        """Who leads; None where nobody's lease holds."""

    def stand_by(self, endpoint: str, for_s: float) -> None:
        """Note that the controller at `endpoint` waits to lead; forgotten after `for_s` seconds."""

    def standbys(self) -> tuple[str, ...]:
        """The endpoints of controllers that wait to lead, sorted."""

    def forget(self) -> None:
        """Remove the whole table, because its cluster has ended. Nothing where another controller leads."""

    def close(self) -> None: ...


class MemoryLedger:
    """A ledger in memory, for clusters that live no longer than their controller."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def begin(self) -> Mapping[str, str]:
        return dict(self.rows)

    def put(self, key: str, value: str) -> None:
        self.rows[key] = value
