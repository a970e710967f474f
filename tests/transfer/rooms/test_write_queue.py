"""The write queue of one reader by itself: a pool, a link that only notes what it is told, and no room anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import LateDevice
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.device_port import DONE, Completion, LayerMarks
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId, WorkerName
from twinpool.transfer.planes.data_plane import PageNumbers, PageWrite, RoomTarget, SentCounts, SlotWrite
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.sender import write_queue
from twinpool.transfer.rooms.sender.write_queue import QueuedWrite, RoomTimes, WriteQueue, WriteSpan

SPEC = pool_sets()["all"]
A, B = RoomId("room-a"), RoomId("room-b")
TARGET = RoomTarget(A, {}, 0, 7)
WAIT_S = 60.0


class Held:
    """A write that is over when a test says so, well or with an error."""

    def __init__(self) -> None:
        self.done = False
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        self.done = True
        if self.error is not None:
            raise self.error

    order = wait


class Link:
    """A reader's memory that takes everything, as slowly as a test likes."""

    frame_bytes: int | None = None
    layered = True
    ranked = False
    up = True

    def __init__(self) -> None:
        self.sent = SentCounts()
        self.posted: list[Held] = []
        self.said: list[tuple[m.Notice, int]] = []

    def admit(self, target: RoomTarget) -> None: ...

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def post(self, write: PageWrite | SlotWrite) -> Held:
        self.posted.append(Held())
        return self.posted[-1]

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        notice = m.decode_notice(data)
        assert notice.room == room
        self.said.append((notice, writes))

    def cut(self) -> bool:
        return False

    def sever(self) -> None: ...

    def close(self) -> None: ...


class Bench:
    """A queue, and what it works with."""

    def __init__(self, device: Any = None, max_bytes: int = 1 << 30) -> None:
        self.link, self.pools = Link(), PoolSet(SPEC, SPEC.even(9))
        self.queue = WriteQueue(
            WorkerName("decode-0"), self.link, self.pools, device or CpuDevice(), ManualClock(), max_bytes
        )

    def write(self, room: RoomId, number: int = 1, after: tuple[Completion, ...] = ()) -> m.Notice:
        """Posts pages of two pools."""
        runs = {"full": PageNumbers(0, (1, 2)), "state": PageNumbers(0, (3,))}
        notice = m.PagesWritten(room, 7, ())
        posted = self.queue.post(PageWrite(RoomTarget(room, runs, 0), runs, number), after)
        if posted is not None:
            self.queue.announce(notice, (posted,), number)
        return notice

    @property
    def said(self) -> list[m.Notice]:
        return [notice for notice, _ in self.link.said]

    def pinned(self) -> set[str]:
        """Pools of which pages are kept for a write."""
        return {name for name, allocator in self.pools.allocators.items() if allocator._pins}


def ends(held: Held, error: str = "") -> None:
    held.done, held.error = True, RuntimeError(error) if error else None


def test_a_notice_follows_its_write_and_names_how_many_writes_it_comes_after() -> None:
    bench = Bench()
    notice = bench.write(A, 3)
    bench.queue.flush()
    assert (bench.said, len(bench.queue)) == ([], 1)
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert bench.link.said == [(notice, 3)]
    assert not len(bench.queue)


def test_notices_and_last_words_keep_their_order_whichever_write_is_complete_first() -> None:
    bench = Bench()
    first, second = bench.write(A), bench.write(B)
    word = m.NothingToDecode(B, 7)
    bench.queue.say(word)
    ends(bench.link.posted[1])
    bench.queue.flush()
    assert bench.said == []
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert bench.said == [first, second, word]


def test_a_last_word_with_nothing_before_it_is_said_at_once() -> None:
    bench = Bench()
    bench.queue.say(m.WriterQuiesced(A, 7))
    assert bench.said == [m.WriterQuiesced(A, 7)]


def test_pages_of_every_pool_are_pinned_from_the_post_until_the_write_is_complete() -> None:
    bench = Bench()
    assert bench.pinned() == set()
    bench.write(A)
    assert bench.pinned() == {"full", "state"}
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert bench.pinned() == set()


