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

**A router reads the table of the index process** (`KVIndexReader`), which it maps read-only. The table is believed
while its pulse is fresh: the index process writes the time there, by the machine's monotonic clock, each round of its
loop. A router that finds no table, or one without a pulse, goes on with what it has sent, and looks for the table again
once a second. A new index process makes a new file.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.json_logs import log
from twinpool.router.kv_indexer.holder_sets import DEVICE, EMPTY, HOST, LANES, ROW_MARK, ROWS_FROM, HolderSets, is_row
from twinpool.router.kv_indexer.table_memory import STORAGE, WAYS, SlotList, SlotReader, TableMemory
from twinpool.router.state.prefix_hashes import PrefixHashes

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
    """Return the two buckets of each key, one after the other: (keys * 2,)."""
    halves = keys.view(np.uint32).reshape(-1, 2)[:, ::-1].astype(np.uint64).reshape(-1)
    halves *= np.uint64(count)
    halves >>= np.uint64(32)
    return halves.view(np.int64)


def _stored(keys: Keys) -> Keys:
    """Return keys as they stand in a table, where 0 is a free entry."""
    return np.maximum(keys, np.uint64(1))


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
            if again is None:
                return found
            keys, depths = keys[again], depths[again]
        self.unread += len(keys)
        return found

    def _read(self, keys: Keys, depths: NDArray[np.int32], found: HeldDepths) -> NDArray[np.bool_] | None:
        """Enter what is read of these blocks into `found`; returns which have to be read again, None where none has."""
        memory = self.memory
        buckets = _buckets(keys, memory.size.buckets)
        stripes = buckets >> memory.stripe_shift
        before = memory.versions.take(stripes)
        same = _matches(memory.keys.take(buckets, axis=0), keys)
        values = memory.holders.reshape(-1).take(_entries(buckets, same))
        in_rows = values >= ROWS_FROM
        rows: list[int] = []
        content: NDArray[np.uint8] | None = None
        if in_rows.any():
            # A value that was being changed may name no row that there is.
            last = np.uint64(memory.size.rows - 1)
            rows = np.minimum(values[in_rows] & np.uint64(0xFFFF_FFFF), last).tolist()
            content = memory.rows.take(list(dict.fromkeys(rows)), axis=0)
        torn = memory.versions.take(stripes)
        torn ^= before
        torn |= before & np.uint64(1)
        again: NDArray[np.bool_] | None = None
        if torn.any():
            again = (torn != 0).reshape(-1, 2).any(axis=1)
        which = same // (2 * WAYS)
        ends = depths.take(which)
        alone: NDArray[np.bool_] | None = None
        if again is not None:
            ends[again.take(which)] = 0  # As if nobody held it.
            alone = (ends > 0) & ~in_rows
        if content is not None:
            alone = ~in_rows if alone is None else alone
            deepest = dict.fromkeys(rows, 0)
            for row, end in zip(rows, ends[in_rows].tolist(), strict=True):
                deepest[row] = max(deepest[row], end)
            _enter_rows(content, np.fromiter(deepest.values(), np.int32, len(deepest)), found)
        if alone is not None:
            values, ends = values[alone], ends[alone]
        _enter_lanes(values, ends, found)
        return again


def _matches(entries: Keys, keys: Keys) -> NDArray[np.intp]:
    """Return where the entries of the keys' buckets have these keys: places in the (keys, 2 * `WAYS`) entries. Both
    buckets of a key may be one: then its entry is found twice."""
    return np.flatnonzero(entries.reshape(len(keys), -1) == keys[:, None])


