"""Device block tables: the block tables of all requests that steps read, kept on the compute device from step to step.

A step needs the pages of whole contexts: 2,048 page numbers a request at 32k, which hardly change from one step to the
next. So each request's table has a row of an int32 tensor on the device. A step that is planned brings what was
appended to its tables since the last one, and the rows are brought up to date when the step runs, in the order of the
stream: a step that is still under way reads what it was launched with, whatever the host has done since.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.allocation.block_table import NULL_PAGE, TableRow, TableSlice
from cache.pool.epoch_table import EpochTable
from engine.tensors.pinned_memory import HostIntegers, upload

_FIRST_ROWS = 16
_FIRST_PAGES = 64
_UNKNOWN = -1
_Entries = tuple[HostIntegers, HostIntegers]


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Entries that the device lacks: those of `row` from page number `first` on."""

    row: TableRow
    first: int
    pages: array[int]
    epochs: array[int]


@dataclass(frozen=True, slots=True)
class PlannedTables:
    """The block tables of one pool that a planned step reads, one a sequence, and what the device lacks of them."""

    rows: list[int]
    firsts: list[int]
    """The page numbers that the sequences' tables are read from."""
    stops: Sequence[int]
    """The page numbers behind the last ones that are read."""
    updates: Sequence[TableUpdate]
    number: int = 0
    """How many steps were planned before: they bring their updates in this order."""

    @property
    def width(self) -> int:
        """The most entries that a sequence's table is read for."""
        return max(stop - first for first, stop in zip(self.firsts, self.stops, strict=True))


