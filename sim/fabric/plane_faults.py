"""Faults of the simulated data planes: bytes that are damaged on the way, and one-sided writes that go wrong."""

from __future__ import annotations

import random
from collections import Counter, deque
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
