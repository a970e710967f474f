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
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, Generic, Protocol, TypeVar

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


class IoQueue(Protocol):
    """The interface of a storage queue: `ThreadedIoQueue` in a worker, `InlineIoQueue` under a test's control."""

    def submit_exists(self, names: Sequence[ObjectName]) -> StorageTicket[list[bool]]: ...

    def submit_read(
        self, names: Sequence[ObjectName], into: Sequence[memoryview]
    ) -> StorageTicket[list[ObjectOutcome]]: ...

    def submit_write(
        self, items: Sequence[ObjectBuffer], chain: WriteChain | None = None
    ) -> StorageTicket[list[ObjectOutcome]]: ...

    def close(self, timeout_s: float) -> bool: ...


class ThreadedIoQueue:
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
        self.backend = backend
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

    def submit_exists(self, names: Sequence[ObjectName]) -> StorageTicket[list[bool]]:
        names = tuple(names)
        return self._submit(StorageTicket(StorageOp.EXISTS, names, lambda: self.backend.exists(names), self._cancel))

    def submit_read(
        self, names: Sequence[ObjectName], into: Sequence[memoryview]
    ) -> StorageTicket[list[ObjectOutcome]]:
        """`into` belongs to the ticket until it is done."""
        assert len(names) == len(into)
        names, into = tuple(names), tuple(into)
        return self._submit(StorageTicket(StorageOp.READ, names, lambda: self.backend.read(names, into), self._cancel))

    def submit_write(
        self, items: Sequence[ObjectBuffer], chain: WriteChain | None = None
    ) -> StorageTicket[list[ObjectOutcome]]:
        """The payloads must stay as they are until the ticket is done."""
        items = tuple(items)
        names = [item.name for item in items]
        return self._submit(
            StorageTicket(StorageOp.WRITE, names, lambda: self.backend.write(items), self._cancel, chain)
        )

    def counts(self) -> IoQueueCounts:
        with self._change:
            return IoQueueCounts(**self._counts)

    @property
    def waiting(self) -> int:
        """The number of tickets that no thread has taken yet."""
        with self._change:
            return len(self._reads) + len(self._writes)

    def close(self, timeout_s: float) -> bool:
        """Fail the operations that wait, let those that run end, and close the backend; returns whether all of that
        happened within `timeout_s`.

        False: some operation still runs, and its buffers must not be freed before its ticket is done.
        """
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
