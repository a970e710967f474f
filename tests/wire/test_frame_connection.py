"""A connection of frames under a loop whose time is the test's: what comes out of its bytes, and who counts as gone."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.contracts.wire.frame_connection import TICKS, TURN_FRAMES, UNREAD_BYTES, FrameConnection

SILENCE_S = 8.0


class Loop:
    """Timers of an event loop, fired by hand."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, run: Callable[[], None]) -> None:
        self.soon.append(run)

    def turn(self) -> bool:
        """Take one turn; returns whether there was something to do."""
        soon, self.soon = self.soon, []
        for run in soon:
            run()
        return bool(soon)

    def create_future(self) -> Any:
        return Lost()

    def call_later(self, delay_s: float, run: Callable[[], None]) -> Any:
        timer = (delay_s, run)
        self.timers.append(timer)
        return Handle(lambda: self.timers.remove(timer) if timer in self.timers else None)

    def fire(self) -> float:
        """Fire the only timer; returns its delay."""
        ((delay_s, run),) = self.timers
        self.timers.clear()
        run()
        return delay_s


class Handle:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


class Lost:
    """What of a future is used."""

    def __init__(self) -> None:
        self.set = False

    def done(self) -> bool:
        return self.set

    def set_result(self, result: None) -> None:
        self.set = True


class Wire:
    """The transport."""

    def __init__(self) -> None:
        self.written = b""
        self.taken = 0
        """Bytes that the peer has read, where it doesn't read all at once."""
        self.reads = True
        self.ended = ""
        self.limit = 0
        self.reading = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int) -> None:
        self.limit = high

    def get_write_buffer_size(self) -> int:
        return 0 if self.reads else len(self.written) - self.taken

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.wire = Loop(), Wire()
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.loop)
        self.connection = FrameConnection(SILENCE_S)
        monkeypatch.undo()
        self.heard: list[bytes] = []
        self.reasons: list[str] = []
        self.connection.on_frame, self.connection.on_end = self.heard.append, self.reasons.append
        self.connection.connection_made(cast(Any, self.wire))

    def hear(self, data: bytes) -> None:
        self.connection.data_received(data)
        while self.loop.turn():
            pass


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def framed(frame: bytes) -> bytes:
    return struct.pack(">I", len(frame)) + frame


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_frames_come_out_whole_however_the_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        scene = Scene(patch)
    whole = b"".join(map(framed, frames))
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    for begin, end in pairwise(edges):
        scene.hear(whole[begin:end])
    assert scene.heard == [frame for frame in frames if frame]
    assert scene.reasons == []


def test_many_frames_at_once_are_taken_in_several_turns_of_the_loop(scene: Scene) -> None:
    """In order, and nothing more is read meanwhile; what is left when the connection ends is heard before its end."""
    frames = [bytes([number]) for number in range(3 * TURN_FRAMES + 1)]
    scene.connection.data_received(b"".join(map(framed, frames)))
    assert scene.heard == frames[:TURN_FRAMES]
    assert not scene.wire.reading
    scene.connection.data_received(framed(b"more"))  # It was on its way.
    assert len(scene.heard) == TURN_FRAMES
    assert scene.loop.turn()
    assert scene.heard == frames[: 2 * TURN_FRAMES]
    scene.connection.on_end = lambda reason: scene.reasons.append(f"after {len(scene.heard)}")
    scene.connection.connection_lost(None)
    assert scene.heard == [*frames, b"more"]
    assert scene.reasons == [f"after {len(frames) + 1}"]
    scene.loop.turn()
    assert len(scene.heard) == len(frames) + 1


def test_after_the_last_of_many_frames_the_peer_is_read_again(scene: Scene) -> None:
    scene.connection.data_received(framed(b"x") * (2 * TURN_FRAMES))
    assert not scene.wire.reading
    while scene.loop.turn():
        pass
    assert len(scene.heard) == 2 * TURN_FRAMES
    assert scene.wire.reading


