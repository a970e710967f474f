"""What outlives the workers of a simulated cluster: storage, the third tier, and the arenas of nodes.

Storage is one store for all workers, with delays, errors, damage and a size limit. Each worker has its own queue to the
store (`SimQueue`), on which operations begin some time after they were submitted and end some time after that, if the
worker's process runs then. Meanwhile their buffers are in use, even those of a cancelled operation. Written objects
outlive every worker.

An arena is a node agent's host memory, lent to one living process at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue, StorageOp
from twinpool.cache.storage.storage_backend import ObjectName
from twinpool.sim.fabric.virtual_time import SimProcess


class SimStore:
    """The objects of one run, and the faults of the medium at the moment."""

    def __init__(self, name: str, max_bytes: int, rng: random.Random, delay_s: float) -> None:
        self.rng, self.delay_s = rng, delay_s
        self.failing = 0.0
        """The probability that an operation on a name fails."""
        self._name, self._max_bytes = name, max_bytes
        self._handles = [MemoryBackend(name, max_bytes)]
        self._queues: list[InlineIoQueue] = []

    def queue(self, submitted: Callable[[], None]) -> InlineIoQueue:
        """Make a process's queue to the store, which calls `submitted` after each operation that is submitted."""
        self._handles.append(MemoryBackend(self._name, self._max_bytes))
        self._queues.append(InlineIoQueue(self._handles[-1], fault=self.fault, submitted=submitted))
        return self._queues[-1]

    @property
    def cancelled_running(self) -> int:
        """How many operations were cancelled while they ran."""
        return sum(queue.cancelled_running for queue in self._queues)

    def fault(self, op: StorageOp, name: ObjectName) -> str | None:
        return "the medium failed" if self.failing and self.rng.random() < self.failing else None

    def damage(self) -> bool:
        """Flip a byte of one object; False where there is none."""
        objects = self._handles[0].store.objects
        if not objects:
            return False
        key = self.rng.choice(list(objects))
        data = bytearray(objects[key])
        data[self.rng.randrange(len(data))] ^= 0x10
        objects[key] = bytes(data)
        return True

    def lose(self) -> int:
        """Remove all objects; returns how many."""
        store = self._handles[0].store
        count = len(store.objects)
        for key in list(store.objects):
            store.pop(key)
        return count

    def close(self) -> None:
        for handle in self._handles:
            handle.close()


class SimQueue:
    """The pace of one process's queue to a store: its operations begin and end at times that the store draws."""

    def __init__(self, store: SimStore, process: SimProcess, wake: Callable[[], None]) -> None:
        self.queue = store.queue(self._submitted)
        self._store, self._process, self._wake = store, process, wake
        self._behind = 0
        """How many operations could not begin in their turn."""
        self._running: list[Callable[[], None]] = []
        """The ends of the operations that run."""

    def _submitted(self) -> None:
        self._process.later(self._takes(), self._begin)

    def _takes(self) -> float:
        return 0.5 * self._store.delay_s * self._store.rng.expovariate(1.0)

    def _begin(self) -> None:
        """Begin an operation, any that can: those of several threads begin and end in any order."""
        end = None if self.queue.closed else self.queue.begin_next(self._store.rng)
        if end is not None:
            self._running.append(end)
            self._process.later(self._takes(), partial(self._end, end))
        elif not self.queue.closed:
            # The waiting operations are behind running writes of their chains.
            self._behind += 1

    def settle(self) -> None:
        """Wait for the operations that run: their buffers are free then."""
        running, self._running = self._running, []
        for end in running:
            end()

    def _end(self, end: Callable[[], None]) -> None:
        if end not in self._running:
            return
        self._running.remove(end)
        end()
        behind, self._behind = self._behind, 0
        for _ in range(behind):
            self._process.later(self._takes(), self._begin)
        self._wake()


class SimArenas:
    """The arenas of all nodes, by worker name and size in bytes."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], tuple[SimProcess, memoryview]] = {}

    def take(self, process: SimProcess, nbytes: int) -> memoryview | None:
        """Lend the arena of this worker, as its last incarnation left it; None while that one is still alive. One whose
        process goes on as `process` has given it up."""
        key = process.name, nbytes
        last = self._segments.get(key)
        if last is not None and last[0].alive and last[0] is not process:
            return None
        memory = last[1] if last is not None else memoryview(bytearray(nbytes))
        self._segments[key] = process, memory
        return memory
