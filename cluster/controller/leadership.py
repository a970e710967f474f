"""The controllers' ledger, and which of several controllers leads by it.

*The ledger* is where the controller's table outlives the controller. It keeps texts under keys, and has one writer at a
time: beginning with a ledger refuses every later write of who had it before (a *fencing token*, as in Kleppmann's "How
to do distributed locking"), so that a controller that was stopped and has been replaced can grant nothing when it goes
on.

A ledger that several controllers reach also keeps who leads: a lease, which the leader renews, and which another
controller takes over once it has run out. The lease says when a controller may begin;
that its predecessor can't write any more is the fencing's doing.

*Leadership* says which of several controllers grants leases, and until when. Controllers of one ledger (`LeasedLedger`)
are alike. Who finds no leader's lease leads; the others wait. The leader renews its lease, and counts it from before
each renewal was sent, less a margin: so it stops granting before another controller can begin. The next leader gives
each worker that had a lease a whole one from its beginning on, which is later than the end of any that its predecessor
has granted.

The logic alone: the clock is injected, and whoever calls does the waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from twinpool.contracts.clock import Clock
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


log = logging.getLogger("twinpool.controller")

MARGIN_SHARE = 0.1
"""Part of a lease that its holder doesn't use: the clocks of two machines may run so differently."""
RENEWALS = 4
"""Renewals of a leader's lease within its length."""


class Leadership:
    """One controller's part in it. Used from one thread, but for `held`."""

    def __init__(
        self, ledger: LeasedLedger, clock: Clock, endpoint: str, host: str, lease_s: float, *, first: bool
    ) -> None:
        """`first`: whether this controller may be the first of a ledger that nobody has begun with."""
        self._ledger, self._clock, self._first = ledger, clock, first
        self._endpoint, self._host, self._lease_s = endpoint, host, lease_s
        self._until: float | None = None
        self._renew_at = 0.0
        self._said = ""
        self.leader: LedgerLeader | None = None
        """Who led at the latest look."""
        self.standbys: tuple[str, ...] = ()
        """Who waited to lead at the latest look."""

    @property
    def held(self) -> bool:
        """Whether this controller leads, by its own clock: only then may it grant anything. Any thread."""
        until = self._until  # Read once: the thread that renews may end it in between.
        return until is not None and self._clock.now() < until

    @property
    def lapsed_s(self) -> float:
        """Seconds since its lease has run out; 0 while that holds, or where it never led."""
        until = self._until
        return max(0.0, self._clock.now() - until) if until is not None else 0.0

    @property
    def pause_s(self) -> float:
        """Seconds between two calls of `take`, or of `renew`, at most."""
        return self._lease_s / (2 * RENEWALS)

    def take(self) -> bool:
        """Lead if nobody does; returns whether this controller leads now. A ledger that can't be reached is said once
        and tried again with the next call."""
        sent_at = self._clock.now()
        try:
            if self._ledger.take(self._endpoint, self._host, self._lease_s, first=self._first):
                self._count(sent_at)
                self._look()
                self._say(f"leads, term {self.leader.term if self.leader is not None else '?'}")
                return True
            self._ledger.stand_by(self._endpoint, self._lease_s)
            self._look()
        except OSError as error:
            self._say(f"waits for its ledger: {error}")
        else:
            who = f"{self.leader.endpoint} leads" if self.leader is not None else "nobody has led yet"
            self._say(f"stands by: {who}")
        return False

    def renew(self, *, now: bool = False) -> None:
        """Renew the lease where that is due, or `now`. A ledger that can't be reached is said once; the lease runs out
        then. Raises `LedgerLost` where another controller has begun."""
        sent_at = self._clock.now()
        if sent_at < self._renew_at and not now:
            return
        try:
            self._ledger.renew(self._lease_s)
            self._count(sent_at)
            self._look()
        except OSError as error:
            self._renew_at = sent_at + self.pause_s
            self._say(f"can't renew its lease: {error}")
        except LedgerLost:
            self._until = None
            raise
        else:
            self._say(f"leads, term {self.leader.term if self.leader is not None else '?'}")

    def resign(self) -> None:
        """Lead no more, so that a standby begins at once. A ledger that can't be reached lets the lease run out."""
        self._until = None
        try:
            self._ledger.resign()
        except OSError as error:
            log.warning("the leader's lease is left to run out: %s", error)

    def _count(self, sent_at: float) -> None:
        self._until = sent_at + (1 - MARGIN_SHARE) * self._lease_s
        self._renew_at = sent_at + self._lease_s / RENEWALS

    def _look(self) -> None:
        self.leader, self.standbys = self._ledger.leader(), self._ledger.standbys()

    def _say(self, what: str) -> None:
        if what != self._said:
            log.warning("this controller %s", what, extra={"endpoint": self._endpoint})
        self._said = what
