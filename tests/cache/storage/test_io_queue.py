"""Tickets: served by threads, and by hand."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.cache.storage.rigs import item, name
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue, StorageOp, StorageTicket, ThreadedIoQueue, WriteChain
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName, ObjectOutcome, ObjectVerdict

PATIENCE_S = 60


class SlowBackend(MemoryBackend):
    """A store in memory whose operations each wait until they are let go, and which notes their order."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex, 1 << 30)
        self.let_go = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.order: list[str] = []
        self.written: list[ObjectName] = []
        self.closed = threading.Event()
        self.queues: list[ThreadedIoQueue] = []

    def serve(
        self, threads: int = 1, max_waiting: int = 256, wake: Callable[[], None] | None = None
    ) -> ThreadedIoQueue:
        """A queue over this backend, closed at the end of the test whatever happened in it."""
        self.queues.append(ThreadedIoQueue(self, threads, max_waiting=max_waiting, wake=wake))
        return self.queues[-1]

    def _wait(self, what: str) -> None:
        self.order.append(what)
        self.entered.release()
        assert self.let_go.acquire(timeout=PATIENCE_S)

    def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        self._wait("read")
        return super().read(names, into)

    def write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        self.written += [one.name for one in items]
        self._wait("write")
        return super().write(items)

    def close(self) -> None:
        super().close()
        self.closed.set()


@pytest.fixture
def backend() -> Iterator[SlowBackend]:
    backend = SlowBackend()
    yield backend
    backend.let_go.release(1000)
    for queue in backend.queues:
        assert queue.close(PATIENCE_S)
    assert backend.closed.is_set(), "the queue did not close its backend"


@pytest.fixture
def inline() -> Iterator[InlineIoQueue]:
    queue = InlineIoQueue(MemoryBackend(uuid.uuid4().hex, 1 << 30))
    yield queue
    queue.close()


class Woken:
    """Waits, by its wake calls, until something holds."""

    def __init__(self) -> None:
        self._calls = threading.Semaphore(0)

    def __call__(self) -> None:
        self._calls.release()

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self._calls.acquire(timeout=PATIENCE_S), "nobody called"


def buffer() -> list[memoryview]:
    return [memoryview(bytearray(64))]


def test_a_ticket_is_done_later_and_the_loop_is_woken(backend: SlowBackend) -> None:
    woken = Woken()
    queue = backend.serve(2, wake=woken)
    ticket = queue.submit_write([item(1)])
    assert backend.entered.acquire(timeout=PATIENCE_S)
    assert not ticket.done
    backend.let_go.release()
    woken.until(lambda: ticket.done)
    assert ticket.result()[0].verdict is ObjectVerdict.STORED
    there = queue.submit_exists([name(1), name(2)])
    woken.until(lambda: there.done)
    assert there.result() == [True, False]
    into = buffer()
    backend.let_go.release()
    read = queue.submit_read([name(1)], into)
    woken.until(lambda: read.done)
    assert (read.result()[0].ok, bytes(into[0])) == (True, item(1).payload)
    assert queue.close(PATIENCE_S)


def occupy(queue: ThreadedIoQueue, backend: SlowBackend) -> StorageTicket[list[ObjectOutcome]]:
    """Keep the queue's one thread busy with a write until it is let go."""
    ticket = queue.submit_write([item(99)])
    assert backend.entered.acquire(timeout=PATIENCE_S)
    return ticket


def test_over_the_bound_writes_are_dropped_and_reads_refused_and_both_counted(backend: SlowBackend) -> None:
    queue = backend.serve(max_waiting=2)
    occupy(queue, backend)
    writes = [queue.submit_write([item(n)]) for n in range(3)]
    reads = [queue.submit_read([name(n)], buffer()) for n in range(3)]
    lookup = queue.submit_exists([name(1)])
    assert [t.done for t in writes] == [t.done for t in reads] == [False, False, True]
    assert writes[2].result()[0].verdict is reads[2].result()[0].verdict is ObjectVerdict.FAILED
    assert "too many" in writes[2].result()[0].reason
    assert lookup.result() == [False]
    assert (queue.counts().dropped_writes, queue.counts().refused_reads) == (1, 2)
    backend.let_go.release(9)
    assert queue.close(PATIENCE_S)


