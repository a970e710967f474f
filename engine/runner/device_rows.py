"""Device rows: int32 tensors on the compute device that have a row for each owner, kept from step to step.

What a step needs of a request may be long and hardly change: its block tables, its tokens. So it has a row on the
device, and a step that is planned brings what was appended since the last one. Rows are brought up to date when the
step runs, in the order of the stream: a step that is still under way reads what it was launched with, whatever the host
has done since, and a row can be given to another owner while the last step of the old one still runs.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinpool.cache.allocation import DeviceRow
from twinpool.cache.memory.pinned_memory import HostIntegers, upload

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

    @property
    def on_cpu(self) -> bool:
        return self.tensors[0].is_cpu

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
