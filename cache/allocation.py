"""An allocation: all pages, slots and locks of one request, in every pool, until it is freed.

Its block tables have the pages that hold the positions of its sequence, and the epochs that these were leased under.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from twinpool.cache.device.device_port import Completion, failure
from twinpool.cache.pool.page_allocator import Lease, PageAllocator, joined
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TokenPrefix, digests_of
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


T = TypeVar("T")


def spread(parts: Sequence[NodePart], values: list[T], nothing: T) -> list[T]:
    """The values of `parts` (one a page) in a list by page number of the sequence; `nothing` where no part is.

    `parts` come in the order of the sequence.
    """
    end = parts[-1].node.start + len(parts[-1]) if parts else 0
    if end == len(values):
        return values
    out = [nothing] * end
    at = 0
    for part in parts:
        start, count = part.node.start, len(part)
        out[start : start + count] = values[at : at + count]
        at += count
    assert len(out) == end, "parts come in the order of the sequence"
    return out


def page_digests(parts: Sequence[NodePart], whole: int) -> list[int | None]:
    """Digests of the first `whole` pages of a sequence, by page number; None for pages that no part holds."""
    known: list[int | None] = spread(parts, list(digests_of(parts)), None)
    del known[whole:]
    known += [None] * (whole - len(known))
    return known


@dataclass(eq=False, slots=True)
class StateSnapshot:
    """A copy of the recurrent state after `depth` pages, in a slot of its own once `completion` is done."""

    depth: int
    lease: Lease
    completion: Completion


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Positions that a request need not compute, by the tier that had them."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass(eq=False)
class Allocation:
    """All state that one request reads and writes. Tables are indexed by page number of the sequence, from 0 on.

    Pages before `depth` were in the tree and are kept by `lock`; later pages are the request's own `runs`, until the
    tree takes them. A window's table has `NULL_PAGE` where the window has moved on, and ends where it was extended to
    so far: pages that the window leaves are used again further on. State pools have one working slot, which no other
    request ever sees.
    """

    owner: str
    prefix: TokenPrefix
    """The whole pages of tokens known when the allocation was made; a longer prefix may be shared later."""
    pages: int
    """Pages of all positions that the allocation was made for."""
    lock: NodeLock
    depth: int
    """Pages whose state was there when the allocation was made: computing starts after them."""
    cached: CachedTokens
    tables: dict[str, BlockTable] = field(default_factory=dict)
    runs: dict[str, list[PageRun]] = field(default_factory=dict)
    spare: dict[str, Lease] = field(default_factory=dict)
    """Leased pages of window pools, in place of those that the window has left, for positions still to come."""
    slots: dict[str, Lease] = field(default_factory=dict)
    snapshots: dict[str, list[StateSnapshot]] = field(default_factory=dict)
    digests: dict[str, list[int | None]] = field(default_factory=dict)
    """Digests of finished pages, by page number; None where the table has no page or the digest isn't known."""
    lacking: dict[str, range] = field(default_factory=dict)
    """Of a reservation (for a hand-over or a pull): the page and slot numbers that are to be sent, by pool."""
    started: list[Completion] = field(default_factory=list)
    """Operations that fill its state slots."""
    loaded_bytes: int = 0
    """Bytes of its prefix that are loaded from the host, where those of storage are then, too."""
    invalid: bool = False
    """Whether state loaded for it is damaged or failed to arrive: nothing computed from it may be used."""
    released: bool = False

    def enter(self, pool: str, parts: Sequence[NodePart], least: int = 0) -> None:
        """Begin the table of `pool` with the pages of `parts`, in order, padded to at least `least` entries."""
        table, marks = joined([part.lease for part in parts])
        table, marks = spread(parts, table, NULL_PAGE), spread(parts, marks, NEVER_FREED)
        table += [NULL_PAGE] * (least - len(table))
        marks += [NEVER_FREED] * (least - len(marks))
        self.tables[pool] = BlockTable(table, marks)

    def enter_held(self, pool: str, wanted: range) -> None:
        """Begin the table of `pool` with the `wanted` pages that the lock has on the device, less the lacking ones."""
        self.enter(pool, self.lock.on_device(pool))
        self.digests[pool], self.runs[pool] = [], []
        lacking, table = self.lacking[pool], self.tables[pool]
        # Locked pages before and after the wanted ones, and inside the lacking range, aren't the allocation's to read.
        table.truncate(wanted.stop)
        table.clear(0, min(wanted.start, len(table)))
        table.clear(lacking.start, max(lacking.start, min(lacking.stop, len(table))))
        stop = len(table)
        while stop and table.pages[stop - 1] == NULL_PAGE:
            stop -= 1
        table.truncate(stop)

    def enter_nothing(self, pools: Iterable[str]) -> None:
        """Begin empty tables of `pools`."""
        for pool in pools:
            self.tables[pool] = BlockTable()
            self.digests[pool], self.runs[pool] = [], []

    @property
    def start_failed(self) -> bool:
        """Whether an operation that fills its state slots has failed."""
        return any(failure(op) is not None for op in self.started if op.done)

    def named(self) -> dict[str, list[int]]:
        """Every page and slot that operations launched for the allocation may name, by pool."""
        named = {pool: [i for i in table.pages if i != NULL_PAGE] for pool, table in self.tables.items()}
        for pool, lease in self.slots.items():
            named[pool] = list(lease.indices) + [i for s in self.snapshots.get(pool, ()) for i in s.lease.indices]
            named[pool] += [i for part in self.lock.of(pool) if part.tier is Tier.DEVICE for i in part.lease.indices]
        return named

    def held(self) -> dict[str, set[int]]:
        """Of a reservation: the page and slot numbers that the sender needn't send, by pool."""
        held = {pool: {n for n, i in enumerate(table.pages) if i != NULL_PAGE} for pool, table in self.tables.items()}
        return held | {pool: {n.stop - 1} for pool, n in self.lacking.items() if pool not in self.tables and not n}

    def own(self, pool: str) -> int:
        """How many pages and slots of `pool` the allocation leased itself and still holds."""
        held = sum(len(run.lease) for run in self.runs.get(pool, ()))
        held += sum(len(part[pool]) for part in (self.slots, self.spare) if pool in part)
        return held + sum(len(s.lease) for s in self.snapshots.get(pool, ()))

    def check(self, allocator: PageAllocator, pool: str) -> list[str]:
        """Check that each page in the table of `pool` is the allocation's own or locked, under the epoch in the table.

        Returns a line for each fault.
        """
        found = []
        mine = {i for run in self.runs[pool] for i in run.lease.indices}
        mine |= {i for p in self.lock.of(pool) if p.tier is Tier.DEVICE for i in p.lease.indices}
        table = self.tables[pool]
        strangers = [i for i in table.pages if i != NULL_PAGE and i not in mine]
        if strangers:
            found.append(f"{self.owner}: {pool} pages {strangers} of its table are neither its own nor locked")
        used = [(i, e) for i, e in zip(table.pages, table.epochs, strict=True) if i != NULL_PAGE]
        if [e for _, e in used] != list(allocator.epochs.of([i for i, _ in used])):
            found.append(f"{self.owner}: its {pool} table has old epochs")
        for run in self.runs[pool]:
            if not run.lease.live:
                found.append(f"{self.owner}: its lease has ended")
            if tuple(table.pages[run.first : run.end]) != run.lease.indices:
                found.append(f"{self.owner}: its {pool} table differs from what it leased")
        return found