class DeviceBlockTables:
    """The block tables of one pool on one device; see the module's prose.

    `plan` is for the host, when a step is launched. `update` and what reads the rows are for the step's operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owners: dict[int, weakref.ref[object]] = {}
        self._free: list[int] = []
        self._planned = self._applied = 0
        self._filled: list[int] = []
        """By row, up to which entry the device has anything but the null page there."""
        self._pages_rp = torch.zeros(_FIRST_ROWS, _FIRST_PAGES, dtype=torch.int32, device=device)
        self._epochs_rp = torch.zeros_like(self._pages_rp)
        self._fresh_at = np.full(_FIRST_ROWS, _UNKNOWN, dtype=np.int64)
        """By row, how many releases the pool's epoch table had counted when the row was last found fresh,"""
        self._fresh_to = np.zeros(_FIRST_ROWS, dtype=np.int64)
        """and up to which entry."""

    @property
    def on_cpu(self) -> bool:
        return self._pages_rp.is_cpu

    # ------------------------------------------------------------ planning

    def plan(self, slices: Sequence[TableSlice], stops: Sequence[int]) -> PlannedTables:
        """Find each table's row, and collect what the device lacks of it. `stops`: the page numbers behind the last
        ones that the sequences read.

        The step's operation must `update` with the result first of all; a step that isn't launched after all must be
        taken back (`undo`).
        """
        rows, firsts = [], []
        updates: list[TableUpdate] = []
        for (table, first, reach), stop in zip(slices, stops, strict=True):
            assert stop <= reach <= len(table.pages), "the block table is too short"
            row = table.row
            if row is None:
                row = table.row = TableRow(self._take(table))
            known, length = row.copied, len(table.pages)
            if known < length:
                updates.append(TableUpdate(row, known, table.pages[known:], table.epochs[known:]))
                row.copied = length
            rows.append(row.number)
            firsts.append(first)
        self._planned += 1
        return PlannedTables(rows, firsts, stops, updates, self._planned - 1)

    def undo(self, planned: PlannedTables) -> None:
        """Take back the plan of a step that was not launched: the next one brings its updates. No other step was
        planned since."""
        assert planned.number == self._planned - 1, "steps are launched in the order in which they are planned"
        self._planned -= 1
        for one in planned.updates:
            one.row.copied = min(one.row.copied, one.first)

    def _take(self, table: object) -> int:
        """A row for the table, for as long as the table lives."""
        number = self._free.pop() if self._free else len(self._owners)
        self._owners[number] = weakref.ref(table, lambda _: self._give_back(number))
        return number

    def _give_back(self, number: int) -> None:
        # Later steps write to the row in their turn, behind those that still read it.
        self._free.append(number)

    # ------------------------------------------------------------ in a step's operation

    def update(self, planned: PlannedTables) -> None:
        """Bring the rows up to date with a planned step. Raises `RuntimeError` where an earlier step's updates never
        came, so that rows may lack entries."""
        if planned.number != self._applied:
            raise RuntimeError(f"the block tables of step {self._applied} never came to the device")
        self._applied += 1
        self.enter(planned.updates)

    def enter(self, updates: Sequence[TableUpdate]) -> None:
        """Write these entries to their rows."""
        if not updates:
            return
        self._grow(updates)
        parts = [self._padded(one) for one in updates]
        if self.on_cpu:
            self._write(updates, parts)
        else:
            self._scatter(updates, parts)
        for one in updates:
            self._fresh_to[one.row.number] = min(self._fresh_to[one.row.number], one.first)

    def _write(self, updates: Sequence[TableUpdate], parts: Sequence[_Entries]) -> None:
        """Enter the updates one by one, as a CPU does it at once."""
        pages_rp, epochs_rp = self._pages_rp.numpy(), self._epochs_rp.numpy()
        for one, (pages, epochs) in zip(updates, parts, strict=True):
            place = slice(one.first, one.first + len(pages))
            pages_rp[one.row.number, place], epochs_rp[one.row.number, place] = pages, epochs

    def _scatter(self, updates: Sequence[TableUpdate], parts: Sequence[_Entries]) -> None:
        """Enter all updates by one copy to the device and a launch for each of the two tensors."""
        width = self._pages_rp.shape[1]
        begins = [one.row.number * width + one.first for one in updates]
        places = np.concatenate(
            [begin + np.arange(len(pages)) for begin, (pages, _) in zip(begins, parts, strict=True)]
        )
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        place_n, page_n, epoch_n = upload((places, *columns), self._device)
        self._pages_rp.view(-1).index_copy_(0, place_n, page_n)
        self._epochs_rp.view(-1).index_copy_(0, place_n, epoch_n)

    def _padded(self, one: TableUpdate) -> _Entries:
        """Its pages and epochs, int32; null pages behind them as far as the row's last owner had entries."""
        end = one.first + len(one.pages)
        rest = max(0, self._filled[one.row.number] - end)
        self._filled[one.row.number] = end
        pages, epochs = np.frombuffer(one.pages, np.int32), np.frombuffer(one.epochs, np.int32)
        if not rest:
            return pages, epochs
        nothing = np.full(rest, NULL_PAGE, np.int32)
        return np.concatenate((pages, nothing)), np.concatenate((epochs, nothing))

    def _grow(self, updates: Sequence[TableUpdate]) -> None:
        """Make room for these entries: rows and columns double."""
        rows, pages = self._pages_rp.shape
        most_rows = max(one.row.number for one in updates) + 1
        most_pages = max(one.first + len(one.pages) for one in updates)
        self._filled += [0] * (most_rows - len(self._filled))
        if most_rows <= rows and most_pages <= pages:
            return
        shape = (_doubled(rows, most_rows), _doubled(pages, most_pages))
        old = (self._pages_rp, self._epochs_rp)
        self._pages_rp, self._epochs_rp = (torch.zeros(shape, dtype=torch.int32, device=self._device) for _ in old)
        for new, was in zip((self._pages_rp, self._epochs_rp), old, strict=True):
            new[:rows, :pages] = was
        more = shape[0] - rows
        self._fresh_at = np.concatenate((self._fresh_at, np.full(more, _UNKNOWN, dtype=np.int64)))
        self._fresh_to = np.concatenate((self._fresh_to, np.zeros(more, dtype=np.int64)))

    def pages(self, planned: PlannedTables, rows_b: Tensor) -> Tensor:
        """The pages of the step's rows from their first entry on: [B, width] int32. `rows_b` are the numbers of the
        rows, [B] int64 on the device."""
        return self._chosen(self._pages_rp, planned, rows_b)

    def epochs(self, planned: PlannedTables, rows_b: Tensor) -> Tensor:
        """The epochs of these pages: [B, width] int32."""
        return self._chosen(self._epochs_rp, planned, rows_b)

    @staticmethod
    def _chosen(entries_rp: Tensor, planned: PlannedTables, rows_b: Tensor) -> Tensor:
        part_rp, first, count = entries_rp[:, : planned.width], planned.rows[0], len(planned.rows)
        # Requests that came together have rows that follow each other: nothing is copied then.
        if planned.rows == list(range(first, first + count)):
            return part_rp[first : first + count]
        return part_rp.index_select(0, rows_b)

    def windows(self, planned: PlannedTables, rows_b: Tensor, firsts_b: Tensor) -> tuple[Tensor, Tensor]:
        """The step's rows from `firsts_b` ([B] int32, the planned ones on the device) on: pages and epochs, [B, width]
        int32 each."""
        columns_bw = firsts_b.long().unsqueeze(1) + torch.arange(planned.width, device=self._device)
        columns_bw.clamp_(max=self._pages_rp.shape[1] - 1)
        rows_b1 = rows_b.unsqueeze(1)
        return self._pages_rp[rows_b1, columns_bw], self._epochs_rp[rows_b1, columns_bw]

    def stale(self, planned: PlannedTables, epochs: EpochTable) -> Tensor:
        """Flag sequences whose table names a page that was freed since: [B] bool, on a CPU.

        Reads only rows that may have become stale since they were last found fresh: all of them where anything was
        released meanwhile, else those with new entries.
        """
        rows, stops = np.array(planned.rows), np.array(planned.stops)
        stale = np.zeros(len(rows), dtype=np.bool_)
        unsure = ((self._fresh_at[rows] != epochs.releases) | (self._fresh_to[rows] < stops)).nonzero()[0]
        if len(unsure):
            looked_at, ends = rows[unsure], stops[unsure]
            stale[unsure] = found = self._differ(looked_at, ends, epochs)
            fresh = looked_at[~found]
            self._fresh_at[fresh], self._fresh_to[fresh] = epochs.releases, ends[~found]
        return torch.from_numpy(stale)

    def _differ(self, rows: NDArray[np.int64], stops: NDArray[np.int64], epochs: EpochTable) -> NDArray[np.bool_]:
        """Whether one of the first `stops` entries of each row has another epoch now: [n]."""
        pages_rp, epochs_rp = self._pages_rp.numpy(), self._epochs_rp.numpy()
        width = int(stops.max())
        if 2 * int(stops.sum()) >= len(rows) * width:
            pages, leased = pages_rp[rows, :width], epochs_rp[rows, :width]
            differ = (epochs.look_up(pages) != leased) & (np.arange(width) < stops[:, None])
            found: NDArray[np.bool_] = differ.any(1)
            return found
        # One long context beside short ones: only what there is of each.
        ends = stops.cumsum()
        begins = ends - stops
        places = np.repeat(rows * pages_rp.shape[1] - begins, stops) + np.arange(ends[-1])
        differ = epochs.look_up(pages_rp.reshape(-1)[places]) != epochs_rp.reshape(-1)[places]
        found = np.logical_or.reduceat(differ, begins)
        return found


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size
