"""Holders of a block: which workers have it, on which of their tiers, as one 64-bit value.

A worker is a *slot*, a small number. Its tiers are two bits, `DEVICE` and `HOST`. Up to four holders stand in the value
itself, sixteen bits each, in the order of their slots: ``(slot + 1) << 2 | tiers``. More holders are a *row*: two
bitmaps over all slots, one a tier, which every block with the same holders shares. So a prefix that a thousand workers
have takes no more than one that a single worker has: its blocks name one row.

    holders    lane 3   lane 2   lane 1   lane 0
    none            0        0        0        0
    two             0        0   slot 7   slot 2
    a row      0xFFFF        -   the row's number

The number of rows is fixed. When none is left, a block keeps the holders that it has, and `crowded` counts those that
were left out: the index then knows less than is true. Rows are counted by the blocks that name them, and are never
changed while one does, but for `clear_slots`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

DEVICE, HOST = 1, 2
"""The tiers of a worker, as bits."""

LANES = 4
ROW_MARK = 0xFFFF
MAX_SLOTS = 16_382
"""Slots that a lane can name, the mark of a row left out."""
EMPTY = 0
"""The value without holders."""
_ROW = ROW_MARK << 48
ROWS_FROM = np.uint64(_ROW)
"""Values from here on name a row."""

assert sys.byteorder == "little", "lanes are read from the bytes of values"


def is_row(value: int) -> bool:
    return value >> 48 == ROW_MARK


def row_of(value: int) -> int:
    """Return the number of the row that a value names."""
    return value & 0xFFFF_FFFF


def inline_value(holders: dict[int, int]) -> int:
    """Return the value of at most four holders: their tiers by slot."""
    value = 0
    for lane, slot in enumerate(sorted(holders)):
        value |= ((slot + 1) << 2 | holders[slot]) << (16 * lane)
    return value


def inline_holders(value: int) -> dict[int, int]:
    """Return the tiers by slot of a value that isn't a row."""
    found = {}
    while value:
        found[((value & 0xFFFF) >> 2) - 1] = value & 3
        value >>= 16
    return found


