"""The storage queue between a worker's loop and a storage backend: tickets, served by threads, polled by the loop.

The loop never waits: it submits an operation and gets a `StorageTicket`, which is done at some later time. Until then
the operation's buffers belong to the ticket. A ticket that is cancelled while it *waits* is done at once and touches no
buffer; one that is already *running* goes on to its end, and `cancel` tells which it was.

    waiting ---thread takes it---> running ---backend returns or raises---> done
       \\________ cancel, queue full, close ____________________________________/

Reads and lookups go before writes, since a request waits for them; but after eight in a row the oldest write has its
turn. Writes of one `WriteChain` run one after the other in the order in which they were submitted, and once one of them
has not written all of its objects, those behind it write none. There is one line for reads and lookups and one for
writes, and each is bounded. A queue owns its backend: the last thread that ends closes it.

`ThreadedIoQueue` serves workers. `InlineIoQueue` has no threads: a test, or the simulator, decides when tickets are
done, in the order that its seed gives.
"""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, Generic, TypeVar

from twinpool.cache.storage.storage_backend import (
    CUT_OFF,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    StorageBackend,
)
from twinpool.contracts.clock import Clock, SystemClock

_log = logging.getLogger(__name__)
_IN_A_ROW = 8

T = TypeVar("T")


class StorageOp(StrEnum):
    EXISTS = "exists"
    READ = "read"
    WRITE = "write"


class _TicketState(Enum):
    WAITING = auto()
    RUNNING = auto()
    DONE = auto()


class WriteChain:
    """A sequence of writes, of which none is to be in storage without those before it. Pass it to each of them."""

    def __init__(self) -> None:
        self.submitted = 0
        self.running = False
        """Whether one of the writes is running."""
        self.broken: int | None = None
        """The number of the first write that failed or was cancelled: writes after it write nothing."""


class StorageTicket(Generic[T]):
    """One submitted operation; `result()` once it is `done`."""

    def __init__(
        self,
        op: StorageOp,
        names: Sequence[ObjectName],
        run: Callable[[], T],
        drop: Callable[[StorageTicket[Any]], bool],
        chain: WriteChain | None = None,
    ) -> None:
        self.op = op
        self.chain = chain
        if chain is not None:
            self._place = chain.submitted
            chain.submitted += 1
        self.names = tuple(names)
        self._run = run
        self._drop = drop
        self._state = _TicketState.WAITING
        self._result: T | None = None

    @property
    def done(self) -> bool:
        return self._state is _TicketState.DONE

    def result(self) -> T:
        """Returns the backend's answer, in the order of `names`; `FAILED` (of lookups: False) for all names when the
        operation never ran or the backend raised."""
        assert self._state is _TicketState.DONE, f"this {self.op} is not done"
        assert self._result is not None
        return self._result

    def cancel(self) -> bool:
        """Cancel the operation if it still waits; returns whether the ticket is done now.

        False: it is running, and its buffers are in use until it is done.
        """
        return self._drop(self) or self.done

    def _start(self) -> None:
        self._state = _TicketState.RUNNING
        if self.chain is not None:
            self.chain.running = True

    def _finish(self, result: T) -> None:
        if self.chain is not None:
            if self._state is _TicketState.RUNNING:
                self.chain.running = False
            outcomes: Any = result
            if not all(outcome.ok for outcome in outcomes) and not self._cut_off:
                self.chain.broken = self._place
        self._result = result
        self._state = _TicketState.DONE

    @property
    def _may_start(self) -> bool:
        """Whether no other write of its chain is running."""
        return self.chain is None or not self.chain.running

    def _carry_out(self) -> None:
        """Run the operation and finish the ticket. To be called once, after `_start`."""
        if self._cut_off:
            self._fail(CUT_OFF)
        else:
            self._finish(self._run())

    @property
    def _cut_off(self) -> bool:
        """Whether a write before this one in its chain has failed or was cancelled."""
        return self.chain is not None and self.chain.broken is not None and self.chain.broken < self._place

    def _fail(self, reason: str) -> None:
        answer: list[Any] = [
            False if self.op is StorageOp.EXISTS else ObjectOutcome(ObjectVerdict.FAILED, reason=reason)
        ]
        self._finish(answer * len(self.names))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class IoQueueCounts:
    """The counters of a storage queue since it was made."""

    dropped_writes: int
    """Writes that found the line full; their outcomes are `FAILED`."""
    refused_reads: int
    """Reads and lookups that found the line full."""
    cancelled: int
    """Operations that were cancelled while they waited."""
    raised: int
    """Operations in which the backend raised an exception, which it must not."""


class IoQueue(ABC):
    """A storage queue over `backend`, which it owns."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend

    def submit_exists(self, names: Sequence[ObjectName]) -> StorageTicket[list[bool]]:
        names = tuple(names)
        return self._submit(StorageTicket(StorageOp.EXISTS, names, lambda: self._exists(names), self._cancel))

    def submit_read(
        self, names: Sequence[ObjectName], into: Sequence[memoryview]
    ) -> StorageTicket[list[ObjectOutcome]]:
        """`into` belongs to the ticket until it is done."""
        assert len(names) == len(into)
        names, into = tuple(names), tuple(into)
        return self._submit(StorageTicket(StorageOp.READ, names, lambda: self._read(names, into), self._cancel))

    def submit_write(
        self, items: Sequence[ObjectBuffer], chain: WriteChain | None = None
    ) -> StorageTicket[list[ObjectOutcome]]:
        """The payloads must stay as they are until the ticket is done."""
        items = tuple(items)
        names = [item.name for item in items]
        return self._submit(StorageTicket(StorageOp.WRITE, names, lambda: self._write(items), self._cancel, chain))

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Fail the operations that wait, let those that run end, and close the backend; returns whether all of that
        happened within `timeout_s`.

        False: some operation still runs, and its buffers must not be freed before its ticket is done.
        """

    @abstractmethod
    def _submit(self, ticket: StorageTicket[T]) -> StorageTicket[T]:
        """Put a ticket in line, or fail it."""

    @abstractmethod
    def _cancel(self, ticket: StorageTicket[Any]) -> bool:
        """Take a ticket out of the line and fail it; False where it is in none."""

    def _exists(self, names: Sequence[ObjectName]) -> list[bool]:
        return self.backend.exists(names)

    def _read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        return self.backend.read(names, into)

    def _write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        return self.backend.write(items)