def test_a7_nothing_is_posted_before_the_operations_that_it_comes_after() -> None:
    device, made = LateDevice(), Held()
    bench = Bench(device)
    bench.write(A, after=(made,))
    assert (bench.link.posted, made.done) == ([], False)
    device.run_all()
    assert made.done
    assert len(bench.link.posted) == 1


def test_a_write_that_failed_is_not_announced_and_neither_is_a_later_one_of_its_room() -> None:
    bench = Bench()
    bench.write(A, 1)
    other = bench.write(B)
    bench.write(A, 2)
    for held, error in zip(bench.link.posted, ("CUDA error", "", ""), strict=True):
        ends(held, error)
    bench.queue.flush()
    assert bench.said == [other]
    assert bench.queue.failed(A) == "a write to decode-0 failed: CUDA error"
    assert bench.queue.failed(B) == ""
    assert bench.pinned() == set()
    word = m.RoomFailed(A, 7, ErrorKind.WORKER, "why")
    bench.queue.withdraw(A)
    bench.queue.say(word)
    assert bench.said == [other, replace(word, torn=True)], "what failed may still be on its way"
    assert bench.queue.failed(A) == ""
    bench.queue.say(replace(word, room=B))
    assert bench.said[2] == replace(word, room=B)


def test_writes_of_a_withdrawn_room_stay_pinned_and_are_not_announced_and_its_last_word_waits_for_them() -> None:
    bench = Bench()
    bench.write(A)
    other = bench.write(B)
    bench.queue.withdraw(A)
    word = m.WriterQuiesced(A, 7)
    bench.queue.say(word)
    assert (bench.said, bench.pinned()) == ([], {"full", "state"})
    ends(bench.link.posted[0], "it failed, and nobody asks any more")
    ends(bench.link.posted[1])
    bench.queue.flush()
    assert bench.said == [other, replace(word, torn=True)]
    assert bench.queue.failed(A) == ""


def test_metadata_is_a_write_without_pages() -> None:
    bench = Bench()
    notice = m.SlotWritten(A, 7)
    posted = bench.queue.post(SlotWrite(RoomTarget(A, {}, 0), b"data"), ())
    assert posted is not None
    bench.queue.announce(notice, (posted,), 2)
    assert bench.pinned() == set()
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert bench.link.said == [(notice, 2)]


def test_one_write_too_many_fails_its_room_and_pins_and_posts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "_QUEUED", 1)
    bench = Bench()
    bench.write(A)
    bench.write(B)
    assert bench.queue.failed(B) == "1 writes to decode-0 are under way already"
    assert (len(bench.queue), len(bench.link.posted)) == (1, 1)


def test_of_a_rooms_writes_the_time_beside_its_computation_was_hidden_and_what_came_after_it_exposed() -> None:
    """Its last page was computed at 10: two writes were over by then, one was not, and one had not begun."""
    spans = [WriteSpan(2.0, 5.0), WriteSpan(5.0, 6.0), WriteSpan(9.0, 12.0), WriteSpan(11.0, 13.0)]
    writes = [QueuedWrite(A, SlotWrite(TARGET, b""), (), (), 0, span=span, ended=True) for span in spans]
    told = RoomTimes(10.0, writes).told(m.SlotWritten(A, 7), 14.0)
    assert told == m.SlotWritten(A, 7, hidden_us=5_000_000, exposed_us=4_000_000)


def test_settling_waits_for_all_that_is_under_way_and_says_what_can_be_said() -> None:
    bench = Bench()
    bench.write(A)
    said = bench.write(B)
    bench.link.posted[0].error = RuntimeError("lost")
    bench.queue.settle()
    assert all(held.done for held in bench.link.posted)
    assert bench.said == [said]
    assert bench.pinned() == set()
    assert not len(bench.queue)


def test_nothing_goes_to_a_reader_that_was_given_up_and_what_waited_for_the_device_fails_at_once() -> None:
    device = AdversarialDevice(1, stray=0.0)
    bench = Bench(device)
    bench.write(A)
    device.settle()
    bench.write(B)
    bench.queue.end()
    ends(bench.link.posted[0])
    bench.queue.settle()
    assert len(bench.link.posted) == 1, "a link that was severed would open connections to a dead reader"
    assert bench.queue.failed(B) == "a write to decode-0 failed: decode-0 is given up"
    assert (bench.pinned(), len(bench.queue)) == (set(), 0)


