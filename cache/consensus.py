"""Agreement by MIN over the ranks of a seat, without waiting.

Each rank of a seat finds out for itself how much of a prefix its storage holds, how far a prefetch came, whether a
load failed. What the seat does about it must be the same on every rank. So findings become decisions only here:

    plan of a step     the leader alone opens and closes keys, and says up to which round outcomes are settled
    findings           `propose(key, value)`: what this rank knows; until then it says NOT_YET
    `exchange()`       enters the round's collective with all keys at once, and picks up the rounds that completed
    `take(through)`    the decisions of the rounds that the plan calls settled: the MIN over all ranks

**Every rank enters every round (C3).** `exchange()` is called once a step by every rank, whether it has findings or
not; there is no way to take part in some keys only. It posts a vector and returns; nothing here waits for a peer. The
loop goes on with its step, and decisions lag by a round or more.

**The same decisions at the same step.** A round completes on all ranks with the same result, but not at the same
moment. Were each rank to act when *it* sees the result, the ranks would act at different steps. So the leader writes
`completed` into its next plan, and every rank, the leader included, calls `take` with that number as it applies the
plan. A follower for which that round has not arrived yet gets None: it keeps the plan and asks again after its next
poll (the result is on its way, since the leader has it).

**NOT_YET is not zero (C2).** A key is decided in the first round in which every rank has said something, and once. A
rank that found nothing says 0; a rank for which there is nothing to do says NO_LIMIT, which leaves the decision to
the others, and if all say so, that is the decision: `nothing_to_do`, distinct from a complete count of zero.

**All pools, then the rank (C1).** `Findings` collects what the pools of one rank found, and has no value before all
of them have.

**A rank runs ahead of the slowest by at most `ahead` rounds** (posted and not complete); then `exchange` posts
nothing, says so, and is called again before the rank goes on to the next plan. Rounds that are complete but not yet
settled by a plan don't count: the plan that settles them may be the very one that waits to post.

**A watchdog.** A round that is not complete `deadline_s` after it was posted ends the group with `PeerDead`, on this
rank and, as the group is closed, on all others. The worker then fails as a whole. A rank that waits for a plan says so
(`poll(waiting=True)`), and the leader's silence ends the group the same way: the leader of an idle seat sends an empty
plan now and then. Ranks that all pause are fine; no rank may pause alone.

The vector starts with the round's number and a fingerprint of all opens and closes so far, each also negated: MIN then
gives smallest and largest, and ranks out of step are found in the very round (`RanksDisagree`).
"""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from contracts.clock import Clock
from contracts.errors import CapacityError, PeerDead, RanksDisagree

NOT_YET = -(2**63)
"""This rank has not found out yet; below every value, so it holds the decision back."""
NO_LIMIT = 2**63 - 1
"""This rank has nothing to do for the key; above every value, so it leaves the decision to the others."""
_HEADER = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """What the ranks agreed on: the smallest of their values."""

    key: str
    value: int
    round: int

    @property
    def nothing_to_do(self) -> bool:
        """No rank had anything to do; not the same as a value of zero."""
        return self.value == NO_LIMIT


@dataclass(frozen=True, slots=True)
class Exchange:
    """`posted`: whether a round was entered (False: this rank is as far ahead as it may be). `completed`: the last
    round that all ranks have entered, as far as this rank has seen."""

    posted: bool
    completed: int


class Carrier(Protocol):
    """A rank's end of a group: collectives in the order of their posting, MIN by element, never waiting."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def post(self, vector: list[int]) -> None:
        """Enter the next collective with int64 values. Raises `PeerDead` when the group is closed."""

    def poll(self) -> list[int] | None:
        """The result of the oldest collective not polled yet; None while it is open. Raises `PeerDead`."""

    def close(self) -> None:
        """Leave, which ends the collectives of all ranks. Idempotent, never waits."""


class Findings:
    """What the pools of one rank found for one key; it has no value before every pool has one (C1)."""

    def __init__(self, pools: Iterable[str]) -> None:
        self._found = dict.fromkeys(pools, NOT_YET)

    def say(self, pool: str, value: int) -> None:
        """`value` as in `Ballot.propose`. Raises `KeyError` for a pool that isn't part of it."""
        if pool not in self._found:
            raise KeyError(f"{pool} is not among {', '.join(self._found)}")
        self._found[pool] = value

    @property
    def value(self) -> int:
        """The smallest finding; NOT_YET while a pool is missing; NO_LIMIT when no pool has anything to do."""
        return min(self._found.values(), default=NO_LIMIT)


