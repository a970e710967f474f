"""The `memory` backend: objects in this process's memory; workers of one process share a store by its name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from twinpool.cache.storage.storage_backend import (
    CUT_OFF,
    KEPT,
    MISSING,
    STORED,
    BackendCapacity,
    BackendCounts,
    BackendTally,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    seal,
    unpack,
)
from twinpool.contracts.errors import ConfigError


class MemoryStore:
    """Sealed objects by key, the least recently used first. `lock` guards all attributes; callers of methods hold it.

    `max_bytes` bounds payloads with seals.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self.objects: OrderedDict[str, bytes] = OrderedDict()
        self.used_bytes = 0
        self.users = 0
        """Open backends on this store."""

    def pop(self, key: str) -> bytes | None:
        """Remove and return an object, None if it isn't there."""
        stored = self.objects.pop(key, None)
        self.used_bytes -= len(stored) if stored is not None else 0
        return stored

    def make_room(self, size: int) -> int:
        """Evict objects until `size` bytes fit; returns how many. `size` is at most `max_bytes`."""
        evicted = 0
        while self.used_bytes + size > self.max_bytes:
            self.pop(next(iter(self.objects)))
            evicted += 1
        return evicted


_stores: dict[str, MemoryStore] = {}
_stores_lock = threading.Lock()


class MemoryBackend:
    """A handle on the store called `name`, which its first handle makes and its last one frees.

    Raises `ConfigError` when the store is open with another `max_bytes`.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        with _stores_lock:
            store = _stores.setdefault(name, MemoryStore(max_bytes))
            if store.max_bytes != max_bytes:
                raise ConfigError(
                    f"the memory store {name!r} is open with max_bytes {store.max_bytes}, not {max_bytes}: "
                    "give workers that share a store the same cache.storage.max_bytes"
                )
            store.users += 1
        self._name = name
        self._store: MemoryStore | None = store
        self._tally = BackendTally()

    @property
    def store(self) -> MemoryStore:
        assert self._store is not None, "the backend has been closed"
        return self._store

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        with self.store.lock:
            return [name.key in self.store.objects for name in names]

    def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        outcomes = [self._read_one(name, buffer) for name, buffer in zip(names, into, strict=True)]
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _read_one(self, name: ObjectName, into: memoryview) -> ObjectOutcome:
        key, store = name.key, self.store
        with store.lock:
            stored = store.objects.get(key)
            if stored is None:
                return MISSING
            store.objects.move_to_end(key)
        outcome = unpack(name, stored, into)
        if outcome.verdict is ObjectVerdict.DAMAGED:
            with store.lock:
                if store.objects.get(key) is stored:
                    store.pop(key)
        return outcome

    def write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        outcomes: list[ObjectOutcome] = []
        for item in items:
            cut_off = bool(outcomes) and not outcomes[-1].ok
            outcomes.append(ObjectOutcome(ObjectVerdict.FAILED, reason=CUT_OFF) if cut_off else self._write_one(item))
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _write_one(self, item: ObjectBuffer) -> ObjectOutcome:
        key, store = item.name.key, self.store
        with store.lock:
            if key in store.objects:
                store.objects.move_to_end(key)
                return KEPT
        sealed = b"".join((item.payload, seal(item.name, item.digest, item.payload)))
        if len(sealed) > store.max_bytes:
            return ObjectOutcome(
                ObjectVerdict.REFUSED, reason=f"{len(sealed)} bytes are more than the whole store may hold"
            )
        with store.lock:
            store.pop(key)
            evicted = store.make_room(len(sealed))
            store.objects[key] = sealed
            store.used_bytes += len(sealed)
        self._tally.add("evicted", evicted)
        return STORED

    def delete(self, names: Sequence[ObjectName]) -> None:
        with self.store.lock:
            for name in names:
                self.store.pop(name.key)

    def capacity(self) -> BackendCapacity:
        with self.store.lock:
            return BackendCapacity(self.store.max_bytes, self.store.used_bytes, len(self.store.objects))

    def counts(self) -> BackendCounts:
        return self._tally.snapshot()

    def close(self) -> None:
        with _stores_lock:
            store, self._store = self._store, None
            if store is not None:
                store.users -= 1
                if store.users == 0:
                    del _stores[self._name]
