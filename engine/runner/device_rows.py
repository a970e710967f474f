"""Device rows: int32 tensors on the compute device that have a row for each owner, kept from step to step.

What a step needs of a request may be long and hardly change: its block tables, its tokens. So it has a row on the
device, and a step that is planned brings what was appended since the last one. Rows are brought up to date when the
step runs, in the order of the stream: a step that is still under way reads what it was launched with, whatever the host
has done since, and a row can be given to another owner while the last step of the old one still runs.

*Block tables* (`DeviceBlockTables`): a step needs the pages of whole contexts, 2,048 page numbers a request at 32k.

*Token histories* (`DeviceTokenHistories`): penalties read all tokens of a request, of which the last may be drawn by a
step that is still under way. The host enters what it knows, and each step the token that it goes on from, and its
drafts behind it. Nothing is ever counted up: a token stands at its position, so a step that is computed again, whose
result is dropped or whose drafts are rejected, leaves nothing behind that the next one would have to take back.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.cache.allocation import DeviceRow, TableSlice
from twinpool.cache.device.device_copies import HostIntegers, upload
from twinpool.cache.pool.page_allocator import EpochTable

_FIRST_ROWS = 16
_FIRST_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """Entries that the device lacks: those of `row` from `first` on, an array for each of the tensors."""

    row: DeviceRow
    first: int
    entries: tuple[array[int], ...]


class DeviceRows:
    """Tensors of the same rows; see the module's prose. An entry that nobody entered is 0."""

    def __init__(self, device: torch.device, tensors: int) -> None:
        self._device = device
        self._owners: dict[int, weakref.ref[object]] = {}
        self._free: list[int] = []
        self._filled: list[int] = []
        """By row, up to which entry the device may have anything but 0 there."""
        shape = (_FIRST_ROWS, _FIRST_ENTRIES)
        self.tensors = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(tensors)]
        """[rows, entries] int32 each."""
        self.on_cpu = self.tensors[0].is_cpu

    # ------------------------------------------------------------ planning

    def take(self, owner: object) -> DeviceRow:
        """A row for the owner, for as long as it lives."""
        number = self._free.pop() if self._free else len(self._owners)
        self._owners[number] = weakref.ref(owner, lambda _: self._free.append(number))
        return DeviceRow(number)

    @staticmethod
    def undo(updates: Sequence[RowUpdate]) -> None:
        """Bring these updates with the next step, as theirs was not launched."""
        for one in updates:
            one.row.copied = min(one.row.copied, one.first)

    # ------------------------------------------------------------ in a step's operation

    def enter(self, updates: Sequence[RowUpdate]) -> None:
        """Write these entries to their rows, and 0 behind them as far as a row's last owner had entries."""
        if not updates:
            return
        self.reach(1 + max(one.row.number for one in updates), max(one.first + len(one.entries[0]) for one in updates))
        parts = [self._padded(one) for one in updates]
        if self.on_cpu:
            self._write(updates, parts)
        else:
            self._scatter(updates, parts)

    def reach(self, rows: int, entries: int) -> None:
        """Make so much room: rows and entries double."""
        had = self.tensors[0].shape
        self._filled += [0] * (rows - len(self._filled))
        if rows <= had[0] and entries <= had[1]:
            return
        shape = (_doubled(had[0], rows), _doubled(had[1], entries))
        old = self.tensors
        self.tensors = [torch.zeros(shape, dtype=torch.int32, device=self._device) for _ in old]
        for new, was in zip(self.tensors, old, strict=True):
            new[: had[0], : had[1]] = was

    def _padded(self, one: RowUpdate) -> list[HostIntegers]:
        end = one.first + len(one.entries[0])
        rest = max(0, self._filled[one.row.number] - end)
        self._filled[one.row.number] = end
        known = [np.frombuffer(entries, np.int32) for entries in one.entries]
        return [np.concatenate((part, np.zeros(rest, np.int32))) for part in known] if rest else known

    def _write(self, updates: Sequence[RowUpdate], parts: Sequence[Sequence[HostIntegers]]) -> None:
        """Enter the updates one by one, as a CPU does it at once."""
        arrays = [tensor.numpy() for tensor in self.tensors]
        for one, part in zip(updates, parts, strict=True):
            for array_re, entries in zip(arrays, part, strict=True):
                array_re[one.row.number, one.first : one.first + len(entries)] = entries

    def _scatter(self, updates: Sequence[RowUpdate], parts: Sequence[Sequence[HostIntegers]]) -> None:
        """Enter all updates by one copy to the device and a launch for each tensor."""
        width = self.tensors[0].shape[1]
        begins = [one.row.number * width + one.first for one in updates]
        places = np.concatenate([np.arange(at, at + len(part[0])) for at, part in zip(begins, parts, strict=True)])
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        place_n, *entries = upload((places, *columns), self._device)
        for tensor, entry_n in zip(self.tensors, entries, strict=True):
            tensor.view(-1).index_copy_(0, place_n, entry_n)

    def chosen(self, tensor: int, rows: Sequence[int], rows_b: Tensor, width: int) -> Tensor:
        """The first `width` entries of rows: [B, width] int32. `rows_b`: the rows' numbers on the device, int64."""
        part_re, first, count = self.tensors[tensor][:, :width], rows[0], len(rows)
        # Owners that came together have rows that follow each other: nothing is copied then.
        if list(rows) == list(range(first, first + count)):
            return part_re[first : first + count]
        return part_re.index_select(0, rows_b)


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size


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
        widest: int = max(map(sub, self.stops, self.firsts))
        return widest


