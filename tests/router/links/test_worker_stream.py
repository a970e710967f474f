"""The router's end of one stream by itself: what opens it, what ends it and for whom, and what waits meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.router_commands import Cancel, Command
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd, StreamOpening
from twinpool.contracts.messages.worker_events import Event, MigrationPaused
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord
from twinpool.contracts.wire.frame_connection import HEAD_BYTES
from twinpool.contracts.wire.message_codec import decode_commands, decode_opening, encode_events
from twinpool.router.links.worker_links import WorkerStream, open_stream

SEVEN = Incarnation(7)
PAUSED = MigrationPaused(RequestId("r"), 1, 5)


class Connection:
    """A connection that keeps what is sent, and flows or doesn't as the test says."""

    def __init__(self) -> None:
        self.max_bytes = 0
        self.flows = True
        self.aborted = False
        self.frames: list[bytes] = []
        self.on_frame: Callable[[bytes], None] = lambda frame: None
        self.on_end: Callable[[str], None] = lambda reason: None
        self.on_flow: Callable[[], None] = lambda: None

    def send(self, frame: bytes) -> None:
        assert not self.aborted
        self.frames.append(frame)

    def abort(self) -> None:
        self.aborted = True

    def commands(self) -> list[Command]:
        """What was sent since the last call."""
        frames, self.frames = self.frames, []
        return [command for frame in frames for command in decode_commands(frame)[0]]


class Site:
    """A stream to incarnation 7, and what its router hears."""

    def __init__(self, opened: bool = True) -> None:
        self.connection = Connection()
        self.events: list[Event] = []
        self.ends: list[StreamEnd] = []
        self.breaks = False
        connection: Any = self.connection
        self.stream = WorkerStream(connection, SEVEN, self.hear, self.ends.append)
        if opened:
            self.frame()

    def hear(self, events: Sequence[Event]) -> None:
        if self.breaks:
            raise ZeroDivisionError
        self.events += events

    def frame(self, *events: Event, incarnation: Incarnation = SEVEN, end: StreamEnd | None = None) -> None:
        self.connection.on_frame(encode_events(incarnation, events, end))


def cancel(name: str) -> Cancel:
    return Cancel(RequestId(name), 0)


@pytest.mark.asyncio
async def test_the_first_frame_opens_a_stream_and_events_come_as_they_were_said() -> None:
    site = Site(opened=False)
    assert not site.stream.opened.done()
    site.frame()
    assert site.stream.opened.result() is None
    site.frame(PAUSED, PAUSED)
    site.frame(PAUSED)
    assert site.events == [PAUSED] * 3
    assert site.ends == []


@pytest.mark.asyncio
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("what", ["another incarnation", "unreadable", "a bug", "ended", "left", "cut"])
async def test_a_stream_that_ends_tells_it_once_and_hears_and_says_nothing_more(what: str, opened: bool) -> None:
    """Before it is open it is who opens it that is told; then it is who has it."""
    site = Site(opened)
    site.stream.send([cancel("a")])
    match what:
        case "another incarnation":
            site.frame(PAUSED, incarnation=Incarnation(8))
        case "unreadable":
            site.connection.on_frame(b"\xff\xff")
        case "a bug":
            site.breaks = True
            site.frame(PAUSED)
            site.breaks = False
        case "ended" | "left":
            site.frame(end=StreamEnd("the worker ends", what == "left"))
        case _:
            site.connection.on_end("cut")
    assert site.connection.aborted
    assert site.events == []
    if opened or what == "a bug":  # What was admitted is open before its first events are taken.
        assert [end.left for end in site.ends] == [what == "left"]
    else:
        assert site.ends == []
        with pytest.raises(ConnectionError):
            site.stream.opened.result()
    told = len(site.ends)
    site.connection.on_end("cut, too")
    site.stream.send([cancel("b")])
    await asyncio.sleep(0)
    assert len(site.ends) == told
    assert site.connection.frames == []


@pytest.mark.asyncio
async def test_what_one_turn_sends_goes_out_together_and_waits_while_the_worker_does_not_read() -> None:
    site = Site()
    site.stream.send([cancel("a")])
    site.stream.send([cancel("b"), cancel("c")])
    assert site.connection.frames == [], "at the turn's end"
    await asyncio.sleep(0)
    assert len(site.connection.frames) == 1
    assert site.connection.commands() == [cancel("a"), cancel("b"), cancel("c")]
    site.connection.flows = False
    for name in "de":
        site.stream.send([cancel(name)])
        await asyncio.sleep(0)
    assert site.connection.frames == []
    site.connection.flows = True
    site.connection.on_flow()
    assert site.connection.commands() == [cancel("d"), cancel("e")]
    site.connection.on_flow()
    assert site.connection.frames == []
    site.stream.send([cancel("f")])
    await asyncio.sleep(0)
    assert site.connection.commands() == [cancel("f")], "and what comes later goes as before"


@pytest.mark.asyncio
async def test_a_stream_that_its_router_closes_tells_nobody_and_drops_what_waits() -> None:
    site = Site()
    site.stream.send([cancel("a")])
    site.stream.close()
    site.stream.close()
    site.connection.on_end("cut")
    await asyncio.sleep(0)
    assert site.connection.aborted
    assert site.connection.frames == []
    assert site.ends == []


@pytest.mark.asyncio
async def test_an_opening_that_is_cancelled_closes_its_connection() -> None:
    """The worker takes the connection and admits nobody yet; the router wants the stream no more."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[bytes] = loop.create_future()
    closed: asyncio.Future[bytes] = loop.create_future()

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "big")
        came.set_result(await reader.readexactly(size))
        closed.set_result(await reader.read())
        writer.close()

    ends: list[StreamEnd] = []
    listener = await asyncio.start_server(worker, "127.0.0.1", 0)
    try:
        stream = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        limits = WorkerLimits(64, 64)
        record = WorkerRecord(
            WorkerName("decode-0"), Role.DECODE, SEVEN, 7, "n", stream, "", limits, stream=stream,
            stream_protocol=STREAM_PROTOCOL,
        )  # fmt: skip
        opening = asyncio.create_task(
            open_stream(record, 600.0, None, lambda events: None, ends.append, timeout_s=60.0)
        )
        assert decode_opening(await asyncio.wait_for(came, 60)) == StreamOpening(STREAM_PROTOCOL, SEVEN)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.wait([closed], timeout=60)
        assert closed.done(), "the connection stays open for nobody"
    finally:
        listener.close()
    assert closed.result() == b""
    assert ends == []
