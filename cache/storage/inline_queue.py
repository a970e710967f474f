"""A storage queue without threads: a test decides when tickets are done, in the order that its seed gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from twinpool.cache.storage.io_queue import StorageOp, StorageTicket, WriteChain
from twinpool.cache.storage.storage_backend import (
    CUT_OFF,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    StorageBackend,
)

StorageFault = Callable[[StorageOp, ObjectName], str | None]
"""Returns the reason for which an operation on this name is to fail, or None."""

_DIRT = 0xA5


class InlineIoQueue:
    """The `IoQueue` over `backend` for tests and the simulator. A read that fails leaves dirt in its buffer, as a read
    that was cut short would."""

    def __init__(self, backend: StorageBackend, *, fault: StorageFault | None = None) -> None:
        self.backend = backend
        self.fault = fault
        self._waiting: list[StorageTicket[Any]] = []
        self._running = 0
        self._abandoned: set[int] = set()
        """Ids of running tickets that were cancelled."""
        self.cancelled_running = 0
        """How many tickets that were cancelled while they ran have ended."""
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit_exists(self, names: Sequence[ObjectName]) -> StorageTicket[list[bool]]:
        names = tuple(names)
        return self._submit(StorageTicket(StorageOp.EXISTS, names, lambda: self._exists(names), self._cancel))

    def submit_read(
        self, names: Sequence[ObjectName], into: Sequence[memoryview]
    ) -> StorageTicket[list[ObjectOutcome]]:
        assert len(names) == len(into)
        names, into = tuple(names), tuple(into)
        return self._submit(StorageTicket(StorageOp.READ, names, lambda: self._read(names, into), self._cancel))

    def submit_write(
        self, items: Sequence[ObjectBuffer], chain: WriteChain | None = None
    ) -> StorageTicket[list[ObjectOutcome]]:
        items = tuple(items)
        names = [item.name for item in items]
        return self._submit(StorageTicket(StorageOp.WRITE, names, lambda: self._write(items), self._cancel, chain))

    def run_next(self, rng: random.Random | None = None) -> bool:
        """Run one waiting ticket, the oldest or one that `rng` picks; False when none may run."""
        end = self.begin_next(rng)
        if end is None:
            return False
        end()
        return True

    def begin_next(self, rng: random.Random | None = None) -> Callable[[], None] | None:
        """Begin to run one waiting ticket; returns the function that ends it.

        None when no ticket waits, or all that do wait for others of their chains. Until the function is called, the
        ticket's buffers are in use and it can't be cancelled.
        """
        heads = {id(ticket.chain or ticket): ticket for ticket in reversed(self._waiting)}
        first = [ticket for ticket in reversed(heads.values()) if ticket._may_start]
        if not first:
            return None
        ticket = first[rng.randrange(len(first)) if rng else 0]
        self._waiting.remove(ticket)
        ticket._start()
        self._running += 1

        def end() -> None:
            self._running -= 1
            self.cancelled_running += id(ticket) in self._abandoned
            self._abandoned.discard(id(ticket))
            ticket._carry_out()

        return end

    def run_all(self, rng: random.Random | None = None) -> int:
        """Run tickets until none may run; returns how many ran."""
        ran = 0
        while self.run_next(rng):
            ran += 1
        return ran

    def close(self, timeout_s: float = 0.0) -> bool:
        """Fail the tickets that wait and close the backend; False while some operation runs, as this queue can't wait
        for it."""
        for ticket in self._waiting:
            ticket._fail("storage is closing")
        self._waiting.clear()
        if not self._closed:
            self._closed = True
            self.backend.close()
        return not self._running

    def _submit(self, ticket: StorageTicket[Any]) -> StorageTicket[Any]:
        if self._closed:
            ticket._fail("storage is closing")
        else:
            self._waiting.append(ticket)
        return ticket

    def _cancel(self, ticket: StorageTicket[Any]) -> bool:
        if ticket not in self._waiting:
            if not ticket.done:
                self._abandoned.add(id(ticket))
            return False
        self._waiting.remove(ticket)
        ticket._fail("cancelled")
        return True

    def _reasons(self, op: StorageOp, names: Sequence[ObjectName]) -> list[str | None]:
        return [self.fault(op, name) if self.fault else None for name in names]

    def _exists(self, names: Sequence[ObjectName]) -> list[bool]:
        reasons = self._reasons(StorageOp.EXISTS, names)
        return [there and why is None for there, why in zip(self.backend.exists(names), reasons, strict=True)]

    def _read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        reasons = self._reasons(StorageOp.READ, names)
        sound = [at for at, why in enumerate(reasons) if why is None]
        for buffer, why in zip(into, reasons, strict=True):
            if why is not None:
                buffer.cast("B")[:] = bytes([_DIRT]) * buffer.nbytes
        answers = self.backend.read([names[at] for at in sound], [into[at] for at in sound])
        return _merge(reasons, answers)

    def _write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        reasons = self._reasons(StorageOp.WRITE, [item.name for item in items])
        bad = next((at for at, why in enumerate(reasons) if why is not None), len(items))
        answers = self.backend.write(items[:bad])
        outcomes = _merge(reasons[: bad + 1], answers)
        return outcomes + [ObjectOutcome(ObjectVerdict.FAILED, reason=CUT_OFF)] * (len(items) - len(outcomes))


def _merge(reasons: Sequence[str | None], answers: Sequence[ObjectOutcome]) -> list[ObjectOutcome]:
    rest = iter(answers)
    return [next(rest) if why is None else ObjectOutcome(ObjectVerdict.FAILED, reason=why) for why in reasons]
