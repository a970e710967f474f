from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from tests.cluster.fake_worker import FakeWorker, submit
from twinpool.cluster.worker_process.worker_thread import WorkerClosed, WorkerEnd, WorkerThread
from twinpool.contracts.ids import RequestId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Cancel
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.messages.worker_status import WorkerStatus

WAIT_S = 60.0


class Running:
    """A host with a fake worker, and what it did."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.lease_holds = True
        self.ends: queue.Queue[tuple[WorkerEnd, str]] = queue.Queue()
        self.host = WorkerThread(
            self.worker,
            may_send=lambda: self.lease_holds,
            on_end=lambda end, reason: self.ends.put((end, reason)),
            idle_s=0.02,
        )
        self.host.start()

    def session(self) -> tuple[SessionId, queue.Queue[list[Event] | StreamEnd]]:
        got: queue.Queue[list[Event] | StreamEnd] = queue.Queue()
        return self.host.open_session(got.put, got.put), got


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    assert running.host.stop(WAIT_S)
    assert running.worker.closed


def _until_done(got: queue.Queue[list[Event] | StreamEnd]) -> list[Event]:
    events: list[Event] = []
    while not (events and isinstance(events[-1], Done)):
        batch = got.get(timeout=WAIT_S)
        assert isinstance(batch, list)
        events += batch
    return events


def test_events_reach_the_session_that_submitted_and_no_other(running: Running) -> None:
    one, got_one = running.session()
    two, got_two = running.session()
    running.host.send(one, [submit("a", 3)])
    running.host.send(two, [submit("b", 2)])
    a, b = _until_done(got_one), _until_done(got_two)
    assert [e.tokens for e in a if isinstance(e, Tokens)] == [(6,), (12,), (24,)]
    assert {e.request_id for e in a} == {"a"}
    assert {e.request_id for e in b} == {"b"}


def test_the_worker_is_touched_by_one_thread_only(running: Running) -> None:
    session, got = running.session()
    callers = [threading.Thread(target=running.host.send, args=(session, [submit(str(i), 1)])) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    done = 0
    while done < 4:
        batch = got.get(timeout=WAIT_S)
        assert isinstance(batch, list)
        done += sum(isinstance(e, Done) for e in batch)
    assert len(running.worker.threads) == 1
    assert threading.get_ident() not in running.worker.threads


def test_a_closed_session_has_its_requests_dropped(running: Running) -> None:
    running.worker.hold = True
    session, _ = running.session()
    running.host.send(session, [submit("a")])
    assert running.host.status().result(WAIT_S).running == 1
    running.host.close_session(session)
    running.host.close_session(session)
    assert running.host.status().result(WAIT_S).running == 0
    assert running.worker.dropped == [session]


def test_commands_keep_their_order(running: Running) -> None:
    running.worker.hold = True
    session, _ = running.session()
    running.host.send(session, [submit("a"), Cancel(RequestId("a"), 0)])
    running.host.send(session, [submit("b")])
    assert running.host.status().result(WAIT_S).running == 1


@pytest.mark.parametrize("broken", ["fence", "close"])
def test_a_worker_of_which_nothing_works_any_more_ends_for_all_the_same(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions and calls hear of the end, and so does who keeps its lease: else they would wait for it."""
    running, closed = Running(), threading.Event()

    def fail() -> None:
        raise OSError("the device is gone")

    def close() -> None:
        assert running.ends.qsize() == 1, "it may take long, and nobody waits for that"
        closed.set()

    monkeypatch.setattr(running.worker, "close", close)
    monkeypatch.setattr(running.worker, broken, fail)
    _, got = running.session()
    calls: list[Future[WorkerStatus]] = []

    def die() -> None:
        calls.append(running.host.status())
        raise ZeroDivisionError("boom")

    running.worker.on_step = die
    running.worker.wake()
    running.host._thread.join(WAIT_S)
    assert list(running.ends.queue) == [(WorkerEnd.DIED, "ZeroDivisionError: boom")]
    assert list(got.queue) == [StreamEnd("ZeroDivisionError: boom")]
    with pytest.raises(WorkerClosed, match="boom"):
        calls[0].result(WAIT_S)
    assert (closed.is_set(), running.host.closed) == ((True, True) if broken == "fence" else (False, False))