@dataclass(slots=True, eq=False)
class _Key:
    name: str
    value: int = NOT_YET
    decided: bool = False


@dataclass(frozen=True, slots=True)
class _Round:
    number: int
    slots: dict[int, _Key]
    since: float


class Ballot:
    """One rank's side of the agreement. One thread.

    `capacity`: keys open at once, the same on all ranks. `ahead`: rounds posted and not complete. `deadline_s`: how
    long a posted round may stay open.
    """

    def __init__(
        self, carrier: Carrier, clock: Clock, *, capacity: int = 256, ahead: int = 4, deadline_s: float = 30.0
    ) -> None:
        assert min(capacity, ahead, deadline_s) > 0
        self._carrier, self._clock = carrier, clock
        self._capacity, self._ahead, self._deadline_s = capacity, ahead, deadline_s
        self._free = list(range(capacity))
        self._slots: dict[int, _Key] = {}
        self._slot_of: dict[str, int] = {}
        self._fingerprint = 0
        self._posted = 0
        self._since = clock.now()
        self._open: deque[_Round] = deque()
        self._complete: deque[tuple[_Round, list[int]]] = deque()
        self._dead: PeerDead | RanksDisagree | None = None

    @property
    def completed(self) -> int:
        """The last round that is complete here; the leader writes it into its plan. Rounds count from 1."""
        return self._posted - len(self._open)

    @property
    def keys(self) -> tuple[str, ...]:
        """The open keys, by slot."""
        return tuple(self._slots[slot].name for slot in sorted(self._slots))

    def open(self, key: str) -> None:
        """Begin to agree on `key`; by the plan only, in the same order on all ranks.

        Raises `CapacityError` when too many keys are open, `ValueError` when this one is.
        """
        if key in self._slot_of:
            raise ValueError(f"key {key} is open already")
        if not self._free:
            raise CapacityError(f"{self._capacity} keys are open; close one before opening {key}")
        slot = heapq.heappop(self._free)
        self._slots[slot], self._slot_of[key] = _Key(key), slot
        self._stamp(b"open", key)

    def close(self, key: str) -> None:
        """Stop agreeing on `key`, decided or not; by the plan only. Raises `KeyError` when it isn't open."""
        slot = self._slot_of.pop(key)
        del self._slots[slot]
        heapq.heappush(self._free, slot)
        self._stamp(b"close", key)

    def propose(self, key: str, value: int) -> bool:
        """Say what this rank found: 0 or more, NO_LIMIT for nothing to do, NOT_YET to take nothing for said.

        A value replaces the one before and counts from the next round on. False: the key is closed or decided, and
        the finding is of no use any more, which is ordinary. Raises `ValueError` for another value.
        """
        if value != NOT_YET and not 0 <= value <= NO_LIMIT:
            raise ValueError(f"a finding is 0 or more, got {value} for {key}")
        slot = self._slot_of.get(key)
        if slot is None or self._slots[slot].decided:
            return False
        self._slots[slot].value = value
        return True

    def exchange(self) -> Exchange:
        """Pick up what completed and enter the next round, once a step; never waits.

        Raises `PeerDead` when a peer is gone or a round is past its deadline, `RanksDisagree` when the ranks are out
        of step; from then on every call raises it.
        """
        self.poll()
        posted = len(self._open) < self._ahead
        if posted:
            self._post()
            self._collect()
        return Exchange(posted, self.completed)

    def poll(self, waiting: bool = False) -> int:
        """Pick up what completed, between steps; returns `completed`.

        `waiting`: this rank is ready for a plan and has none. Then the leader's silence counts as well: `deadline_s`
        after this rank's last round it is taken for dead. Raises as `exchange` does.
        """
        if self._dead is not None:
            raise self._dead
        self._collect()
        if self._open and self._clock.now() - self._open[0].since >= self._deadline_s:
            missing = f"round {self._open[0].number} has been open for {self._deadline_s} s"
            raise self._fail(PeerDead(f"{missing}: a rank of this seat no longer takes part"))
        if waiting and self._clock.now() - self._since >= self._deadline_s:
            raise self._fail(PeerDead(f"no plan for {self._deadline_s} s since round {self._posted}"))
        return self.completed

    def take(self, through: int) -> tuple[Decision, ...] | None:
        """The decisions of all rounds up to `through` that were not taken before, in order; the same on all ranks.

        None: a round up to `through` is not complete here yet; nothing was taken. `through` is from the leader's plan.
        """
        if through > self.poll():
            return None
        decisions: list[Decision] = []
        while self._complete and self._complete[0][0].number <= through:
            settled, result = self._complete.popleft()
            decisions += self._decide(settled, result)
        return tuple(decisions)

    def leave(self) -> None:
        """End the group for all ranks, as at shutdown. Idempotent."""
        self._dead = self._dead or PeerDead("this rank has left the group")
        self._carrier.close()

    def _post(self) -> None:
        number = self._posted + 1
        vector = [number, -number, self._fingerprint, -self._fingerprint]
        vector += [self._slots[s].value if s in self._slots else NO_LIMIT for s in range(self._capacity)]
        try:
            self._carrier.post(vector)
        except PeerDead as error:
            raise self._fail(error) from None
        self._posted, self._since = number, self._clock.now()
        self._open.append(_Round(number, dict(self._slots), self._since))

    def _collect(self) -> None:
        while True:
            try:
                result = self._carrier.poll()
            except PeerDead as error:
                raise self._fail(error) from None
            if result is None:
                return
            done = self._open.popleft()
            if result[0] != -result[1] or result[2] != -result[3]:
                what = "rounds" if result[0] != -result[1] else "keys"
                raise self._fail(RanksDisagree(f"round {done.number}: the ranks of this seat have other {what}"))
            self._complete.append((done, result))

    def _decide(self, settled: _Round, result: list[int]) -> Iterable[Decision]:
        for slot, key in sorted(settled.slots.items()):
            value = result[_HEADER + slot]
            # Closed since, decided already, or held back by a rank.
            if self._slots.get(slot) is key and not key.decided and value != NOT_YET:
                key.decided = True
                yield Decision(key.name, value, settled.number)

    def _stamp(self, what: bytes, key: str) -> None:
        mark = self._fingerprint.to_bytes(8, "big") + what + b" " + key.encode()
        self._fingerprint = int.from_bytes(hashlib.blake2b(mark, digest_size=8).digest(), "big") >> 1

    def _fail(self, error: PeerDead | RanksDisagree) -> PeerDead | RanksDisagree:
        self._dead = error
        self._carrier.close()
        return error