def test_what_is_sent_has_its_length_before_it(scene: Scene) -> None:
    scene.wire.reads = False
    scene.connection.send(b"one")
    scene.connection.send(b"x" * 70_000)
    assert scene.wire.written == framed(b"one") + framed(b"x" * 70_000)
    assert scene.connection.unread_bytes == len(scene.wire.written)


def test_a_frame_of_the_most_bytes_is_taken_and_one_more_byte_ends_it_before_it_has_come(scene: Scene) -> None:
    scene.connection.max_bytes = 10
    scene.hear(framed(b"x" * 10))
    scene.hear(struct.pack(">I", 11))
    assert scene.heard == [b"x" * 10]
    assert scene.reasons == ["a frame of 11 bytes came, and 10 are allowed"]
    assert scene.wire.ended == "aborted"


def test_a_frame_may_raise_the_bound_for_the_next_one_of_the_same_packet(scene: Scene) -> None:
    scene.connection.max_bytes = 4

    def opened(frame: bytes) -> None:
        scene.heard.append(frame)
        scene.connection.max_bytes = 100

    scene.connection.on_frame = opened
    scene.hear(framed(b"hi") + framed(b"x" * 90))
    assert scene.heard == [b"hi", b"x" * 90]


def test_what_a_frame_raises_ends_the_connection_with_it(scene: Scene) -> None:
    def fail(frame: bytes) -> None:
        raise KeyError("planted")

    scene.connection.on_frame = fail
    scene.hear(framed(b"a") + framed(b"b"))
    assert len(scene.reasons) == 1
    assert "planted" in scene.reasons[0]
    assert scene.loop.timers == []


@pytest.mark.parametrize("how", ["close", "abort", "fail"])
def test_after_its_end_nothing_is_heard_or_said(scene: Scene, how: str) -> None:
    def end(frame: bytes) -> None:
        scene.heard.append(frame)
        if how == "close":
            scene.connection.close(2.0)
        elif how == "abort":
            scene.connection.abort()
        else:
            scene.connection.fail("why")

    scene.connection.on_frame = end
    scene.hear(framed(b"a") + framed(b"b"))
    scene.hear(framed(b"c"))
    scene.connection.send(b"late")
    scene.connection.connection_lost(None)
    assert scene.heard == [b"a"]
    assert scene.wire.written == b""
    assert scene.wire.ended == ("closed" if how == "close" else "aborted")
    assert scene.reasons == (["why"] if how == "fail" else [])
    assert scene.connection.lost.done()
    assert scene.loop.timers == []


def test_a_peer_that_never_reads_the_end_is_cut_in_time(scene: Scene) -> None:
    scene.connection.close(2.0)
    assert scene.wire.ended == "closed"
    assert scene.loop.fire() == 2.0
    assert scene.wire.ended == "aborted"


def test_the_other_ends_close_is_told_once(scene: Scene) -> None:
    scene.connection.connection_lost(ConnectionResetError("reset"))
    scene.connection.connection_lost(None)
    assert scene.reasons == ["reset"]


def test_an_idle_connection_says_that_it_lives_and_a_busy_one_says_nothing_more(scene: Scene) -> None:
    assert scene.loop.fire() == SILENCE_S / TICKS
    assert scene.wire.written == framed(b"")
    scene.hear(framed(b""))
    scene.connection.send(b"busy")
    written = scene.wire.written
    scene.loop.fire()
    assert scene.wire.written == written
    scene.loop.fire()
    assert scene.wire.written == written + framed(b"")


def test_a_silent_peer_is_gone_after_the_time_and_not_before(scene: Scene) -> None:
    scene.hear(framed(b"")[:2])
    for _ in range(TICKS):
        scene.loop.fire()
    assert scene.reasons == []
    scene.loop.fire()
    assert len(scene.reasons) == 1
    assert scene.wire.ended == "aborted"


