"""The index of KV events of a simulated cluster: production's table, told of modelled caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from twinpool.router.kv_indexer.holder_sets import SLOTS_AT_MOST
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.kv_indexer.table_slots import SlotWriter
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.scale.prefix_cache import CacheChange

PULSE_S = 0.5
"""Seconds between two signs of life of the index's process."""


class SimIndex:
    """The process that keeps the index; routers open its table at `path`."""

    def __init__(self, workers: int, blocks: int, block_tokens: int) -> None:
        """`workers`: as many as there may be at a time; `blocks`: of all of their caches together."""
        self._folder = TemporaryDirectory(prefix="twinpool-sim-")
        self.path = Path(self._folder.name) / "index"
        slots = min(SLOTS_AT_MOST // 8 * 8, -(-(2 * workers + 64) // 8) * 8)
        size = TableSize(max(1 << 10, -(-blocks * 10 // 9 // 8)), slots, 4096)
        self._memory = TableMemory.create(self.path, size, block_tokens)
        self._table, self._slots = HolderTable(self._memory), SlotWriter(self._memory)
        self._slot: dict[WorkerKey, int] = {}

    def close(self) -> None:
        self._folder.cleanup()

    def pulse(self, now: float) -> None:
        self._memory.header["pulse"][0] = now

    def join(self, key: WorkerKey) -> None:
        """Follow a new worker's events."""
        slot = self._slots.take(key)
        if slot is None:
            self._table.forget(self._slots.left)
            self._slots.swept()
            slot = self._slots.take(key)
        assert slot is not None, "there are slots for all workers"
        self._slot[key] = slot
        self._slots.set_live(slot, True)

    def leave(self, key: WorkerKey) -> None:
        slot = self._slot.pop(key, None)
        if slot is not None:
            self._slots.leave(slot)

    def apply(self, key: WorkerKey, changes: Sequence[CacheChange]) -> None:
        """Take in what a worker says of its cache; nothing of one that has left."""
        slot = self._slot.get(key)
        if slot is None:
            return
        for came, tier, keys in changes:
            (self._table.add if came else self._table.remove)(slot, tier, np.array(keys, np.uint64))