def _entries(buckets: NDArray[np.int64], same: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the numbers of the entries that were found at these places."""
    return buckets.take(same // WAYS) * WAYS + same % WAYS


def _enter_lanes(values: Keys, depths: NDArray[np.int32], found: HeldDepths) -> None:
    codes = np.ascontiguousarray(values).view(np.uint16)
    at = np.flatnonzero(codes)
    if not len(at):
        return
    codes, depths = codes.take(at), depths.take(at // LANES)
    slots = (codes >> np.uint16(2)).astype(np.intp) - 1
    np.maximum.at(found.held, slots, depths)
    there = (codes & np.uint16(DEVICE)) != 0
    np.maximum.at(found.device, slots[there], depths[there])


def _enter_rows(content: NDArray[np.uint8], deepest: NDArray[np.int32], found: HeldDepths) -> None:
    """Enter rows of holders and the deepest block that names each."""
    if len(content) == 1:  # As of a beginning that all prompts have.
        device, held = content[0, 0], content[0, 0] | content[0, 1]
        for bits, into in ((device, found.device), (held, found.held)):
            np.maximum(into, np.unpackbits(bits, bitorder="little") * deepest[0], out=into)
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
        memory, wanted = self.memory, int(key) or 1
        for half in (wanted >> 32, wanted & 0xFFFF_FFFF):
            bucket = half * memory.size.buckets >> 32
            ways = memory.keys[bucket].tolist()
            if wanted in ways:
                return slot in self._sets.holders(int(memory.holders[bucket, ways.index(wanted)]))
        return False

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
        unique = np.sort(_stored(keys))
        if len(unique) > 1 and not (more := unique[1:] != unique[:-1]).all():
            unique = unique[np.append(True, more)]
        return [unique[first : first + BATCH] for first in range(0, len(unique), BATCH)]

    def _locate(self, keys: Keys) -> NDArray[np.int64]:
        """Return the number of each key's entry, -1 for one that isn't there."""
        buckets = _buckets(keys, self.memory.size.buckets)
        same = _matches(self.memory.keys.take(buckets, axis=0), keys)
        found = np.full(len(keys), -1, np.int64)
        found[same // (2 * WAYS)] = _entries(buckets, same)
        return found

    def _change(self, at: NDArray[np.int64], slot: int, tiers: int, *, add: bool) -> None:
        """Add tiers of a slot to entries, or take them out."""
        if not len(at):
            return
        self._tick += 1
        values = self.memory.holders.reshape(-1).take(at)
        listed = values.tolist()
        change = self._sets.plus if add else self._sets.minus
        changes = {value: change(value, slot, tiers) for value in sorted(set(listed))}
        new = np.array([changes[value] for value in listed], np.uint64)
        if add:
            self.memory.stamps.reshape(-1)[at] = self._tick & 0xFFFF_FFFF
        changed = new != values
        self._write(at[changed], new[changed])
        self._sets.drop_unused()

    def _insert(self, keys: Keys, slot: int, tiers: int) -> None:
        """Enter keys that aren't there; each takes a free entry of the emptier of its buckets, or the oldest entry."""
        value = self._sets.plus(EMPTY, slot, tiers)
        self._tick += 1
        flat_keys, flat_stamps = self.memory.keys.reshape(-1), self.memory.stamps.reshape(-1)
        while len(keys):
            buckets = _buckets(keys, self.memory.size.buckets)
            used = self.memory.keys.take(buckets, axis=0) != 0
            counts = np.bitwise_count(used.view(np.uint64)[:, 0])
            # The places of the emptier of each key's two buckets.
            emptier = np.arange(0, len(buckets), 2) + (counts[1::2] < counts[::2])
            at = buckets.take(emptier) * WAYS + used.take(emptier, axis=0).argmin(axis=1)
            full = counts.take(emptier) == WAYS
            if full.any():
                both = buckets.reshape(-1, 2)[full]
                # In ticks before now, so that the count may begin again at 0.
                ages = (np.uint32(self._tick & 0xFFFF_FFFF) - self.memory.stamps[both]).reshape(len(both), -1)
                oldest = ages.argmax(axis=1)
                at[full] = both[np.arange(len(both)), oldest // WAYS] * WAYS + oldest % WAYS
            # Keys of one batch may have chosen the same entry: one has it, the others choose again.
            first = at.argsort(kind="stable")
            at = at.take(first)
            again = at[1:] == at[:-1]
            if again.any():
                one = np.append(True, ~again)
                at, first = at[one], first[one]
            if full.any():
                self.evicted += int(np.count_nonzero(flat_keys.take(at)))
            self._write(at, np.full(len(at), value, np.uint64), keys.take(first))
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
        old = flat_holders.take(at)
        stripes = (at // WAYS) >> memory.stripe_shift
        memory.versions[stripes] += np.uint64(1)  # Once, however often a stripe is named.
        if keys is not None:
            self.entries += len(at) - int(np.count_nonzero(flat_keys.take(at)))
            flat_keys[at] = keys
        free = at[holders == EMPTY]
        if len(free):
            self.entries -= int(np.count_nonzero(flat_keys.take(free)))
            flat_keys[free] = 0
        flat_holders[at] = holders
        memory.versions[stripes] += np.uint64(1)
        self._sets.count(old, holders)


PULSE_S = 2.0
"""Seconds without a pulse after which the table isn't believed."""
LOOK_S = 1.0
"""Seconds between two looks for a new table."""
SLOT_TRIES = 4
"""How often a question is asked again because slots changed meanwhile."""


class ToldPrefix(NamedTuple):
    """What the index says of one prompt, in positions by slot: int32 (slots,)."""

    depths: HeldDepths
    live: NDArray[np.bool_]
    """Which slots are known in full."""
    slots: SlotList
    storage: int
    """Positions that storage holds."""


class KVIndexReader:
    """Follows the table at `path`. Times are seconds of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that is mapped."""
        self._reader: HolderReader | None = None
        self._slots: SlotReader | None = None
        self._look_at = float("-inf")

    @property
    def memory(self) -> TableMemory | None:
        """The table that is mapped."""
        return self._reader.memory if self._reader is not None else None

    def fresh(self, now: float) -> bool:
        """Whether there is a table that is believed."""
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()
        memory = self.memory
        return memory is not None and now - float(memory.header["pulse"][0]) <= PULSE_S

    def find(self, hashes: PrefixHashes, now: float) -> ToldPrefix | None:
        """Return what is known of a prompt; None where no table is believed, or it changes too fast to be read."""
        if not self.fresh(now):
            return None
        assert self._reader is not None, "a fresh table is mapped"
        assert self._slots is not None, "a fresh table is mapped"
        if self._reader.memory.page_tokens != hashes.page_tokens:
            return None
        for _ in range(SLOT_TRIES):
            slots, live = self._slots.read(), self._slots.live
            depths = self._reader.find(*hashes.asked_marks)
            if slots is not None and self._slots.version == slots.version:
                return ToldPrefix(depths, live, slots, int(depths.held[STORAGE]))
        return None

    def _look(self) -> None:
        try:
            found = os.stat(self._path)
            if self._file == (found.st_dev, found.st_ino):
                return
            memory = TableMemory.open(self._path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log("KV index not read", path=str(self._path), reason=str(error))
            return
        self._file = (found.st_dev, found.st_ino)
        self._reader, self._slots = HolderReader(memory), SlotReader(memory)