def test_a_step_that_raises_kills_the_worker_and_ends_every_session(running: Running) -> None:
    _, got = running.session()
    running.worker.fail = ZeroDivisionError("boom")
    running.worker.wake()
    assert running.ends.get(timeout=WAIT_S) == (WorkerEnd.DIED, "ZeroDivisionError: boom")
    assert got.get(timeout=WAIT_S) == StreamEnd("ZeroDivisionError: boom")
    assert running.worker.fenced
    with pytest.raises(WorkerClosed, match="boom"):
        running.host.open_session(got.put)
    with pytest.raises(WorkerClosed, match="boom"):
        running.host.check().result(WAIT_S)


def test_a_worker_that_can_not_be_trusted_is_fenced_once_its_last_events_are_out(running: Running) -> None:
    session, got = running.session()

    def turn_bad() -> None:
        running.worker.unfit = "three rows were no numbers"

    running.worker.hold = True
    running.host.send(session, [submit("a", 1)])
    running.host.status().result(WAIT_S)
    running.worker.on_step, running.worker.hold = turn_bad, False
    running.worker.wake()
    assert running.ends.get(timeout=WAIT_S) == (WorkerEnd.FENCED, "three rows were no numbers")
    assert isinstance(_until_done(got)[-1], Done)
    assert got.get(timeout=WAIT_S) == StreamEnd("three rows were no numbers")
    assert running.worker.fenced