class DeviceBlockTables:
    """The block tables of one pool on one device; see the module's prose.

    `plan` is for the host, when a step is launched. `update` and what reads the rows are for the step's operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = DeviceRows(device, 2)
        self.on_cpu = self._rows.on_cpu
        self._planned = self._applied = 0
        self._fresh_at = np.zeros(0, dtype=np.int64)
        """By row, how many releases the pool's epoch table had counted when the row was last found fresh,"""
        self._fresh_to = np.zeros(0, dtype=np.int64)
        """and up to which entry."""

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


class TokenHistory:
    """The tokens of one request: the host's own list, which grows, and a row on the device.

    Its steps are launched one position after the other, from any token that the host knows.
    """

    __slots__ = ("__weakref__", "launched", "row", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.row: DeviceRow | None = None
        self.launched = 0
        """The position behind the last one that a launched step enters, drafts left out."""


class EnteredTokens(NamedTuple):
    """The tokens that a step enters into a history: the one that it goes on from, and drafts."""

    history: TokenHistory
    start: int
    """Absolute position of the first."""
    at: int
    """Where the first is among the step's tokens."""
    length: int


@dataclass(frozen=True, slots=True)
class PlannedHistories:
    """The histories that a planned step reads, and what the device lacks of them."""

    sequences: list[int]
    """The sequences of the step that they are of."""
    rows: list[int]
    lengths: list[int]
    """Tokens of each, the entered ones included."""
    entered: list[EnteredTokens]
    updates: Sequence[RowUpdate]


class DeviceTokenHistories:
    """The token histories of one worker's requests on its device; see the module's prose.

    `plan` is for the host, when a step is launched; the others are for the step's operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = DeviceRows(device, 1)

    def plan(self, entered: Mapping[int, EnteredTokens]) -> PlannedHistories:
        """Find each history's row, and collect what the device lacks of it. `entered` is by the step's sequences."""
        rows, lengths = [], []
        updates: list[RowUpdate] = []
        for history, start, _, length in entered.values():
            row = history.row
            if row is None:
                row = history.row = self._rows.take(history)
            stop = min(len(history.tokens), start + 1)
            assert start <= max(stop, history.launched), "a token between is known to nobody"
            # Entered by steps that were launched before, or known by now: then the host's word is written over it.
            if row.copied < stop:
                updates.append(RowUpdate(row, row.copied, (array("i", history.tokens[row.copied : stop]),)))
                row.copied = stop
            history.launched = start + 1
            rows.append(row.number)
            lengths.append(start + length)
        return PlannedHistories(list(entered), rows, lengths, list(entered.values()), updates)

    def undo(self, planned: PlannedHistories) -> None:
        """Take back the plan of a step that was not launched."""
        self._rows.undo(planned.updates)

    def update(self, planned: PlannedHistories, tokens_m: Tensor) -> None:
        """Bring the rows up to date with a planned step, whose tokens are `tokens_m` ([M] int64)."""
        self._rows.enter(planned.updates)
        self._rows.reach(1 + max(planned.rows), max(planned.lengths))
        places = [
            (row, start + n, at + n)
            for row, (_, start, at, length) in zip(planned.rows, planned.entered, strict=True)
            for n in range(length)
        ]
        rows, positions, at = np.array(places, dtype=np.int64).T.copy()
        row_n, position_n, at_n = upload((rows, positions, at), self._device)
        (tokens_rp,) = self._rows.tensors
        tokens_rp.index_put_((row_n, position_n), tokens_m.index_select(0, at_n).int())

    def read(self, planned: PlannedHistories, sequences: Sequence[int]) -> Tensor:
        """The tokens of some of the step's sequences: [n, most] int64. What is behind a history's end is anything."""
        where = {sequence: place for place, sequence in enumerate(planned.sequences)}
        places = [where[sequence] for sequence in sequences]
        rows = [planned.rows[place] for place in places]
        (rows_n,) = upload((np.array(rows, dtype=np.int64),), self._device)
        return self._rows.chosen(0, rows, rows_n, max(planned.lengths[place] for place in places)).long()


def rectangle(histories: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Tokens that the host knows, padded with 0: [n, most] int64."""
    full: HostIntegers = np.zeros((len(histories), max(map(len, histories))), dtype=np.int64)
    for line, tokens in zip(full, histories, strict=True):
        line[: len(tokens)] = tokens
    (tokens_nl,) = upload((full,), device)
    return tokens_nl