class HolderSets:
    """The writer's side of the rows.

    `rows`: uint8 (rows, 2, slots / 8), the bitmaps, in memory that others may read.
    """

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self._rows = rows
        self._slots = rows.shape[2] * 8
        self._refs = np.zeros(len(rows), np.int64)
        """Blocks that name each row."""
        self._known: dict[bytes, int] = {}
        self._next = 0
        """Rows from here on were never used."""
        self._free: list[int] = []
        self._made: list[int] = []
        """Rows that were made since `drop_unused` was called."""
        self.crowded = 0
        """Holders that were left out because there was no row for them."""

    @property
    def used(self) -> int:
        """Rows in use."""
        return len(self._known)

    def plus(self, value: int, slot: int, tiers: int) -> int:
        """Return the value with these tiers of a slot added; the same value where there is no row for it."""
        if not is_row(value):
            holders = inline_holders(value)
            holders[slot] = holders.get(slot, 0) | tiers
            if len(holders) <= LANES:
                return inline_value(holders)
            bits = np.zeros(self._rows.shape[1:], np.uint8)
            for one, there in holders.items():
                _set(bits, one, there)
        else:
            bits = self._rows[row_of(value)].copy()
            _set(bits, slot, tiers)
        return self._intern(bits, value)

    def minus(self, value: int, slot: int, tiers: int) -> int:
        """Return the value with these tiers of a slot taken out."""
        if not is_row(value):
            holders = inline_holders(value)
            holders[slot] = holders.get(slot, 0) & ~tiers
            return inline_value({one: there for one, there in holders.items() if there})
        bits = self._rows[row_of(value)].copy()
        _clear(bits, slot, tiers)
        if (left := _holders(bits, LANES)) is not None:
            return inline_value(left)
        return self._intern(bits, value)

    def holders(self, value: int) -> dict[int, int]:
        """Return the tiers by slot of any value."""
        if not is_row(value):
            return inline_holders(value)
        return _holders(self._rows[row_of(value)], self._slots) or {}

    def count(self, old: NDArray[np.uint64], new: NDArray[np.uint64]) -> None:
        """Note that blocks with the values `old` have the values `new` now, and no reader can take them for the old
        ones any more: rows that no block names are free."""
        if not (np.maximum(old, new) >= ROWS_FROM).any():
            return
        gone, come = _rows_in(old), _rows_in(new)
        np.add.at(self._refs, come, 1)
        np.subtract.at(self._refs, gone, 1)
        for row in np.unique(gone).tolist():
            if not self._refs[row]:
                self._release(row)

    def drop_unused(self) -> None:
        """Free the rows that were made for values that no block took."""
        for row in self._made:
            if not self._refs[row] and self._known.get(self._rows[row].tobytes()) == row:
                self._release(row)
        self._made = []

    def clear_slots(self, slots: Collection[int]) -> NDArray[np.intp]:
        """Take slots out of all rows, in place; returns the rows that are empty then.

        Only for slots that no reader looks at any more. Rows may be equal afterwards, which costs rows and nothing
        else.
        """
        mask = np.zeros(self._rows.shape[2], np.uint8)
        for slot in slots:
            mask[slot >> 3] |= 1 << (slot & 7)
        used = np.flatnonzero(self._refs)
        self._rows[used] &= ~mask
        self._known = {self._rows[row].tobytes(): row for row in used.tolist()}
        # Twins: one of them is found by its content, the other lives until its blocks are gone.
        empty: NDArray[np.intp] = used[~self._rows[used].any(axis=(1, 2))]
        return empty

    def check(self, values: NDArray[np.uint64]) -> list[str]:
        """Recount the rows from the values of all blocks; returns a line for each disagreement."""
        counted = np.bincount(_rows_in(values), minlength=len(self._refs))
        wrong = np.flatnonzero(counted != self._refs).tolist()
        return [f"row {row}: {self._refs[row]} blocks are counted, {counted[row]} name it" for row in wrong]

    def _intern(self, bits: NDArray[np.uint8], otherwise: int) -> int:
        content = bits.tobytes()
        row = self._known.get(content)
        if row is None:
            if self._free:
                row = self._free.pop()
            elif self._next < len(self._rows):
                row, self._next = self._next, self._next + 1
            else:
                self.crowded += 1
                return otherwise
            self._rows[row] = bits
            self._known[content] = row
            self._made.append(row)
        return _ROW | row

    def _release(self, row: int) -> None:
        content = self._rows[row].tobytes()
        if self._known.get(content) == row:
            del self._known[content]
        self._free.append(row)


def _rows_in(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = (values[values >= ROWS_FROM] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    return rows


def _set(bits: NDArray[np.uint8], slot: int, tiers: int) -> None:
    for plane in (0, 1):
        if tiers >> plane & 1:
            bits[plane, slot >> 3] |= 1 << (slot & 7)


def _clear(bits: NDArray[np.uint8], slot: int, tiers: int) -> None:
    for plane in (0, 1):
        if tiers >> plane & 1:
            bits[plane, slot >> 3] &= ~(1 << (slot & 7)) & 0xFF


def _holders(bits: NDArray[np.uint8], at_most: int) -> dict[int, int] | None:
    """Return the tiers by slot of two bitmaps; None where there are more than `at_most` slots."""
    either = np.flatnonzero(np.unpackbits(bits[0] | bits[1], bitorder="little"))
    if len(either) > at_most:
        return None
    return {slot: _tiers(bits, slot) for slot in either.tolist()}


def _tiers(bits: NDArray[np.uint8], slot: int) -> int:
    return sum(1 << plane for plane in (0, 1) if bits[plane, slot >> 3] >> (slot & 7) & 1)
