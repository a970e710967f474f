"""The event feed: follows the KV events of all workers of the controller's table, and enters them in one table.

Each incarnation of a worker is followed on its own, from its status on that says where it publishes. An incarnation
that is gone is taken out; what its successor adopts of its memory, the successor's own events say. Gaps are seen to by
`router.kv_indexer.event_replay`; until a worker's content is known in full, and while more of its batches have come
than were read, its slot isn't live and routers go by what they sent.

Of each worker, `TableIndex` turns KV events into entries of its slot. Of the pages that an event names, only marks are
kept (`router.state.prefix_hashes`). Pages in storage belong to no worker: they are entered in storage's slot, whoever
tells of them. They aren't part of what a worker is asked for as a whole, and stay when it is cleared.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq

from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventMedium, KvEvent
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber
from twinpool.router.kv_indexer.table_memory import STORAGE, SlotWriter, TableMemory
from twinpool.router.state.prefix_hashes import keys_of, marked
from twinpool.router.state.worker_table import GONE, WorkerKey

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


EVERY_S = 0.5
"""Seconds between two rounds in which every worker is looked after, whether anything came from it or not."""
SOCKETS_A_WORKER = 4
MAX_WORKERS = 4096


@dataclass(slots=True)
class FollowedWorker:
    """One incarnation that is followed."""

    name: WorkerName
    index: TableIndex
    reader: KVEventSubscriber
    faults: tuple[int, int, int] = (0, 0, 0)
    """Losses, payloads that could not be read, and events of strange pages, as the log has them."""


def reachable(endpoint: str, view: WorkerView, node: str) -> str:
    """Return the endpoint at which a worker can be reached from `node`, empty where it can't: another host's loopback.
    What is bound to all addresses is reached where the worker's streams are."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return endpoint
    if address.is_loopback:
        return endpoint if view.record.node == node else ""
    if address.is_unspecified:
        stream = view.record.stream.rpartition(":")[0]
        return f"{scheme}://{stream}:{port}" if stream else ""
    return endpoint


class EventFeed:
    """Fills the table in `memory`. For one thread; call `round` again and again.

    `node`: the name of this host, as workers tell theirs. `key_file`: the publishers' public CURVE key, None where they
    have none. `pause` sleeps.
    """

    def __init__(
        self,
        memory: TableMemory,
        clock: Clock,
        node: str,
        key_file: Path | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._pause = pause
        self.table, self.slots = HolderTable(memory), SlotWriter(memory)
        self._memory, self._clock, self._node, self._key_file = memory, clock, node, key_file
        self._workers: dict[WorkerKey, FollowedWorker] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(SOCKETS_A_WORKER * MAX_WORKERS, self._context.get(zmq.SOCKET_LIMIT)))
        self._every = self._clock.now()

    def follow(self, views: Iterable[WorkerView]) -> None:
        """Take in the controller's table."""
        wanted = {}
        for view in views:
            endpoint = reachable(view.status.kv_events, view, self._node) if view.status.kv_events else ""
            if endpoint and view.status.state not in GONE:
                wanted[view.record.name, view.record.incarnation] = view
        for key in [key for key in self._workers if key not in wanted]:
            worker = self._workers.pop(key)
            worker.reader.close()
            worker.index.close()
        for key, view in wanted.items():
            if key not in self._workers and len(self._workers) < MAX_WORKERS:
                self._workers[key] = self._begin(key, view)

    def _begin(self, key: WorkerKey, view: WorkerView) -> FollowedWorker:
        index = TableIndex(self.table, self.slots, key)
        status, key_file = view.status, self._key_file
        reader = KVEventSubscriber(
            reachable(status.kv_events, view, self._node),
            self._clock,
            reachable(status.kv_replay, view, self._node) if status.kv_replay else "",
            key_file=key_file,
            into=index,
            context=self._context,
        )
        log("KV events followed", worker=key[0], incarnation=key[1], endpoint=status.kv_events)
        return FollowedWorker(key[0], index, reader)

    def round(self, timeout_s: float) -> None:
        """Apply what has come, waiting up to `timeout_s` seconds for something; then beat the pulse."""
        ready = self._wait(timeout_s)
        now = self._clock.now()
        if now - self._every >= EVERY_S:
            ready, self._every = list(self._workers.values()), now
        for worker in ready:
            worker.reader.poll()
            worker.index.set_live(worker.reader.complete and not worker.reader.behind)
            faults = (worker.reader.lost, worker.reader.damaged, worker.index.strange)
            if faults != worker.faults:
                worker.faults = faults
                lost, damaged, strange = faults
                log("KV events lost", worker=worker.name, lost=lost, damaged=damaged, other_page_size=strange)
        if self.slots.left and (not ready or not self.slots.free):
            self.table.forget(self.slots.left)
            self.slots.swept()
        header, table = self._memory.header, self.table
        header["entries"][0], header["evicted"][0], header["crowded"][0] = table.entries, table.evicted, table.crowded
        header["pulse"][0] = self._clock.now()

    def _wait(self, timeout_s: float) -> list[FollowedWorker]:
        poller = zmq.Poller()
        owners = {}
        for worker in self._workers.values():
            for socket in worker.reader.sockets:
                poller.register(socket, zmq.POLLIN)
                owners[socket] = worker
        if not owners:
            self._pause(timeout_s)  # A poll of no sockets returns at once.
            return []
        found = {id(owners[socket]): owners[socket] for socket, _ in poller.poll(int(1000 * timeout_s))}
        return list(found.values())

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        for worker in self._workers.values():
            worker.reader.close()
        self._workers = {}
        self._context.term()
