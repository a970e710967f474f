"""Block tables: which pages hold which positions of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.pool.page_allocator import Lease

NO_PAGE = 0
"""In a table: nothing is there. Index 0 is the null page of every pool."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages `first ..` of the sequence that a request leased itself."""

    first: int
    lease: Lease

    @property
    def end(self) -> int:
        return self.first + len(self.lease)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Which pages hold positions from page number `first` on, and under which epochs; of a state pool, the slot."""

    first: int
    pages: Sequence[int]
    epochs: Sequence[int]