class ThreadedIoQueue(IoQueue):
    """The storage queue that serves `backend` with `threads` threads.

    At most `max_waiting` reads (with lookups) and as many writes wait; further ones fail at once. `wake` is called from
    a thread of the queue after each ticket that this thread has finished. All methods may be called from any thread.
    """

    def __init__(
        self,
        backend: StorageBackend,
        threads: int = 2,
        *,
        max_waiting: int = 256,
        wake: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert threads > 0
        super().__init__(backend)
        self._clock = clock or SystemClock()
        self._max_waiting = max_waiting
        self._wake = wake
        self._change = threading.Condition()
        self._reads: deque[StorageTicket[Any]] = deque()
        self._writes: deque[StorageTicket[Any]] = deque()
        self._reads_in_a_row = 0
        self._closing = False
        self._counts = dict.fromkeys(IoQueueCounts.__dataclass_fields__, 0)
        self._alive = threads
        self._threads = [threading.Thread(target=self._serve, name=f"storage-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def counts(self) -> IoQueueCounts:
        with self._change:
            return IoQueueCounts(**self._counts)

    @property
    def waiting(self) -> int:
        """The number of tickets that no thread has taken yet."""
        with self._change:
            return len(self._reads) + len(self._writes)

    def close(self, timeout_s: float) -> bool:
        deadline = self._clock.now() + timeout_s
        with self._change:
            self._closing = True
            for ticket in (*self._reads, *self._writes):
                ticket._fail("storage is closing")
            self._reads.clear()
            self._writes.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.now()))
        return not any(thread.is_alive() for thread in self._threads)

    def _line(self, ticket: StorageTicket[Any]) -> deque[StorageTicket[Any]]:
        return self._writes if ticket.op is StorageOp.WRITE else self._reads

    def _submit(self, ticket: StorageTicket[T]) -> StorageTicket[T]:
        with self._change:
            line = self._line(ticket)
            if self._closing:
                ticket._fail("storage is closing")
            elif len(line) >= self._max_waiting:
                self._counts["dropped_writes" if ticket.op is StorageOp.WRITE else "refused_reads"] += 1
                ticket._fail("too many operations are waiting for storage")
            else:
                line.append(ticket)
                self._change.notify()
        return ticket

    def _cancel(self, ticket: StorageTicket[Any]) -> bool:
        with self._change:
            line = self._line(ticket)
            if ticket not in line:
                return False
            line.remove(ticket)
            self._counts["cancelled"] += 1
            ticket._fail("cancelled")
            return True

    def _take(self) -> StorageTicket[Any] | None:
        """Wait for the next ticket and start it; returns None when the queue is closing."""
        with self._change:
            while not self._closing:
                write = next((ticket for ticket in self._writes if ticket._may_start), None)
                if self._reads and not (write and self._reads_in_a_row >= _IN_A_ROW):
                    self._reads_in_a_row += 1
                    ticket = self._reads.popleft()
                elif write is not None:
                    self._reads_in_a_row = 0
                    self._writes.remove(write)
                    ticket = write
                else:
                    self._change.wait()
                    continue
                ticket._start()
                return ticket
            return None

    def _serve(self) -> None:
        try:
            while (ticket := self._take()) is not None:
                self._run(ticket)
        finally:
            with self._change:
                self._alive -= 1
                last = self._alive == 0
            if last:
                self.backend.close()

    def _run(self, ticket: StorageTicket[Any]) -> None:
        try:
            ticket._carry_out()
        except Exception as error:  # A third-party backend may raise anything; the loop must hear of it all the same.
            with self._change:
                self._counts["raised"] += 1
            ticket._fail(f"the backend raised {type(error).__name__}: {error}")
            _log.exception("storage_backend_raised", extra={"op": ticket.op.value})
        if ticket.chain is not None:
            with self._change:
                self._change.notify_all()
        if self._wake is not None:
            self._wake()


StorageFault = Callable[[StorageOp, ObjectName], str | None]
"""Returns the reason for which an operation on this name is to fail, or None."""

_DIRT = 0xA5


class InlineIoQueue(IoQueue):
    """The `IoQueue` over `backend` for tests and the simulator. A read that fails leaves dirt in its buffer, as a read
    that was cut short would."""

    def __init__(
        self,
        backend: StorageBackend,
        *,
        fault: StorageFault | None = None,
        submitted: Callable[[], None] = lambda: None,
    ) -> None:
        """`submitted` is called after each operation that is submitted."""
        super().__init__(backend)
        self.fault = fault
        self._submitted = submitted
        self._waiting: list[StorageTicket[Any]] = []
        self._running = 0
        self._abandoned: set[int] = set()
        """Ids of running tickets that were cancelled."""
        self.cancelled_running = 0
        """How many tickets that were cancelled while they ran have ended."""
        self.closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

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
        if not self.closed:
            self.closed = True
            self.backend.close()
        return not self._running

    def _submit(self, ticket: StorageTicket[T]) -> StorageTicket[T]:
        if self.closed:
            ticket._fail("storage is closing")
        else:
            self._waiting.append(ticket)
        self._submitted()
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
