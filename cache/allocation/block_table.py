"""Block tables: which pages hold which positions of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.pool.page_allocator import Lease

NULL_PAGE = 0
"""The null page, which stands in a table where there is no page. Page 0 of every pool, and slot 0, is zeros: tables are
padded with it, and nothing is ever written to it."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of the sequence, from page number `first` on, that a request leased itself."""

    first: int
    lease: Lease

    @property
    def end(self) -> int:
        return self.first + len(self.lease)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The pages of a sequence in one pool from page number `first` on, with their epochs; of a state pool, the slot."""

    first: int
    pages: Sequence[int]
    epochs: Sequence[int]
