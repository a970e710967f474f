"""The holder table: which workers hold which blocks, in a fixed number of bytes, for one writer and many readers.

A block is known by a key, 64 bits of its chained hash, which names every token up to its end. Its holders are one value
(`router.kv_indexer.holder_sets`). With its stamp, a block takes `ENTRY_BYTES` (20), whoever holds it.

**Entries are in buckets** of eight. A key has two buckets, by its upper and its lower half, and is in one of them; a
new one goes to the emptier (Azar et al. 1994: with two choices, buckets fill almost evenly, so nine tenths of a table
can be used). When both are full, the entry that was stored the longest ago gives way and is counted. So there is no
growth, nothing to rehash, and no mark of what was deleted; whatever is forgotten costs a worse choice and nothing else.

**Readers never wait and never see half an entry.** Each run of buckets has a version, which is odd while the writer
changes something there (a seqlock: Lameter 2005, "Effective synchronization on Linux/NUMA systems"; Boehm 2012, "Can
seqlocks get along with programming language memory models?"). A reader reads the versions, then keys, holders and rows,
then the versions again, and keeps what has the same even version at both times; the rest it reads again, and after
`TRIES` it goes without. A row is used anew only after every block that named it has another version. That the writes
are seen in order is a property of x86-64 (total store order), the one processor that is supported, and each step is a
call of numpy's, which no compiler moves. `tests/router/kv_indexer/test_torn_reads.py` shows it, with processes.

**A question is one prompt's keys**, and costs what these keys cost, however many workers there are: the holders of its
blocks are looked up together, and each distinct value is told once. A worker that holds a block holds all before it (a
prefix tree evicts from the leaves), so how far it holds a prompt is the deepest block that it holds, also where the
table has lost one in between.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.kv_indexer.holder_sets import DEVICE, EMPTY, HOST, LANES, ROW_MARK, HolderSets, is_row
from router.kv_indexer.table_memory import WAYS, TableMemory

TRIES = 16
"""How often a reader reads an entry that the writer is changing."""
BATCH = 4096
"""Keys that are written at a time: their buckets are closed to readers for that long."""
SWEEP_BUCKETS = 8192
"""Buckets that a sweep looks through at a time."""

Keys = NDArray[np.uint64]


class HeldDepths(NamedTuple):
    """How much of a prompt each slot holds, by slot: int32 (slots,), in the unit of the depths that were asked with."""

    device: NDArray[np.int32]
    """On the device."""
    held: NDArray[np.int32]
    """On the device or in host memory."""


def _buckets(keys: Keys, count: int) -> NDArray[np.int64]:
    """Return the two buckets of each key: (keys, 2)."""
    halves = np.empty((len(keys), 2), np.uint64)
    halves[:, 0] = keys >> np.uint64(32)
    halves[:, 1] = keys & np.uint64(0xFFFF_FFFF)
    return (halves * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def _stored(keys: Keys) -> Keys:
    """Return keys as they stand in a table, where 0 is a free entry."""
    return np.where(keys == 0, np.uint64(1), keys)


class HolderReader:
    """Reads a table, which another process may be changing."""

    def __init__(self, memory: TableMemory) -> None:
        self.memory = memory
        self.unread = 0
        """Keys that were given up, as the writer changed their entries each time."""

    def find(self, keys: Keys, depths: NDArray[np.int32]) -> HeldDepths:
        """Return how much of a prompt each slot holds. `keys`: of its blocks, uint64 (blocks,); `depths`: where each
        block ends, above 0."""
        slots = self.memory.size.slots
        found = HeldDepths(np.zeros(slots, np.int32), np.zeros(slots, np.int32))
        keys = _stored(keys)
        for _ in range(TRIES):
            if not len(keys):
                return found
            again = self._read(keys, depths, found)
            keys, depths = keys[again], depths[again]
        self.unread += len(keys)
        return found

    def _read(self, keys: Keys, depths: NDArray[np.int32], found: HeldDepths) -> NDArray[np.bool_]:
        """Enter what is read of these blocks into `found`; returns which have to be read again."""
        memory = self.memory
        buckets = _buckets(keys, memory.size.buckets)
        stripes = buckets >> memory.stripe_shift
        before = memory.versions[stripes]
        # (blocks, 2 * WAYS): the entries of both buckets.
        same = (memory.keys[buckets] == keys[:, None, None]).reshape(len(keys), -1)
        way = same.argmax(axis=1)
        at = np.arange(len(keys))
        values = memory.holders[buckets[at, way // WAYS], way % WAYS]
        values[~same[at, way]] = EMPTY
        in_rows = values >> np.uint64(48) == ROW_MARK
        content = which = None
        if in_rows.any():
            rows, which = np.unique(values[in_rows] & np.uint64(0xFFFF_FFFF), return_inverse=True)
            # A value that was being changed may name no row that there is.
            content = memory.rows[np.minimum(rows, np.uint64(memory.size.rows - 1)).astype(np.int64)]
        again: NDArray[np.bool_] = ((before != memory.versions[stripes]) | (before & np.uint64(1) == 1)).any(axis=1)
        good = ~again
        alone = good & ~in_rows
        _enter_lanes(values[alone], depths[alone], found)
        if content is not None and which is not None:
            kept = good[in_rows]
            _enter_rows(content, which[kept], depths[in_rows][kept], found)
        return again


def _enter_lanes(values: Keys, depths: NDArray[np.int32], found: HeldDepths) -> None:
    codes = np.ascontiguousarray(values).view(np.uint16).astype(np.int64)
    at = np.flatnonzero(codes)
    if not len(at):
        return
    codes, depths = codes[at], depths[at // LANES]
    slots = (codes >> 2) - 1
    np.maximum.at(found.held, slots, depths)
    there = (codes & DEVICE) != 0
    np.maximum.at(found.device, slots[there], depths[there])


def _enter_rows(
    content: NDArray[np.uint8], which: NDArray[np.intp], depths: NDArray[np.int32], found: HeldDepths
) -> None:
    deepest = np.zeros(len(content), np.int32)
    np.maximum.at(deepest, which, depths)
    if len(content) == 1:  # As of a beginning that all prompts have.
        planes = np.unpackbits(content[0], axis=1, bitorder="little").astype(np.bool_)
        for there, into in ((planes[0], found.device), (planes[0] | planes[1], found.held)):
            into[there] = np.maximum(into[there], deepest[0])
        return
    # The deepest row first: a slot counts where it is met for the first time. There may be as many rows as workers.
    order = np.argsort(-deepest, kind="stable")
    order = order[deepest[order] > 0]
    for bits, into in ((content[:, 0], found.device), (content[:, 0] | content[:, 1], found.held)):
        met = np.bitwise_or.accumulate(bits[order], axis=0)
        first = met.copy()
        first[1:] &= ~met[:-1]
        row, at = np.nonzero(first)
        met_bits = np.unpackbits(first[row, at, None], axis=1, bitorder="little").astype(np.bool_)
        slot = (at[:, None] * 8 + np.arange(8))[met_bits]
        into[slot] = np.maximum(into[slot], np.repeat(deepest[order][row], met_bits.sum(axis=1)))


class HolderTable(HolderReader):
    """Writes a table, of which it is the only writer; the memory must be new."""

    def __init__(self, memory: TableMemory) -> None:
        super().__init__(memory)
        self._sets = HolderSets(memory.rows)
        self._tick = 0
        self.entries = 0
        self.evicted = 0
        """Blocks that gave way to others."""

    @property
    def crowded(self) -> int:
        """Holders that were left out because there was no row for their set."""
        return self._sets.crowded

    def holds(self, slot: int, key: np.uint64) -> bool:
        """Whether a slot holds this block on any tier."""
        (at,) = self._locate(_stored(np.array([key], np.uint64))).tolist()
        return at >= 0 and slot in self._sets.holders(int(self.memory.holders.reshape(-1)[at]))

    def add(self, slot: int, tiers: int, keys: Keys) -> None:
        """Note that a slot holds these blocks on these tiers."""
        assert 0 <= slot < self.memory.size.slots, "a slot of the table"
        for part in self._parts(keys):
            at = self._locate(part)
            known = at >= 0
            self._change(at[known], slot, tiers, add=True)
            self._insert(part[~known], slot, tiers)

    def remove(self, slot: int, tiers: int, keys: Keys) -> None:
        """Note that a slot doesn't hold these blocks on these tiers any more."""
        for part in self._parts(keys):
            at = self._locate(part)
            self._change(at[at >= 0], slot, tiers, add=False)

    def clear(self, slot: int, tiers: int) -> None:
        """Note that a slot holds nothing on these tiers: looks through the whole table."""
        for first in range(0, self.memory.size.buckets, SWEEP_BUCKETS):
            values = self.memory.holders[first : first + SWEEP_BUCKETS]
            at = np.flatnonzero(values.reshape(-1)) + first * WAYS
            self._change(at, slot, tiers, add=False)

    def empty(self) -> None:
        """Remove all blocks. Only where nobody else reads."""
        for array in (self.memory.keys, self.memory.holders, self.memory.stamps):
            array[...] = 0
        self._sets, self.entries = HolderSets(self.memory.rows), 0

    def forget(self, slots: Collection[int]) -> None:
        """Take slots out of the table that no reader looks at any more: looks through all of it, once for all."""
        if not slots:
            return
        dead = np.zeros(self.memory.size.slots, np.bool_)
        dead[list(slots)] = True
        emptied = np.zeros(self.memory.size.rows, np.bool_)
        emptied[self._sets.clear_slots(slots)] = True
        for first in range(0, self.memory.size.buckets, SWEEP_BUCKETS):
            part = self.memory.holders[first : first + SWEEP_BUCKETS].reshape(-1)
            in_rows = part >> np.uint64(48) == ROW_MARK
            rows = np.where(in_rows, part & np.uint64(0xFFFF_FFFF), np.uint64(0)).astype(np.int64)
            lanes = np.ascontiguousarray(part).view(np.uint16).reshape(-1, LANES).astype(np.int64)
            held = (lanes != 0) & ~in_rows[:, None]
            stricken = (held & dead[np.where(held, (lanes >> 2) - 1, 0)]).any(axis=1) | (in_rows & emptied[rows])
            at = np.flatnonzero(stricken)
            new = part[at].copy()
            for value in np.unique(new).tolist():
                left = EMPTY
                if not is_row(value):
                    left = value
                    for slot in self._sets.holders(value):
                        if dead[slot]:
                            left = self._sets.minus(left, slot, DEVICE | HOST)
                new[part[at] == value] = left
            self._write(at + first * WAYS, new)

    def check(self) -> list[str]:
        """Recount the table from its entries; returns a line for each disagreement."""
        keys, holders = self.memory.keys.reshape(-1), self.memory.holders.reshape(-1)
        found = self._sets.check(holders)
        if (count := int((keys != 0).sum())) != self.entries:
            found.append(f"{self.entries} entries are counted, {count} are there")
        if not np.array_equal(keys != 0, holders != EMPTY):
            found.append("an entry has a key and no holder, or a holder and no key")
        if (self.memory.versions & np.uint64(1)).any():
            found.append("a version is odd and nothing is written")
        used = keys[keys != 0]
        if len(np.unique(used)) != len(used):
            found.append("a key is there twice")
        return found

    # ------------------------------------------------------------ how

    @staticmethod
    def _parts(keys: Keys) -> list[Keys]:
        unique = np.unique(_stored(keys))
        return [unique[first : first + BATCH] for first in range(0, len(unique), BATCH)]

    def _locate(self, keys: Keys) -> NDArray[np.int64]:
        """Return the number of each key's entry, -1 for one that isn't there."""
        buckets = _buckets(keys, self.memory.size.buckets)
        same = (self.memory.keys[buckets] == keys[:, None, None]).reshape(len(keys), -1)
        way, at = same.argmax(axis=1), np.arange(len(keys))
        return np.where(same[at, way], buckets[at, way // WAYS] * WAYS + way % WAYS, -1)

    def _change(self, at: NDArray[np.int64], slot: int, tiers: int, *, add: bool) -> None:
        """Add tiers of a slot to entries, or take them out."""
        if not len(at):
            return
        self._tick += 1
        values, which = np.unique(self.memory.holders.reshape(-1)[at], return_inverse=True)
        change = self._sets.plus if add else self._sets.minus
        new = np.array([change(value, slot, tiers) for value in values.tolist()], np.uint64)
        if add:
            self.memory.stamps.reshape(-1)[at] = self._tick & 0xFFFF_FFFF
        changed = (new != values)[which]
        self._write(at[changed], new[which][changed])
        self._sets.drop_unused()

    def _insert(self, keys: Keys, slot: int, tiers: int) -> None:
        """Enter keys that aren't there; each takes a free entry of the emptier of its buckets, or the oldest entry."""
        value = self._sets.plus(EMPTY, slot, tiers)
        self._tick += 1
        flat_keys, flat_stamps = self.memory.keys.reshape(-1), self.memory.stamps.reshape(-1)
        while len(keys):
            buckets = _buckets(keys, self.memory.size.buckets)
            used = self.memory.keys[buckets] != 0
            emptier = used.sum(axis=2).argmin(axis=1)
            row = np.arange(len(keys))
            free = ~used[row, emptier]
            way = free.argmax(axis=1)
            at = buckets[row, emptier] * WAYS + way
            full = ~free[row, way]
            if full.any():
                both = buckets[full]
                # In ticks before now, so that the count may begin again at 0.
                ages = (np.uint32(self._tick & 0xFFFF_FFFF) - self.memory.stamps[both]).reshape(len(both), -1)
                oldest = ages.argmax(axis=1)
                at[full] = both[np.arange(len(both)), oldest // WAYS] * WAYS + oldest % WAYS
            # Keys of one batch may have chosen the same entry: one has it, the others choose again.
            at, first = np.unique(at, return_index=True)
            self.evicted += int((flat_keys[at] != 0).sum())
            self._write(at, np.full(len(at), value, np.uint64), keys[first])
            flat_stamps[at] = self._tick & 0xFFFF_FFFF
            if len(first) == len(keys):
                return
            keys = np.delete(keys, first)

    def _write(self, at: NDArray[np.int64], holders: Keys, keys: Keys | None = None) -> None:
        """Write entries, `keys` where they are new, in stripes that are closed meanwhile; without holders, an entry is
        free."""
        if not len(at):
            return
        memory, flat_keys, flat_holders = self.memory, self.memory.keys.reshape(-1), self.memory.holders.reshape(-1)
        old = flat_holders[at]
        stripes = np.unique((at // WAYS) >> memory.stripe_shift)
        memory.versions[stripes] += np.uint64(1)
        self.entries -= int((flat_keys[at] != 0).sum())
        if keys is not None:
            flat_keys[at] = keys
        flat_keys[at[holders == EMPTY]] = 0
        flat_holders[at] = holders
        self.entries += int((flat_keys[at] != 0).sum())
        memory.versions[stripes] += np.uint64(1)
        self._sets.count(old, holders)
