"""The slots of a table: which incarnation of which worker each number stands for, and whether its blocks are known.

The list lies in the table's memory. One version guards all of it, as it changes with the workers alone (odd while it is
being changed, as in `router.kv_indexer.holder_table`). A slot is *live* while all that its worker holds is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.router.kv_indexer.table_memory import NAME_BYTES, TableMemory
from twinpool.router.state.worker_table import WorkerKey

STORAGE = 0
"""The slot of storage, which all workers share."""


class SlotWriter:
    """The writer's side."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._free = list(reversed(range(STORAGE + 1, memory.size.slots)))
        self._left: list[int] = []

    def take(self, worker: WorkerKey) -> int | None:
        """Return a slot for a worker, not live yet; None where none is free or the name is too long."""
        name = worker[0].encode()
        if not self._free or len(name) > NAME_BYTES:
            return None
        slot = self._free.pop()
        self._set(slot, name, worker[1], used=1)
        return slot

    def leave(self, slot: int) -> None:
        """Take a slot from its worker. It is free again once its blocks are out of the table (`swept`)."""
        self._set(slot, b"", Incarnation(0), used=0)
        self._left.append(slot)

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def left(self) -> list[int]:
        """Slots that no worker has any more and whose blocks may still be in the table."""
        return self._left

    def swept(self) -> None:
        """Note that no block names the slots in `left` any more."""
        self._free += self._left
        self._left = []

    def set_live(self, slot: int, live: bool) -> None:
        self._memory.slots["live"][slot] = live

    def _set(self, slot: int, name: bytes, incarnation: Incarnation, used: int) -> None:
        version, slots = self._memory.header["slots_version"], self._memory.slots
        version[0] += 1
        slots["live"][slot] = 0
        slots["name"][slot], slots["incarnation"][slot], slots["used"][slot] = name, incarnation, used
        version[0] += 1


@dataclass(frozen=True, slots=True)
class SlotList:
    """The slots as they were at one version."""

    version: int
    workers: Mapping[WorkerKey, int]


class SlotReader:
    """The readers' side."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._last = SlotList(-1, {})

    def read(self) -> SlotList | None:
        """Return the slots as they are now; None while they are being changed."""
        before = self.version
        if before == self._last.version:
            return self._last
        slots = self._memory.slots.copy()
        if before % 2 or self.version != before:
            return None
        used = np.flatnonzero(slots["used"])
        workers = {
            (WorkerName(bytes(slots["name"][at]).decode()), Incarnation(int(slots["incarnation"][at]))): at
            for at in used.tolist()
        }
        self._last = SlotList(before, workers)
        return self._last

    @property
    def version(self) -> int:
        return int(self._memory.header["slots_version"][0])

    @property
    def live(self) -> NDArray[np.bool_]:
        """Which slots are live: (slots,)."""
        live: NDArray[np.bool_] = self._memory.slots["live"] != 0
        return live