def test_one_write_has_no_more_pages_than_the_readers_frames_and_a_notice_take() -> None:
    bench, page = Bench(), SPEC.unit_bytes("full")
    assert bench.queue.max_pages("full") == write_queue._NOTICE_PAGES
    bench.link.frame_bytes = 3 * page + 1
    assert bench.queue.max_pages("full") == 3
    bench.link.frame_bytes = page - 1
    assert bench.queue.max_pages("full") == 1


PAGES = PageWrite(RoomTarget(A, {}, 0), {"full": PageNumbers(0, (1, 2)), "state": PageNumbers(0, (3,))}).nbytes(SPEC)
"""Bytes of a write of the bench."""


def test_so_many_bytes_are_under_way_at_once_and_what_is_posted_beyond_that_has_its_turn_in_order() -> None:
    bench = Bench(max_bytes=2 * PAGES)
    said = [bench.write(room) for room in (A, B, A, B)]
    assert (len(bench.link.posted), bench.queue.in_flight_bytes, bench.queue.waiting) == (2, 2 * PAGES, 2)
    ends(bench.link.posted[1])
    bench.queue.flush()
    assert (len(bench.link.posted), bench.queue.in_flight_bytes, bench.queue.waiting) == (3, 2 * PAGES, 1)
    assert [write.completion is not None for write in bench.queue._writes] == [True, True, True, False]
    for held in bench.link.posted:
        ends(held)
    bench.queue.flush()
    ends(bench.link.posted[3])
    bench.queue.flush()
    assert bench.said == said
    assert (bench.queue.in_flight_bytes, len(bench.queue), bench.pinned()) == (0, 0, set())


def test_a_write_that_is_alone_may_have_any_number_of_bytes() -> None:
    bench = Bench(max_bytes=1)
    bench.write(A)
    bench.write(A)
    assert (len(bench.link.posted), bench.queue.waiting) == (1, 1)
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert (len(bench.link.posted), bench.queue.waiting) == (2, 0)


def test_a_write_that_waits_is_pinned_and_is_not_posted_once_its_room_is_over() -> None:
    bench = Bench(max_bytes=1)
    first = bench.write(B)
    bench.write(A)
    word = m.WriterQuiesced(A, 7)
    bench.queue.withdraw(A)
    bench.queue.say(word)
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert bench.said == [first, word], "nothing of it was written: nothing can be torn"
    assert (len(bench.link.posted), len(bench.queue), bench.pinned()) == (1, 0, set())


def test_bytes_of_a_write_that_was_never_launched_are_never_taken_off_those_under_way() -> None:
    """No more is under way afterwards than the limit allows."""
    bench = Bench(max_bytes=2 * PAGES)
    for room in (B, B, A, A):
        bench.write(room)
    bench.queue.withdraw(A)
    assert (bench.queue.in_flight_bytes, bench.queue.waiting) == (2 * PAGES, 0)
    bench.write(B)
    assert (len(bench.link.posted), bench.queue.waiting) == (2, 1), "it has its turn once one of the two has ended"
    ends(bench.link.posted[0])
    bench.queue.flush()
    assert (len(bench.link.posted), bench.queue.in_flight_bytes) == (3, 2 * PAGES)
    bench.write(A)
    bench.queue.settle()
    assert (bench.queue.in_flight_bytes, len(bench.queue), bench.pinned()) == (0, 0, set())


def test_a_link_that_ends_posts_nothing_more_and_tells_of_nothing_that_was_not_posted() -> None:
    bench = Bench(max_bytes=1)
    said = bench.write(A)
    bench.write(B)
    bench.queue.settle()
    assert bench.said == [said]
    assert "the link to decode-0 has ended" in bench.queue.failed(B)
    assert (len(bench.link.posted), len(bench.queue), bench.pinned()) == (1, 0, set())