def test_reads_go_before_writes_but_writes_do_not_starve(backend: SlowBackend) -> None:
    woken = Woken()
    queue = backend.serve(wake=woken)
    occupy(queue, backend)
    tickets: list[StorageTicket[list[ObjectOutcome]]] = [queue.submit_write([item(n)]) for n in range(2)]
    tickets += [queue.submit_read([name(n)], buffer()) for n in range(18)]
    backend.let_go.release(30)
    woken.until(lambda: all(t.done for t in tickets))
    assert backend.order[1:] == ["read"] * 8 + ["write"] + ["read"] * 8 + ["write"] + ["read"] * 2
    assert queue.close(PATIENCE_S)


def test_a_free_thread_takes_a_later_write_and_not_the_next_one_of_a_chain_under_way(backend: SlowBackend) -> None:
    woken, chain = Woken(), WriteChain()
    queue = backend.serve(2, wake=woken)
    tickets = [queue.submit_write([item(0)], chain)]
    assert backend.entered.acquire(timeout=PATIENCE_S)
    tickets += [queue.submit_write([item(1)], chain), queue.submit_write([item(2)])]
    assert backend.entered.acquire(timeout=PATIENCE_S)
    assert backend.written == [item(0).name, item(2).name]
    backend.let_go.release(3)
    woken.until(lambda: all(ticket.done for ticket in tickets))
    assert all(ticket.result()[0].ok for ticket in tickets)
    assert queue.close(PATIENCE_S)


def test_what_waits_can_be_cancelled_and_what_runs_keeps_its_buffers(backend: SlowBackend) -> None:
    woken = Woken()
    queue = backend.serve(wake=woken)
    running = occupy(queue, backend)
    waiting = queue.submit_read([name(99)], into := buffer())
    assert waiting.cancel()
    assert waiting.result()[0].reason == "cancelled"
    assert not running.cancel()
    assert not running.done
    backend.let_go.release(2)
    woken.until(lambda: running.done)
    assert running.result()[0].ok
    assert running.cancel(), "what is done no longer uses its buffers"
    assert bytes(into[0]) == bytes(64)
    assert (queue.counts().cancelled, queue.waiting) == (1, 0)
    assert queue.close(PATIENCE_S)
    assert backend.order == ["write"]


def test_a_backend_that_raises_fails_its_ticket_and_the_queue_goes_on() -> None:
    class Broken(MemoryBackend):
        def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
            raise ZeroDivisionError("oops")

        def exists(self, names: Sequence[ObjectName]) -> list[bool]:
            raise ZeroDivisionError("oops")

    woken = Woken()
    queue = ThreadedIoQueue(Broken(uuid.uuid4().hex, 1 << 20), threads=1, wake=woken)
    tickets = queue.submit_read([name(1)], buffer()), queue.submit_exists([name(1)]), queue.submit_write([item(1)])
    woken.until(lambda: all(t.done for t in tickets))
    assert tickets[0].result()[0].reason == "the backend raised ZeroDivisionError: oops"
    assert tickets[1].result() == [False]
    assert tickets[2].result()[0].ok
    assert queue.counts().raised == 2
    assert queue.close(PATIENCE_S)


def test_close_fails_what_waits_and_says_when_something_still_runs(backend: SlowBackend) -> None:
    queue = backend.serve()
    running, waiting = occupy(queue, backend), queue.submit_write([item(1)])
    assert not queue.close(0.01)
    assert not running.done
    assert waiting.result()[0].reason == "storage is closing"
    assert queue.submit_read([name(1)], buffer()).result()[0].verdict is ObjectVerdict.FAILED
    assert not backend.closed.is_set(), "the backend is in use"
    backend.let_go.release()
    assert queue.close(PATIENCE_S)
    assert running.done


def test_inline_tickets_are_done_when_the_test_says_so_in_the_order_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        queue = InlineIoQueue(MemoryBackend(uuid.uuid4().hex, 1 << 30))
        tickets = [queue.submit_write([item(n)]) for n in range(12)]
        assert not any(t.done for t in tickets)
        rng, done = random.Random(seed), []
        while queue.run_next(rng):
            done.append(next(n for n, t in enumerate(tickets) if t.done and n not in done))
        assert queue.run_all() == 0
        queue.close()
        return done

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(12))


