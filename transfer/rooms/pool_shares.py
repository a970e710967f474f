"""Shares of pools: what a room still has to hand over, pool by pool.

Each pool's share is a run of page numbers, handed over from its first to its last. The room is done when all shares are
(hazard C1: pages that came without their windows and states are no hand-over), and a pool of which nothing was wanted
is in a state of its own, not "all of none" (hazard C2). Both ends keep a `RoomProgress`: the writer of the pages that
it has still to write, the reader of the pages that have still to arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class PoolProgress(StrEnum):
    """How far the share of one pool is."""

    NOTHING = "nothing"
    """Nothing of the pool was wanted."""
    COMING = "coming"
    DONE = "done"


class RoomProgress:
    """The numbers that are wanted of each pool, and how many of them have been handed over."""

    def __init__(self, wanted: Mapping[str, range]) -> None:
        self._wanted = dict(wanted)
        self._next = {pool: numbers.start for pool, numbers in wanted.items()}

    def share(self, pool: str) -> PoolProgress:
        if not self._wanted.get(pool):
            return PoolProgress.NOTHING
        return PoolProgress.COMING if self.left(pool) else PoolProgress.DONE

    def left(self, pool: str) -> range:
        """Return the numbers of `pool` that are wanted and not handed over yet; empty where nothing is wanted."""
        wanted = self._wanted.get(pool, range(0))
        return range(self._next.get(pool, 0), wanted.stop)

    def takes(self, pool: str, numbers: range) -> bool:
        """Return whether `numbers` are the next ones of `pool`: not empty, without a gap, and wanted."""
        left = self.left(pool)
        return bool(numbers) and numbers.start == left.start and numbers.stop <= left.stop

    def advance(self, pool: str, numbers: range) -> None:
        """Record that `numbers` are handed over. `takes` must hold for them."""
        assert self.takes(pool, numbers), f"{pool} {numbers}: {self.left(pool)} is left"
        self._next[pool] = numbers.stop

    @property
    def done(self) -> bool:
        """Whether no pool has anything left."""
        return all(self.share(pool) is not PoolProgress.COMING for pool in self._wanted)

    def __str__(self) -> str:
        """The numbers that are left, in words for logs and errors."""
        left = {pool: self.left(pool) for pool in self._wanted if self.share(pool) is PoolProgress.COMING}
        return ", ".join(f"{pool} {r.start}..{r.stop - 1}" for pool, r in left.items()) or "nothing"