def test_a_call_that_raises_hurts_its_caller_only(running: Running) -> None:
    with pytest.raises(ZeroDivisionError):
        running.host.call(lambda worker: 1 // 0).result(WAIT_S)
    assert running.host.check().result(WAIT_S).pages == 64


def test_calls_behind_a_fatal_command_are_refused_and_not_left_waiting(running: Running) -> None:
    entered, go = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        go.wait(WAIT_S)
        running.worker.fail = RuntimeError("fatal")

    running.worker.on_step = block
    running.worker.wake()
    assert entered.wait(WAIT_S)
    running.worker.handle = lambda session, command: 1 // 0  # type: ignore[method-assign, assignment]
    session, _ = running.session()
    running.worker.on_step = lambda: None
    running.host.send(session, [submit("a")])
    late = running.host.status()
    go.set()
    with pytest.raises(WorkerClosed):
        late.result(WAIT_S)


def test_a_drained_worker_finishes_what_runs_and_leaves(running: Running) -> None:
    running.worker.hold = True
    session, got = running.session()
    running.host.send(session, [submit("a", 2)])
    assert running.host.drain().result(WAIT_S).state == "draining"
    assert running.ends.empty()
    running.worker.hold = False
    running.worker.wake()
    assert isinstance(_until_done(got)[-1], Done)
    assert running.ends.get(timeout=WAIT_S)[0] is WorkerEnd.LEFT
    assert got.get(timeout=WAIT_S) == StreamEnd("the worker was drained and has left", left=True)


def test_undrain_works_until_the_worker_has_left(running: Running) -> None:
    running.worker.hold = True
    session, _ = running.session()
    running.host.send(session, [submit("a")])
    running.host.drain().result(WAIT_S)
    assert running.host.undrain().result(WAIT_S).state == "ready"
    running.host.close_session(session)
    assert running.host.check().result(WAIT_S).leases == 0
    running.host.drain().result(WAIT_S)
    assert running.ends.get(timeout=WAIT_S)[0] is WorkerEnd.LEFT
    with pytest.raises(WorkerClosed, match="has left"):
        running.host.undrain().result(WAIT_S)


def test_nothing_is_delivered_once_the_lease_has_ended(running: Running) -> None:
    session, got = running.session()

    def lose_lease() -> None:
        running.lease_holds = False

    running.worker.on_step = lose_lease
    running.host.send(session, [submit("a")])
    assert running.ends.get(timeout=WAIT_S)[0] is WorkerEnd.FENCED
    assert got.get(timeout=WAIT_S) == StreamEnd("the worker's lease has ended")
    assert running.worker.fenced


class Overtaken(FakeWorker):
    """It is undrained in the moment in which its thread looks whether it can leave."""

    host: WorkerThread
    undrained: Future[WorkerStatus] | None = None

    @property
    def drained(self) -> bool:
        found = super().drained
        if found and self.undrained is None:
            self.undrained = self.host.undrain()
        return found


def test_an_undrain_that_waits_when_nothing_is_left_to_do_comes_before_leaving() -> None:
    worker, ends, got = Overtaken(), list[WorkerEnd](), queue.Queue[list[Event] | StreamEnd]()
    worker.host = WorkerThread(worker, on_end=lambda end, reason: ends.append(end), idle_s=0.02)
    worker.host.start()
    worker.host.drain().result(WAIT_S)
    session = worker.host.open_session(got.put, got.put)
    assert not worker.host.status().result(WAIT_S).running
    assert worker.undrained is not None
    assert worker.undrained.exception(WAIT_S) is None
    assert worker.undrained.result(WAIT_S).state == "ready"
    assert ends == []
    worker.host.send(session, [submit("a", 1)])
    assert isinstance(_until_done(got)[-1], Done)
    assert worker.host.stop(WAIT_S)
    assert ends == [WorkerEnd.STOPPED]


def test_a_worker_whose_close_failed_does_not_count_as_closed() -> None:
    """Its process must not go on as another worker: something of this one may still be there."""
    for fails in (False, True):
        running = Running()
        if fails:
            running.worker.close = lambda: 1 // 0  # type: ignore[method-assign, assignment]
        running.host.drain().result(WAIT_S)
        assert running.ends.get(timeout=WAIT_S)[0] is WorkerEnd.LEFT
        assert running.host.stop(WAIT_S)
        assert running.host.closed is not fails


def test_calls_that_wait_are_refused_however_the_worker_ends_and_those_after_it_at_once() -> None:
    for how in ("stopped", "fenced", "died"):
        running, entered, go = Running(), threading.Event(), threading.Event()

        def block(entered: threading.Event = entered, go: threading.Event = go) -> None:
            entered.set()
            go.wait(WAIT_S)

        running.worker.on_step = block
        running.worker.wake()
        assert entered.wait(WAIT_S)
        match how:
            case "stopped":
                running.host._stopping = True
            case "fenced":
                running.lease_holds = False
            case _:
                running.worker.fail = RuntimeError("fatal")
        waits = [running.host.status() for _ in range(3)]
        go.set()
        assert running.ends.get(timeout=WAIT_S)[0] == how
        assert not wait(waits, WAIT_S).not_done, "nobody waits for ever"
        answered = 0
        for one in waits:
            with contextlib.suppress(WorkerClosed):
                answered += bool(one.result(WAIT_S))
        assert answered == (0 if how == "died" else 3), "those that came before it saw its end are answered"
        with pytest.raises(WorkerClosed):
            running.host.status().result(WAIT_S)
        with pytest.raises(WorkerClosed):
            running.session()
        assert running.host.stop(WAIT_S)


def test_a_paused_worker_makes_no_step_and_goes_on_with_what_it_has_at_once(running: Running) -> None:
    running.host.pause.set(True)
    session, got = running.session()
    running.host.send(session, [submit("a", 3)])
    status = running.host.call(lambda worker: worker.status()).result(WAIT_S)
    assert status.running + status.waiting == 1, "calls and commands are taken in"
    for _ in range(3):
        steps = running.host.status().result(WAIT_S).steps
    assert (steps, got.qsize(), running.host.snapshot.paused) == (0, 0, True)
    assert running.worker.parts > 0, "those that share its experts may have yet to be paused, and need it"
    running.host.pause.set(True)
    running.host.pause.set(False)
    assert [event.tokens for event in _until_done(got) if isinstance(event, Tokens)] == [(6,), (12,), (24,)]
    assert not running.host.snapshot.paused


def test_a_paused_worker_that_drains_leaves_once_it_has_no_request(running: Running) -> None:
    running.host.pause.set(True)
    session, _ = running.session()
    running.host.send(session, [submit("a", 3)])
    running.host.drain().result(WAIT_S)
    running.host.status().result(WAIT_S)
    assert running.ends.empty(), "what it has waits with it"
    running.host.send(session, [Cancel(RequestId("a"), 0)])
    try:
        end, _ = running.ends.get(timeout=WAIT_S)
    except queue.Empty:
        raise AssertionError("it never leaves") from None
    assert end is WorkerEnd.LEFT


def test_a_paused_worker_whose_lease_ends_is_fenced(running: Running) -> None:
    running.host.pause.set(True)
    running.host.status().result(WAIT_S)
    running.lease_holds = False
    assert running.ends.get(timeout=WAIT_S)[0] is WorkerEnd.FENCED


def test_the_end_of_a_pause_is_waited_for_no_longer_than_it_lasts() -> None:
    worker = FakeWorker()
    host = WorkerThread(worker, idle_s=WAIT_S * 10)
    host.pause.set(True)
    host.start()
    try:
        got: queue.Queue[list[Event] | StreamEnd] = queue.Queue()
        host.send(host.open_session(got.put, got.put), [submit("a", 1)])
        while not host.snapshot.paused:
            assert got.empty()
        host.pause.set(False)
        assert _until_done(got)
    finally:
        assert host.stop(WAIT_S)
