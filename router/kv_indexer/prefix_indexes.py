"""Prefix indexes: what each prefill worker holds of a prompt, by tier, from what it says and what it was sent.

A worker whose events are followed in full (*live*) holds what they say, and besides what it was sent in the last
seconds, which no event confirms yet. Of any other worker what it was sent is all that is known. What decode workers
hold is known from events alone, unless they compute prompts as well. A wrong answer costs a worse choice and nothing
else.

**Recent prefixes** are the blocks that this router sent to workers in the last seconds. No event confirms these yet, so
every choice of a prefill worker asks for them, and every prompt that is placed is
entered. They are few and nobody else reads them: a dictionary of Python's answers in the time that a lookup in arrays
takes to begin. The holders of a block are the bits of one number, which blocks of one prompt share.

There are two halves, which take turns: what is sent goes into the younger one, and the older one is emptied when it has
been there for long enough, or when the younger one is full.

**Sent prefixes** are what this router has sent to each prefill worker, and so expects to be there. It is a guess: a
worker has every block that it was sent. Placement needs it where a worker tells nothing of its cache (no KV events, or
an index that is dead), and for prompts that were sent a moment ago, whose pages no event confirms yet. So there are two
memories: one of all that was sent, in a table of a fixed size (`router.kv_indexer.holder_table`) in which the oldest
gives way, and one of the last seconds.

What was sent dies with the worker's incarnation, as its cache does, unless the next incarnation reports that it has
adopted the last one's host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.router.kv_indexer.holder_sets import DEVICE
from twinpool.router.kv_indexer.holder_table import HolderTable, KVIndexReader, ToldPrefix
from twinpool.router.kv_indexer.table_memory import SlotList, TableMemory, TableSize
from twinpool.router.state.able_workers import AbleWorkers
from twinpool.router.state.prefix_hashes import PrefixHashes
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable

RECENT_S = 10.0
"""Seconds for which a prompt that was sent counts as there, whatever the worker's events say; at most twice as long."""
RECENT_BLOCKS = 200_000
"""Blocks of a half, of some 100 bytes each: beyond it, what was sent counts as there for a shorter time."""


