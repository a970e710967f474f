"""Block tables: which pages hold which positions of a sequence."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.ids import Epoch

NULL_PAGE = 0
"""The null page, which stands in a table where there is no page. Page 0 of every pool, and slot 0, is zeros: tables are
padded with it, and nothing is ever written to it."""
NEVER_FREED = Epoch(0)
"""The epoch of the null page."""


def numbers(values: Iterable[int] = ()) -> array[int]:
    """Page numbers or epochs as a packed int32 array, the type that kernels read: steps copy tables without lists."""
    # struct takes a third of the time that array does to read a list.
    return array("i", struct.pack(f"{len(values)}i", *values) if isinstance(values, list) else values)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of the sequence, from page number `first` on, that a request leased itself."""

    first: int
    lease: Lease

    @property
    def end(self) -> int:
        return self.first + len(self.lease)


class DeviceRow:
    """The row that something has on the compute device (`engine.runner.device_rows`)."""

    __slots__ = ("copied", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.copied = 0
        """Entries that a step which was launched has brought to the device."""


class BlockTable:
    """The pages of one request in one pool by page number of the sequence, with the epochs that they were leased under.

    A table grows at its end. Entries that a pass may still read never change: `clear` is for pages behind a window.
    """

    __slots__ = ("__weakref__", "epochs", "pages", "row")

    def __init__(self, pages: Iterable[int] = (), epochs: Iterable[int] = ()) -> None:
        self.pages, self.epochs = numbers(pages), numbers(epochs)
        assert len(self.pages) == len(self.epochs), "a block table has an epoch for each page"
        self.row: DeviceRow | None = None
        """Its row on the device, from the first step that reads it."""

    def __len__(self) -> int:
        return len(self.pages)

    def put(self, first: int, pages: Sequence[int], epochs: Sequence[int]) -> None:
        """Enter pages from page number `first` on; what lacks before them is the null page."""
        lacking = first + len(pages) - len(self.pages)
        if lacking > 0:
            self.pages.extend([NULL_PAGE] * lacking)
            self.epochs.extend([NEVER_FREED] * lacking)
        self.pages[first : first + len(pages)] = numbers(pages)
        self.epochs[first : first + len(epochs)] = numbers(epochs)
        if self.row is not None:
            self.row.copied = min(self.row.copied, first)

    def clear(self, first: int, stop: int) -> None:
        """Put the null page in place of pages that no pass reads any more. The device's row keeps what it has there."""
        nothing = array("i", bytes(4 * (stop - first)))
        self.pages[first:stop] = nothing
        self.epochs[first:stop] = nothing

    def truncate(self, stop: int) -> None:
        """Drop the entries from page number `stop` on. Only for tables that no step has read yet."""
        assert self.row is None, "a step may read what is dropped"
        del self.pages[stop:], self.epochs[stop:]


class TableSlice(NamedTuple):
    """The pages that a pass over some positions reads: those of `table` from page number `first` up to `stop`. Of a
    state pool, the slot."""

    table: BlockTable
    first: int
    stop: int

    @staticmethod
    def of(pages: Sequence[int], epochs: Sequence[int] | None = None, first: int = 0) -> TableSlice:
        """A slice that is all of a table of its own. `epochs`: of each page; None: pages that were never freed."""
        table = BlockTable()
        table.put(first, pages, [NEVER_FREED] * len(pages) if epochs is None else epochs)
        return TableSlice(table, first, first + len(pages))

    @property
    def pages(self) -> array[int]:
        return self.table.pages[self.first : self.stop]

    @property
    def epochs(self) -> array[int]:
        return self.table.epochs[self.first : self.stop]

    def page(self, number: int) -> int:
        """The page that holds page number `number` of the sequence."""
        assert self.first <= number < self.stop, "the pass doesn't read this page"
        return self.table.pages[number]