def test_inline_faults_fail_single_names_and_dirty_what_was_to_be_read(inline: InlineIoQueue) -> None:
    inline.fault = lambda op, which: f"no {op} of 2" if which == name(2) else None
    write = inline.submit_write([item(1), item(2)])
    inline.run_all()
    assert [o.verdict for o in write.result()] == [ObjectVerdict.STORED, ObjectVerdict.FAILED]
    inline.fault = None
    again = inline.submit_write([item(2)])
    inline.run_all()
    assert again.result()[0].verdict is ObjectVerdict.STORED
    inline.fault = lambda op, which: f"no {op} of 2" if which == name(2) else None
    into = buffer() + buffer()
    read, there = inline.submit_read([name(1), name(2)], into), inline.submit_exists([name(1), name(2)])
    assert inline.run_all() == 2
    assert [o.verdict for o in read.result()] == [ObjectVerdict.FOUND, ObjectVerdict.FAILED]
    assert read.result()[1].reason == "no read of 2"
    assert (bytes(into[0]), bytes(into[1])) == (item(1).payload, b"\xa5" * 64)
    assert there.result() == [True, False]


def test_a_ticket_keeps_what_it_was_given_when_the_callers_lists_change(inline: InlineIoQueue) -> None:
    items, names, into = [item(1)], [name(1)], buffer()
    first = into[0]
    write, read, there = inline.submit_write(items), inline.submit_read(names, into), inline.submit_exists(names)
    items.clear()
    names.clear()
    into.clear()
    inline.run_all()
    assert write.result()[0].ok
    assert (read.result()[0].ok, bytes(first)) == (True, item(1).payload)
    assert there.result() == [True]


def test_inline_tickets_can_be_cancelled_and_end_with_the_queue(inline: InlineIoQueue) -> None:
    first, second = inline.submit_write([item(1)]), inline.submit_write([item(2)])
    assert first.op is StorageOp.WRITE
    assert first.cancel()
    assert inline.waiting == 1
    assert inline.close()
    assert [t.result()[0].reason for t in (first, second)] == ["cancelled", "storage is closing"]
    assert inline.submit_exists([name(1)]).result() == [False]


def test_of_a_chain_one_write_runs_at_a_time_whatever_is_cancelled_behind_it(inline: InlineIoQueue) -> None:
    chain, other = WriteChain(), WriteChain()
    tickets = [inline.submit_write([item(n)], chain) for n in range(3)]
    beside = inline.submit_write([item(9)], other)
    end = inline.begin_next()
    assert end is not None
    assert inline.run_next(), "the other chain's"
    assert beside.done
    assert inline.begin_next() is None, "those behind it wait"
    late = inline.submit_write([item(3)], chain)
    assert late.cancel()
    assert inline.begin_next() is None, "also when one of them was cancelled"
    end()
    inline.run_all()
    assert [ticket.result()[0].ok for ticket in (*tickets, late)] == [True, True, True, False]


def test_a_ticket_that_is_seen_to_be_done_has_its_result() -> None:
    """The loop looks at it while a thread of the queue finishes it."""

    class Watched(StorageTicket[list[ObjectOutcome]]):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if getattr(self, "_state", None) is not None and self.done:
                assert self._result is not None, f"it was done before {name} was set"

    ticket = Watched(StorageOp.WRITE, [name(1)], lambda: [ObjectOutcome(ObjectVerdict.STORED)], lambda _: False)
    ticket._start()
    ticket._carry_out()
    assert ticket.result()[0].ok


@pytest.mark.parametrize("first", ["the cancel", "the failure"])
@pytest.mark.parametrize("cancelled", [1, 2, 3])
def test_what_was_cancelled_behind_a_failed_write_lets_none_of_those_between_through(
    inline: InlineIoQueue, cancelled: int, first: str
) -> None:
    """The first of four writes of a chain fails: the chain is broken there, whichever came before the other."""
    inline.fault = lambda op, which: "on purpose" if which == item(0).name else None
    chain = WriteChain()
    tickets = [inline.submit_write([item(n)], chain) for n in range(4)]
    if first == "the failure":
        assert inline.run_next()
    assert tickets[cancelled].cancel()
    inline.run_all()
    assert [ticket.result()[0].ok for ticket in tickets] == [False] * 4
    assert inline.backend.exists([name(n) for n in range(4)]) == [False] * 4
