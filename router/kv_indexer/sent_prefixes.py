"""Sent prefixes: what this router has sent to each prefill worker, and so expects to be there.

It is a guess: a worker has every block that it was sent. Placement needs it where a worker tells nothing of its cache
(no KV events, or an index that is dead), and for prompts that were sent a moment ago, whose pages no event confirms
yet. So there are two memories: one of all that was sent, in a table of a fixed size (`router.kv_indexer.holder_table`)
in which the oldest gives way, and one of the last seconds (`router.kv_indexer.recent_prefixes`).

What was sent dies with the worker's incarnation, as its cache does, unless the next incarnation reports that it has
adopted the last one's host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.router.kv_indexer.holder_sets import DEVICE
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.recent_prefixes import RECENT_BLOCKS, RecentPrefixes
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.state.prefix_hashes import PrefixHashes
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey

SENT_BYTES = 32 * 1024**2
"""Memory for all that was sent: 1.6 million blocks of 64 tokens, whichever workers they were sent to."""
ADOPTED_AT_MOST = 4
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
        worker.slots, worker.previous, worker.used = merged[:ADOPTED_AT_MOST], (), True
        self._left += merged[ADOPTED_AT_MOST:]
