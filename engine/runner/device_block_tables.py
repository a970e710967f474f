"""Device block tables: the block tables of all requests that steps read, as rows on the compute device.

A step needs the pages of whole contexts: 2,048 page numbers a request at 32k, which hardly change from one step to the
next. `engine.runner.device_rows` says how rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.cache.allocation import TableSlice
from twinpool.cache.pool.epoch_table import EpochTable
from twinpool.engine.runner.device_rows import DeviceRows, RowUpdate

_UNKNOWN = -1
_PAGES, _EPOCHS = 0, 1


@dataclass(frozen=True, slots=True)
class PlannedTables:
    """The block tables of one pool that a planned step reads, one a sequence, and what the device lacks of them."""

    rows: list[int]
    firsts: list[int]
    """The page numbers that the sequences' tables are read from."""
    stops: Sequence[int]
    """The page numbers behind the last ones that are read."""
    updates: Sequence[RowUpdate]
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
        self._rows = DeviceRows(device, 2)
        self._planned = self._applied = 0
        self._fresh_at = np.zeros(0, dtype=np.int64)
        """By row, how many releases the pool's epoch table had counted when the row was last found fresh,"""
        self._fresh_to = np.zeros(0, dtype=np.int64)
        """and up to which entry."""

    @property
    def on_cpu(self) -> bool:
        return self._rows.on_cpu

    # ------------------------------------------------------------ planning

    def plan(self, slices: Sequence[TableSlice], stops: Sequence[int]) -> PlannedTables:
        """Find each table's row, and collect what the device lacks of it. `stops`: the page numbers behind the last
        ones that the sequences read.

        The step's operation must `update` with the result first of all; a step that isn't launched after all must be
        taken back (`undo`).
        """
        rows, firsts = [], []
        updates: list[RowUpdate] = []
        for (table, first, reach), stop in zip(slices, stops, strict=True):
            assert stop <= reach <= len(table.pages), "the block table is too short"
            row = table.row
            if row is None:
                row = table.row = self._rows.take(table)
            known, length = row.copied, len(table.pages)
            if known < length:
                updates.append(RowUpdate(row, known, (table.pages[known:], table.epochs[known:])))
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
        self._rows.undo(planned.updates)

    # ------------------------------------------------------------ in a step's operation

    def update(self, planned: PlannedTables) -> None:
        """Bring the rows up to date with a planned step. Raises `RuntimeError` where an earlier step's updates never
        came, so that rows may lack entries."""
        if planned.number != self._applied:
            raise RuntimeError(f"the block tables of step {self._applied} never came to the device")
        self._applied += 1
        self.enter(planned.updates)

    def enter(self, updates: Sequence[RowUpdate]) -> None:
        """Write these entries to their rows."""
        self._rows.enter(updates)
        lacking = len(self._rows.tensors[_PAGES]) - len(self._fresh_at)
        if lacking:
            self._fresh_at = np.concatenate((self._fresh_at, np.full(lacking, _UNKNOWN, dtype=np.int64)))
            self._fresh_to = np.concatenate((self._fresh_to, np.zeros(lacking, dtype=np.int64)))
        for one in updates:
            self._fresh_to[one.row.number] = min(self._fresh_to[one.row.number], one.first)

    def pages(self, planned: PlannedTables, rows_b: Tensor) -> Tensor:
        """The pages of the step's rows from their first entry on: [B, width] int32. `rows_b` are the numbers of the
        rows, [B] int64 on the device."""
        return self._rows.chosen(_PAGES, planned.rows, rows_b, planned.width)

    def epochs(self, planned: PlannedTables, rows_b: Tensor) -> Tensor:
        """The epochs of these pages: [B, width] int32."""
        return self._rows.chosen(_EPOCHS, planned.rows, rows_b, planned.width)

    def windows(self, planned: PlannedTables, rows_b: Tensor, firsts_b: Tensor) -> tuple[Tensor, Tensor]:
        """The step's rows from `firsts_b` ([B] int32, the planned ones on the device) on: pages and epochs, [B, width]
        int32 each."""
        pages_rp, epochs_rp = self._rows.tensors
        columns_bw = firsts_b.long().unsqueeze(1) + torch.arange(planned.width, device=self._device)
        columns_bw.clamp_(max=pages_rp.shape[1] - 1)
        rows_b1 = rows_b.unsqueeze(1)
        return pages_rp[rows_b1, columns_bw], epochs_rp[rows_b1, columns_bw]

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
        pages_rp, epochs_rp = (tensor.numpy() for tensor in self._rows.tensors)
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
