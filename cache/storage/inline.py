"""A storage queue without threads: tickets are done when the test says so, in the order that its seed says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from cache.storage.backend import Backend, Item, ObjectName, Outcome, Verdict
from cache.storage.executor import Op, Ticket

Fault = Callable[[Op, ObjectName], str | None]
"""Why this name of an operation is to fail, or None."""

_DIRT = 0xA5


class InlineQueue:
    """`Queue` over `backend`. A failed read leaves dirt in its buffer, as a read that was cut short would."""

    def __init__(self, backend: Backend, *, fault: Fault | None = None) -> None:
        self.backend = backend
        self.fault = fault
        self._waiting: list[Ticket[Any]] = []
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit_exists(self, names: Sequence[ObjectName]) -> Ticket[list[bool]]:
        names = tuple(names)
        return self._submit(Ticket(Op.EXISTS, names, lambda: self._exists(names), self._cancel))

    def submit_read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> Ticket[list[Outcome]]:
        assert len(names) == len(into)
        names, into = tuple(names), tuple(into)
        return self._submit(Ticket(Op.READ, names, lambda: self._read(names, into), self._cancel))

    def submit_write(self, items: Sequence[Item]) -> Ticket[list[Outcome]]:
        items = tuple(items)
        names = [item.name for item in items]
        return self._submit(Ticket(Op.WRITE, names, lambda: self._write(items), self._cancel))

    def run_next(self, rng: random.Random | None = None) -> bool:
        """Run one waiting ticket, the oldest or one that `rng` picks; False when none waits."""
        if not self._waiting:
            return False
        ticket = self._waiting.pop(rng.randrange(len(self._waiting)) if rng else 0)
        ticket._start()
        ticket._finish(ticket._run())
        return True

    def run_all(self, rng: random.Random | None = None) -> int:
        """Run until none waits; how many ran."""
        ran = 0
        while self.run_next(rng):
            ran += 1
        return ran

    def close(self, timeout_s: float = 0.0) -> bool:
        """Fail what waits and close the backend; always in time, as nothing ever runs on its own."""
        for ticket in self._waiting:
            ticket._fail("storage is closing")
        self._waiting.clear()
        if not self._closed:
            self._closed = True
            self.backend.close()
        return True

    def _submit(self, ticket: Ticket[Any]) -> Ticket[Any]:
        if self._closed:
            ticket._fail("storage is closing")
        else:
            self._waiting.append(ticket)
        return ticket

    def _cancel(self, ticket: Ticket[Any]) -> bool:
        if ticket not in self._waiting:
            return False
        self._waiting.remove(ticket)
        ticket._fail("cancelled")
        return True

    def _reasons(self, op: Op, names: Sequence[ObjectName]) -> list[str | None]:
        return [self.fault(op, name) if self.fault else None for name in names]

    def _exists(self, names: Sequence[ObjectName]) -> list[bool]:
        reasons = self._reasons(Op.EXISTS, names)
        return [there and why is None for there, why in zip(self.backend.exists(names), reasons, strict=True)]

    def _read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[Outcome]:
        reasons = self._reasons(Op.READ, names)
        sound = [at for at, why in enumerate(reasons) if why is None]
        for buffer, why in zip(into, reasons, strict=True):
            if why is not None:
                buffer.cast("B")[:] = bytes([_DIRT]) * buffer.nbytes
        answers = self.backend.read([names[at] for at in sound], [into[at] for at in sound])
        return _merge(reasons, answers)

    def _write(self, items: Sequence[Item]) -> list[Outcome]:
        reasons = self._reasons(Op.WRITE, [item.name for item in items])
        answers = self.backend.write([item for item, why in zip(items, reasons, strict=True) if why is None])
        return _merge(reasons, answers)


def _merge(reasons: Sequence[str | None], answers: Sequence[Outcome]) -> list[Outcome]:
    rest = iter(answers)
    return [next(rest) if why is None else Outcome(Verdict.FAILED, reason=why) for why in reasons]