def test_a_peer_that_talks_and_reads_nothing_is_gone_after_the_time_too(scene: Scene) -> None:
    scene.connection.send(b"x" * 1000)
    scene.wire.reads = False
    for _ in range(TICKS):
        scene.hear(framed(b"more"))
        scene.connection.send(b"an answer")
        scene.loop.fire()
    assert scene.reasons == []
    scene.hear(framed(b"more"))
    scene.loop.fire()
    assert "reads nothing" in scene.reasons[0]
    assert scene.wire.ended == "aborted"


def test_a_peer_that_reads_a_byte_now_and_then_is_there(scene: Scene) -> None:
    scene.wire.reads = False
    scene.connection.send(b"x" * 1000)
    for _ in range(10 * TICKS):
        scene.hear(framed(b"more"))
        scene.connection.send(b"an answer")
        scene.wire.taken += 1
        scene.loop.fire()
    assert scene.reasons == []


def test_a_loop_that_stood_still_itself_takes_nobody_for_gone(scene: Scene) -> None:
    """However late a tick is, what came meanwhile is read before as many more have passed."""
    for _ in range(3):
        scene.loop.fire()
    scene.loop.fire()  # Ten times as late as it was to be: it is one tick all the same.
    assert scene.reasons == []
    scene.hear(framed(b""))
    for _ in range(TICKS):
        scene.loop.fire()
    assert scene.reasons == []


def test_a_peer_that_reads_slowly_is_told_of_and_when_it_reads_again(scene: Scene) -> None:
    flowing: list[bool] = []
    scene.connection.on_flow = lambda: flowing.append(scene.connection.flows)
    assert scene.wire.limit == UNREAD_BYTES
    assert scene.connection.flows
    scene.connection.pause_writing()
    assert not scene.connection.flows
    scene.connection.resume_writing()
    assert flowing == [True]


def test_one_that_ended_before_it_was_made_is_cut_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, wire = Loop(), Wire()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    connection = FrameConnection(SILENCE_S)
    connection.close(1.0)
    connection.connection_made(cast(Any, wire))
    assert wire.ended == "aborted"
    assert loop.timers == []


def test_a_peer_that_stops_reading_now_and_then_is_there(scene: Scene) -> None:
    """Only ticks in a row count: one that reads again begins anew, and so does one for which nothing waits."""

    def ticks(count: int) -> None:
        for _ in range(count):
            scene.hear(framed(b""))
            scene.loop.fire()
            assert scene.reasons == []

    scene.wire.reads = False
    scene.connection.send(b"x" * 1000)
    for _ in range(3):
        ticks(TICKS)
        scene.wire.taken += 1
        ticks(1)
    ticks(TICKS)
    scene.wire.reads = True
    ticks(1)
    scene.wire.reads = False
    scene.connection.send(b"y" * 1000)
    ticks(TICKS)


def test_after_its_end_nobody_is_told_that_the_peer_reads_again(scene: Scene) -> None:
    flowing: list[bool] = []
    scene.connection.on_flow = lambda: flowing.append(scene.connection.flows)
    scene.connection.pause_writing()
    scene.connection.close(2.0)
    scene.connection.resume_writing()  # What was left to send has gone.
    assert flowing == []


def test_what_has_come_of_a_frame_is_let_go_at_the_end(scene: Scene) -> None:
    scene.connection.max_bytes = 1 << 20
    scene.hear(struct.pack(">I", 1 << 20) + bytes(1 << 19))
    scene.connection.abort()
    assert not scene.connection._data


def test_one_whose_socket_is_never_opened_is_lost_at_once_and_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, reasons = Loop(), list[str]()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    connection = FrameConnection(SILENCE_S)
    connection.on_end = reasons.append
    connection.unmade()
    assert reasons == ["the connection couldn't be made"]
    assert connection.lost.done()
    connection.unmade()
    assert len(reasons) == 1


def test_one_that_was_opened_is_not_lost_for_the_end_of_its_opening(scene: Scene) -> None:
    scene.connection.unmade()
    assert scene.reasons == []
    assert not scene.connection.lost.done()
