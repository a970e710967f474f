"""The index of one worker's blocks in the table: its KV events go in, marks of its slot come out.

Of the pages that an event names, only marks are kept (`router.state.prefix_hashes`). Pages in storage belong to no
worker: they are entered in storage's slot, whoever tells of them. They aren't part of what a worker is asked for as a
whole, and stay when it is cleared.
"""

from __future__ import annotations

from collections.abc import Iterable

from twinpool.contracts.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventMedium, KvEvent
from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.table_slots import STORAGE, SlotWriter
from twinpool.router.state.prefix_hashes import keys_of, marked
from twinpool.router.state.worker_table import WorkerKey

_TIERS = {EventMedium.DEVICE: DEVICE, EventMedium.HOST: HOST, EventMedium.STORAGE: HOST}


class TableIndex:
    """Applies the events of one worker. It has no slot while none is free, and then keeps nothing."""

    def __init__(self, table: HolderTable, slots: SlotWriter, worker: WorkerKey) -> None:
        self._table, self._slots, self._worker = table, slots, worker
        self._page_tokens = table.memory.page_tokens
        self._slot = slots.take(worker)
        self.strange = 0
        """Events of pages of another size, which are left out."""

    @property
    def slot(self) -> int | None:
        return self._slot

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Apply events in order; applying some of them again changes nothing."""
        for event in events:
            match event:
                case BlockStored() if event.page_tokens != self._page_tokens:
                    self.strange += 1
                case BlockStored() | BlockRemoved():
                    keys = keys_of(event.hashes)
                    keys = keys[marked(keys, self._page_tokens)]
                    slot = STORAGE if event.tier is EventMedium.STORAGE else self._slot
                    if slot is not None and len(keys):
                        change = self._table.add if isinstance(event, BlockStored) else self._table.remove
                        change(slot, _TIERS[event.tier], keys)
                case AllBlocksCleared(None):
                    self.clear()
                case AllBlocksCleared(EventMedium.STORAGE):
                    self._table.clear(STORAGE, DEVICE | HOST)
                case AllBlocksCleared():
                    if self._slot is not None:
                        self._table.clear(self._slot, _TIERS[event.tier or EventMedium.DEVICE])

    def clear(self) -> None:
        """Forget everything: the worker gets another slot, as that is quicker than to look for its blocks."""
        self.close()
        self._slot = self._slots.take(self._worker)

    def set_live(self, live: bool) -> None:
        """Say whether all that the worker holds is in the table."""
        if self._slot is not None:
            self._slots.set_live(self._slot, live)

    def close(self) -> None:
        """Give the slot up. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.leave(slot)
