"""What a room still has to hand over, pool by pool.

Each pool's share is a run of numbers, handed over from its first to its last. The room is done when all of them are
(hazard C1: pages that came without their windows and states are no hand-over), and a pool of which nothing was wanted
is in a state of its own, not "all of none" (hazard C2). Both ends keep one: the writer of what it has still to write,
the reader of what has still to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class PoolProgress(StrEnum):
    """How far one pool is."""

    NOTHING = "nothing"
    """Nothing of it was wanted."""
    COMING = "coming"
    DONE = "done"


class RoomProgress:
    """Numbers wanted of each pool, and how many of them are through."""

    def __init__(self, wanted: Mapping[str, range]) -> None:
        self._wanted = dict(wanted)
        self._next = {pool: numbers.start for pool, numbers in wanted.items()}

    def share(self, pool: str) -> PoolProgress:
        if not self._wanted.get(pool):
            return PoolProgress.NOTHING
        return PoolProgress.COMING if self.left(pool) else PoolProgress.DONE

    def left(self, pool: str) -> range:
        """What is wanted of `pool` and not through; empty for a pool of which nothing is."""
        wanted = self._wanted.get(pool, range(0))
        return range(self._next.get(pool, 0), wanted.stop)

    def takes(self, pool: str, numbers: range) -> bool:
        """Whether `numbers` come next."""
        left = self.left(pool)
        return bool(numbers) and numbers.start == left.start and numbers.stop <= left.stop

    def advance(self, pool: str, numbers: range) -> None:
        """`numbers` are through. They come in order."""
        assert self.takes(pool, numbers), f"{pool} {numbers}: {self.left(pool)} is left"
        self._next[pool] = numbers.stop

    @property
    def done(self) -> bool:
        """Whether no pool has anything left."""
        return all(self.share(pool) is not PoolProgress.COMING for pool in self._wanted)

    def __str__(self) -> str:
        """What is left, for people."""
        left = {pool: self.left(pool) for pool in self._wanted if self.share(pool) is PoolProgress.COMING}
        return ", ".join(f"{pool} {r.start}..{r.stop - 1}" for pool, r in left.items()) or "nothing"
