"""Prefix indexes: what each prefill worker holds of a prompt, by tier, from what it says and what it was sent.

A worker whose events are followed in full (*live*) holds what they say, and besides what it was sent in the last
seconds, which no event confirms yet. Of any other worker what it was sent is all that is known. What decode workers
hold is known from events alone, unless they compute prompts as well. A wrong answer costs a worse choice and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinpool.router.kv_indexer.sent_prefixes import SentPrefixes
from twinpool.router.kv_indexer.table_slots import SlotList
from twinpool.router.kv_indexer.told_prefixes import ToldPrefix, ToldPrefixes
from twinpool.router.state.able_workers import AbleWorkers
from twinpool.router.state.prefix_hashes import PrefixHashes
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable

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

    def __init__(self, told: ToldPrefixes | None = None, *, of_decode: bool = False) -> None:
        """`told`: None where there is no index of KV events. `of_decode`: what decode workers were sent counts, too."""
        self.told, self.sent_prefixes = told, SentPrefixes(of_decode=of_decode)
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
        told = self.told.find(hashes, now) if self.told is not None else None
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