class StalledLink(Link):
    """A link whose writer is held up in the middle of a write."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.entered = threading.Event(), threading.Event()

    def post(self, write: PageWrite | SlotWrite) -> Held:
        self.entered.set()
        assert self.held.wait(WAIT_S)
        return super().post(write)


def until(come: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not come():
        assert time.monotonic() < end


def test_a_link_that_stalls_holds_up_no_page_of_another() -> None:
    device = AsyncCpuDevice()
    stalled, other = Bench(device), Bench(device)
    stalled.queue._link = link = StalledLink()
    try:
        stalled.write(A)
        assert link.entered.wait(WAIT_S)
        other.write(B)
        until(lambda: other.link.posted)
        assert not link.posted
    finally:
        link.held.set()
        device.close()


def test_what_is_ready_goes_ahead_of_layers_that_are_still_to_be_written() -> None:
    """A step is under way, and its layers are posted already; what an earlier one finished leaves meanwhile."""
    device, bench = AsyncCpuDevice(), Bench()
    bench.queue._device = device
    marks = LayerMarks([{"full": 1, "state": 1}])
    runs = {"full": PageNumbers(0, (1,))}
    ahead = PageWrite(RoomTarget(A, runs, 0), runs, 1, {"full": range(1)})
    try:
        assert bench.queue.post(ahead, (marks[0],)) is not None
        bench.write(B)
        until(lambda: bench.link.posted)
        assert len(bench.link.posted) == 1
        marks.end(None)
        until(lambda: len(bench.link.posted) == 2)
    finally:
        marks.end(None)
        device.close()


def test_threads_of_a_link_end_with_it() -> None:
    device, bench = AsyncCpuDevice(), Bench()
    bench.queue._device = device
    try:
        bench.write(A)
        runs = {"full": PageNumbers(0, (4,))}
        ahead = PageWrite(RoomTarget(B, runs, 0), runs, 1, {"full": range(1)})
        assert bench.queue.post(ahead, ()) is not None
        until(lambda: len(bench.link.posted) == 2)
        assert len(device._sends._streams) == 2, "layers that are still to be written have their own"
        bench.queue.close()
        assert not device._sends._streams
    finally:
        device.close()


@pytest.mark.parametrize("ending", ["failed", "withdrawn", "failed when nobody asks any more"])
def test_a_write_that_came_to_nothing_leaves_its_bytes_to_others(ending: str) -> None:
    """What is booked is what is under way: a link that has failed at much may carry as much as before."""
    bench = Bench(max_bytes=2 * PAGES)
    for _ in range(5):
        bench.write(A)
        bench.write(A)
        said = bench.write(B)
        assert (len(bench.link.posted), bench.queue.in_flight_bytes, bench.queue.waiting) == (2, 2 * PAGES, 1)
        if ending != "failed":
            bench.queue.withdraw(A)
        for held in bench.link.posted[:2]:
            ends(held, "" if ending == "withdrawn" else "CUDA error")
        bench.queue.flush()
        assert (len(bench.link.posted), bench.queue.in_flight_bytes) == (3, PAGES)
        ends(bench.link.posted[2])
        bench.queue.flush()
        assert bench.said[-1] == said
        assert (bench.queue.in_flight_bytes, len(bench.queue), bench.pinned()) == (0, 0, set())
        bench.queue.withdraw(A)
        bench.link.posted.clear()


def test_a_last_word_waits_for_what_its_withdrawn_room_has_still_under_way_and_for_nothing_else() -> None:
    """The reader gives the pages to somebody else when it hears it."""
    bench, runs = Bench(), {"full": PageNumbers(0, (1, 2))}
    for number in (1, 2):  # As layers of a step under way are posted, which are announced when it has come to its end.
        ahead = PageWrite(RoomTarget(A, runs, 0), runs, number, {"full": range(1)})
        assert bench.queue.post(ahead, ()) is not None
    bench.queue.withdraw(A)
    word = m.WriterQuiesced(A, 7)
    bench.queue.say(word)
    bench.write(B)
    for held in bench.link.posted[:2]:
        bench.queue.flush()
        assert bench.said == []
        ends(held)
    bench.queue.flush()
    assert bench.said == [word]
