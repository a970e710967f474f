"""Writes of the simulated data planes, and what goes wrong with them.

Bytes are damaged on the way, and one-sided writes fail, are cut short or overtaken. A write that is under way is a
completion that is over when its stores have landed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

import torch


class WireDamage:
    """Damage on the wire, by kind: how many items are still to be damaged, and how many were."""

    def __init__(self) -> None:
        self.due: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    def strikes(self, kind: str) -> bool:
        """Whether to damage the present item of this kind; counts it."""
        if not self.due[kind]:
            return False
        self.due[kind] -= 1
        self.done[kind] += 1
        return True

    def strike(self, region: torch.Tensor, offset: int) -> None:
        """Flip a bit of a page, at `offset` of `region`, if one is due."""
        if self.strikes("corrupt"):
            region[offset] ^= 0x40

    def struck(self, kind: str, data: bytes, rng: random.Random) -> bytes:
        """Return `data`, with a bit flipped if one is due."""
        if not self.strikes(kind):
            return data
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


class StoreFault(StrEnum):
    """What may befall a one-sided write."""

    FAILED = "failed"
    """It fails for its writer at once; what has left lands later, unless the reader ends the writer's access."""
    TRUNCATED = "truncated"
    """Its first part lands, then it fails."""
    REORDERED = "reordered"
    """It takes longer, and later writes land before it."""


class StoreFaults:
    """Faults of one-sided writes, drawn for each write from a generator of their own: all else in a run is drawn as it
    is without them."""

    def __init__(self, rng: random.Random, share: float) -> None:
        """`share`: of writes, those that a fault befalls."""
        self._rng, self._share = rng, share
        self.due: deque[StoreFault | None] = deque()
        """What befalls the next writes, before anything is drawn."""
        self.done: Counter[str] = Counter()

    def draw(self) -> StoreFault | None:
        """Draw what befalls the next write, and count it."""
        if self.due:
            fault = self.due.popleft()
        else:
            fault = self._rng.choice(tuple(StoreFault)) if self._rng.random() < self._share else None
        if fault is not None:
            self.done[fault] += 1
        return fault

    def delay(self) -> float:
        """Draw for how long a part of a write is held up, in seconds."""
        return self._rng.random() * 0.02


class FlyingStore:
    """A write in parts that land one after the other: a completion that fails where access has ended, or its connection
    is cut. What was given up may land all the same, where access has not ended."""

    def __init__(
        self, stores: list[Callable[[], None]], let_in: Callable[[], bool], reaching_in: Callable[[], bool]
    ) -> None:
        """`let_in`: whether the reader takes parts in. `reaching_in`: whether the writer stores them without it, as
        long as it has not given the write up."""
        self._stores, self._let_in, self._reaching_in = deque(stores), let_in, reaching_in
        self._landed = False
        self._error: RuntimeError | None = None

    def add(self, store: Callable[[], None]) -> None:
        """Add a last part."""
        self._stores.append(store)

    @property
    def parts(self) -> int:
        """The number of parts that have still to land."""
        return len(self._stores)

    @property
    def done(self) -> bool:
        return self._error is not None or self._landed

    def land(self) -> None:
        """Take the next part in. Does nothing once all have come."""
        if not self._stores:
            return
        store = self._stores.popleft()
        if self._let_in() or (self._error is None and self._reaching_in()):
            store()
        else:
            self.fail("the reader has ended this writer's access")
        self._landed = not self._stores and self._error is None

    def fail(self, reason: str) -> None:
        if not self.done:
            self._error = RuntimeError(reason)

    def wait(self) -> None:
        while not self.done:
            self.land()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()


class DelayedStore:
    """The second half of a write: a completion that runs at its time, or earlier if it is waited for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    @property
    def done(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    def order(self) -> None:
        self.wait()