class LocalGroup:
    """Ranks in one process, as plain objects or threads: `members[rank]` is the carrier of a rank.

    With one member every round is complete as soon as it is posted.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self._lock = threading.Lock()
        self._posted: list[deque[list[int]]] = [deque() for _ in range(size)]
        self._results: list[deque[list[int]]] = [deque() for _ in range(size)]
        self._closed = False
        self.members = tuple(LocalMember(self, rank) for rank in range(size))

    @property
    def size(self) -> int:
        return len(self._posted)

    def post(self, rank: int, vector: list[int]) -> None:
        """Raises `PeerDead` when a member has left."""
        with self._lock:
            if self._closed:
                raise PeerDead("a rank of this seat has left the group")
            self._posted[rank].append(vector)
            while all(self._posted):
                vectors = [queue.popleft() for queue in self._posted]
                result = [min(column) for column in zip(*vectors, strict=True)]
                for queue in self._results:
                    queue.append(result)

    def poll(self, rank: int) -> list[int] | None:
        """What completed before a member left is still given out; then raises `PeerDead`."""
        with self._lock:
            if self._results[rank]:
                return self._results[rank].popleft()
            if self._closed:
                raise PeerDead("a rank of this seat has left the group")
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True


@dataclass(frozen=True, slots=True)
class LocalMember:
    """A rank's end of a `LocalGroup`."""

    group: LocalGroup
    rank: int

    @property
    def size(self) -> int:
        return self.group.size

    def post(self, vector: list[int]) -> None:
        self.group.post(self.rank, vector)

    def poll(self) -> list[int] | None:
        return self.group.poll(self.rank)

    def close(self) -> None:
        self.group.close()