class RecentPrefixes:
    """What was sent to each slot lately. Times are seconds of the router core's clock."""

    def __init__(self, slots: int, blocks: int = RECENT_BLOCKS) -> None:
        """`slots`: how many there are; `blocks`: the most of each half."""
        assert blocks > 0
        self._slots, self._most = slots, blocks
        self._halves: list[dict[int, int]] = [{}, {}]
        """The younger first: the slots that were sent a block, as bits, by its key."""
        self._turned = 0.0
        """When the halves took turns last."""

    def __len__(self) -> int:
        return sum(map(len, self._halves))

    def sent(self, slot: int, blocks: NDArray[np.uint64], now: float) -> None:
        """Enter a prompt's blocks, in order, that go to a slot."""
        self._turn(now)
        keys: list[int] = blocks[-self._most :].tolist()
        half, bit = self._halves[0], 1 << slot
        if not keys or half.get(keys[-1], 0) & bit:
            return  # Who was sent a prompt's last block was sent all of it.
        if len(half) + len(keys) > self._most:
            self._halves.reverse()
            half = self._halves[0]
            half.clear()
            self._turned = now
        more: dict[int, int] = {}
        """By the holders of a block those that it has with this slot: one number for all blocks with the same."""
        for key in keys:
            holders = half.get(key)
            if holders is None:
                half[key] = bit
            else:
                if holders not in more:
                    more[holders] = holders | bit
                half[key] = more[holders]

    def find(self, blocks: NDArray[np.uint64], ends: NDArray[np.int32], now: float) -> NDArray[np.int32]:
        """Return how many positions of a prompt each slot was sent: int32 (slots,). `blocks`: some of its blocks, in
        order; `ends`: the positions where they end."""
        self._turn(now)
        found = np.zeros(self._slots, np.int32)
        keys, depths = blocks[::-1].tolist(), ends[::-1].tolist()
        for half in self._halves:
            met = 0
            for key, depth in zip(keys, depths, strict=True) if half else ():
                # From the deepest on, so that a slot counts where it is met for the first time.
                if (holders := half.get(key)) is not None and (new := holders & ~met):
                    met |= new
                    if new & (new - 1):
                        bits = np.frombuffer(new.to_bytes(-(-self._slots // 8), "little"), np.uint8)
                        there = np.unpackbits(bits, count=self._slots, bitorder="little")
                        np.maximum(found, there * np.int32(depth), out=found)
                    else:
                        slot = new.bit_length() - 1
                        found[slot] = max(found[slot], depth)
        return found

    def forget(self, slots: Collection[int]) -> None:
        """Take slots out of what was sent."""
        gone = sum(1 << slot for slot in set(slots))
        for half in self._halves:
            for key in [key for key, holders in half.items() if holders & gone]:
                if left := half[key] & ~gone:
                    half[key] = left
                else:
                    del half[key]

    def _turn(self, now: float) -> None:
        """Empty the older half when it is time to."""
        if now - self._turned >= RECENT_S:
            self._halves.reverse()
            for half in self._halves if now - self._turned >= 2 * RECENT_S else self._halves[:1]:
                half.clear()
            self._turned = now


SENT_BYTES = 32 * 1024**2
"""Memory for all that was sent: 1.6 million blocks of 64 tokens, whichever workers they were sent to."""
MAX_ADOPTED = 4
"""Incarnations whose blocks one may have adopted, one from the other."""


@dataclass(slots=True)
class SentWorker:
    """The memory of one worker: the slots of its incarnation, the one that is written first."""

    incarnation: Incarnation
    slots: tuple[int, ...]
    """More than one where it has adopted what earlier incarnations had."""
    previous: tuple[int, ...] = ()
    """Slots of the last incarnation that was sent anything, until this one has said whether it adopted that."""
    used: bool = False
    """Whether it was sent anything."""


class SentPrefixes:
    """What was sent to the workers of the table. Times are seconds of the router core's clock."""

    def __init__(
        self, sent_bytes: int = SENT_BYTES, recent_blocks: int = RECENT_BLOCKS, *, of_decode: bool = False
    ) -> None:
        """`recent_blocks`: the most of each half of what was sent lately. `of_decode`: whether what decode workers are
        sent is remembered, too."""
        self._of_decode = of_decode
        self._sent = HolderTable(TableMemory.private(TableSize.of_bytes(sent_bytes)))
        self._recent = RecentPrefixes(self._sent.memory.size.slots, recent_blocks)
        self._workers: dict[WorkerName, SentWorker] = {}
        self._free = list(reversed(range(self._sent.memory.size.slots)))
        self._left: list[int] = []
        """Slots that nobody looks at any more, not yet taken out of the tables."""

    @property
    def table(self) -> HolderTable:
        """The memory of all that was sent."""
        return self._sent

    def follow(self, workers: Iterable[WorkerEntry]) -> None:
        """Take in the table of workers: a slot for each new incarnation that is remembered, none for workers that are
        gone."""
        known, self._workers = self._workers, {}
        for entry in workers:
            name, incarnation = entry.record.name, entry.record.incarnation
            worker = known.pop(name, None)
            # While a worker decodes, what it had as a prefill worker is kept.
            if entry.record.role is not Role.DECODE or self._of_decode:
                if worker is None:
                    worker = SentWorker(incarnation, self._take())
                elif worker.incarnation != incarnation:
                    worker = self._next(worker, incarnation)
                if worker.previous and entry.status.counters.get("arena_pages_adopted", 0) > 0:
                    self._adopt(worker)
            if worker is not None:
                self._workers[name] = worker
        for gone in known.values():
            self._left += gone.slots + gone.previous

    def slots(self, worker: WorkerKey) -> tuple[int, ...]:
        """Return the slots of a worker; none where it isn't remembered, or is another incarnation."""
        found = self._workers.get(worker[0])
        return found.slots if found is not None and found.incarnation == worker[1] else ()

    def sent(self, worker: WorkerKey, hashes: PrefixHashes, now: float) -> None:
        """Enter the blocks of a prompt that goes to a worker of the table."""
        if slots := self.slots(worker):
            self._workers[worker[0]].used = True
            blocks = hashes.blocks
            # Who was sent a prompt's last block was sent all of it.
            if not self._sent.holds(slots[0], blocks[-1]):
                self._sent.add(slots[0], DEVICE, blocks)
            self._recent.sent(slots[0], blocks, now)

    def find(self, hashes: PrefixHashes) -> NDArray[np.int32]:
        """Return how many positions of a prompt each slot was sent: int32 (slots,)."""
        return self._sent.find(*hashes.asked_blocks).held

    def find_recent(self, hashes: PrefixHashes, now: float) -> NDArray[np.int32]:
        """Return how many each slot was sent lately."""
        return self._recent.find(*hashes.asked_blocks, now)

    def _take(self) -> tuple[int, ...]:
        if not self._free:
            # Slots are taken out together, as that looks through all of the tables.
            self._sent.forget(self._left)
            self._recent.forget(self._left)
            self._free, self._left = self._left, []
        return (self._free.pop(),) if self._free else ()

    def _next(self, last: SentWorker, incarnation: Incarnation) -> SentWorker:
        keep, drop = (last.slots, last.previous) if last.used else (last.previous, last.slots)
        self._left += drop
        return SentWorker(incarnation, self._take(), keep)

    def _adopt(self, worker: SentWorker) -> None:
        merged = worker.slots + worker.previous
        worker.slots, worker.previous, worker.used = merged[:MAX_ADOPTED], (), True
        self._left += merged[MAX_ADOPTED:]


KEEP_S = 0.05
"""Seconds for which the answer about a prompt is good for its other choices."""


class HeldBy(Mapping[WorkerKey, int]):
    """Positions by worker, as an array has them; workers that hold nothing are left out."""

    __slots__ = ("_depths", "_places")

    def __init__(self, places: Mapping[WorkerKey, int], depths: NDArray[np.int64]) -> None:
        """`depths`: (workers,), which may change; `places`: where each of them is."""
        self._places, self._depths = places, depths

    def __getitem__(self, worker: WorkerKey) -> int:
        depth = int(self._depths[self._places[worker]])
        if not depth:
            raise KeyError(worker)
        return depth

    def __iter__(self) -> Iterator[WorkerKey]:
        return (worker for worker, at in self._places.items() if self._depths[at])

    def __len__(self) -> int:
        return int(np.count_nonzero(self._depths))


@dataclass(frozen=True, slots=True)
class HitRows:
    """What workers hold of one prompt, in positions: a row a worker, in the order of `keys`."""

    keys: list[WorkerKey]
    device: NDArray[np.int64]
    held: NDArray[np.int64]


@dataclass(slots=True)
class PromptHits:
    """What workers hold of one prompt, in positions."""

    device: Mapping[WorkerKey, int] = field(default_factory=dict)
    """On the device; workers that hold nothing are left out."""
    held: Mapping[WorkerKey, int] = field(default_factory=dict)
    """On the device or in host memory."""
    storage: int = 0
    """What storage holds, which workers share."""
    whole: int = 0
    """Who holds so many holds all of it, as far as can be known."""
    rows: HitRows | None = None
    """The same in arrays; None where there are none."""

    def device_of(self, able: AbleWorkers) -> NDArray[np.int64]:
        """What each of these workers holds on its device: (workers,)."""
        if self.rows is not None and self.rows.keys is able.columns.keys:
            return self.rows.device.take(able.at)
        return np.array([self.device.get(e.key, 0) for e in able], np.int64)

    def held_of(self, able: AbleWorkers) -> NDArray[np.int64]:
        """What each of these workers holds on its device or in host memory: (workers,)."""
        if self.rows is not None and self.rows.keys is able.columns.keys:
            return self.rows.held.take(able.at)
        return np.array([self.held.get(e.key, 0) for e in able], np.int64)


class PrefixIndexes:
    """The indexes of the workers of one router's table. Times are seconds of the router core's clock."""

    def __init__(self, kv_index: KVIndexReader | None = None, *, of_decode: bool = False) -> None:
        """`kv_index`: None where there is no index of KV events. `of_decode`: what decode workers were sent counts,
        too."""
        self.kv_index, self.sent_prefixes = kv_index, SentPrefixes(of_decode=of_decode)
        self._keys: list[WorkerKey] = []
        self._places: dict[WorkerKey, int] = {}
        self._sent_slots = np.zeros(0, np.intp)
        """The first slot of each worker of `_keys` in the memory of what was sent; the last slot of all for none."""
        self._remembered = np.zeros(0, np.bool_)
        """Whether what each worker of `_keys` was sent is remembered."""
        self._more_slots: list[tuple[int, int]] = []
        """Further slots: the worker's place in `_keys`, and the slot."""
        self._told_slots: tuple[SlotList, NDArray[np.intp]] | None = None
        """The list of slots that they were looked up in, and the slot of each worker of `_keys`; 0 for none."""
        self._last: tuple[PrefixHashes, float, PromptHits] | None = None

    def follow(self, workers: Iterable[WorkerEntry]) -> None:
        """Take in the table of workers."""
        entries = list(workers)
        self.sent_prefixes.follow(entries)
        self._keys = workers.keys if isinstance(workers, WorkerTable) else [entry.key for entry in entries]
        self._places = {key: at for at, key in enumerate(self._keys)}
        slots = [self.sent_prefixes.slots(key) for key in self._keys]
        none = self.sent_prefixes.table.memory.size.slots
        self._sent_slots = np.array([one[0] if one else none for one in slots], np.intp)
        self._remembered = self._sent_slots != none
        self._more_slots = [(at, slot) for at, several in enumerate(slots) for slot in several[1:]]
        self._told_slots = self._last = None

    def sent(self, worker: WorkerKey, hashes: PrefixHashes, now: float) -> None:
        """Enter the blocks of a prompt that goes to a worker of the table, if what it is sent is remembered."""
        sent, hits = hashes.blocks_end, None
        if not sent or not self.sent_prefixes.slots(worker):
            return
        if self._last is not None and self._last[0] is hashes:
            hits = self._last[2]
        else:
            self._last = None
        if hits is None or hits.device.get(worker, 0) < hits.whole:
            self.sent_prefixes.sent(worker, hashes, now)
        if hits is not None and hits.rows is not None:
            at = self._places[worker]
            for depths in (hits.rows.device, hits.rows.held):
                depths[at] = max(depths[at], sent)

    def hits(self, hashes: PrefixHashes, now: float) -> PromptHits:
        """Return what workers hold of a prompt."""
        if self._last is not None and self._last[0] is hashes and now - self._last[1] <= KEEP_S:
            return self._last[2]
        hits = self._find(hashes, now) if hashes.raw else PromptHits()
        self._last = hashes, now, hits
        return hits

    def _find(self, hashes: PrefixHashes, now: float) -> PromptHits:
        told = self.kv_index.find(hashes, now) if self.kv_index is not None else None
        if told is None:
            sent = self._of_workers(self.sent_prefixes.find(hashes))
            return self._hits(sent, sent, hashes.blocks_end)
        slots = self._slots_in(told)
        live = told.live.take(slots) & (slots > 0)
        recent = self._of_workers(self.sent_prefixes.find_recent(hashes, now))
        device = np.maximum(told.depths.device.take(slots), recent)
        held = np.maximum(told.depths.held.take(slots), device)
        if (self._remembered & ~live).any():
            sent = self._of_workers(self.sent_prefixes.find(hashes))
            device, held = np.where(live, device, sent), np.where(live, held, sent)
        marks_end = int(hashes.asked_marks[1][-1]) if len(hashes.asked_marks[1]) else hashes.blocks_end
        return self._hits(device, held, marks_end, told.storage)

    def _hits(self, device: NDArray[np.int32], held: NDArray[np.int32], whole: int, storage: int = 0) -> PromptHits:
        rows = HitRows(self._keys, device.astype(np.int64), held.astype(np.int64))
        of_device, of_held = HeldBy(self._places, rows.device), HeldBy(self._places, rows.held)
        return PromptHits(of_device, of_held, storage, whole, rows)

    def _of_workers(self, depths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return depths by place in `_keys` from depths by slot of what was sent."""
        found: NDArray[np.int32] = np.append(depths, np.int32(0)).take(self._sent_slots)
        for at, slot in self._more_slots:
            found[at] = max(found[at], depths[slot])
        return found

    def _slots_in(self, told: ToldPrefix) -> NDArray[np.intp]:
        if self._told_slots is None or self._told_slots[0] is not told.slots:
            slots = np.array([told.slots.workers.get(key, 0) for key in self._keys], np.intp)
            self._told_slots = told.slots, slots
        return self._told_slots[1]
