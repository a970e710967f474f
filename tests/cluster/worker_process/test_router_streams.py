"""The worker's end of routers' streams, spoken to in bytes: who is admitted, what comes back, and every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest

from tests.cluster.fake_worker import FakeWorker, submit
from tests.cluster.worker_process.test_grpc_service import Served, served, serving
from tests.support.raw_frames import WAIT_S, RawStream, framed, opening, read_frame
from twinpool.cluster.worker_process import router_streams
from twinpool.cluster.worker_process.router_streams import RouterStreams
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages import stream_frames
from twinpool.contracts.messages.worker_events import Event, Tokens
from twinpool.contracts.wire import frame_connection
from twinpool.contracts.wire.frame_connection import OPENING_BYTES
from twinpool.contracts.wire.message_codec import COMMANDS_BYTES, FrameWriter

__all__ = ["served"]


async def until_running(served: Served, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while served.host.status().result(WAIT_S).running != count:
            await asyncio.sleep(0)


def test_a_stream_carries_many_requests_and_one_frame_a_step(served: Served) -> None:
    async def talk() -> list[tuple[Event, ...]]:
        stream = await RawStream.open(served.server.stream, 3)
        stream.send(submit("a", 3), submit("b", 3))
        frames = []
        for _ in range(3):
            frame = await stream.read()
            assert frame.incarnation == 3
            frames.append(frame.events)
        stream.abort()
        return frames

    frames = asyncio.run(talk())
    assert [[e.request_id for e in frame if isinstance(e, Tokens)] for frame in frames] == [["a", "b"]] * 3


def test_frames_may_come_in_pieces_and_together(served: Served) -> None:
    async def talk() -> set[str]:
        stream = await RawStream.open(served.server.stream, 3)
        frames = [[submit("a", 1)], [submit("b", 1), submit("c", 1)]]
        whole = framed(b"")
        for commands in frames:
            whole += b"".join(map(framed, FrameWriter().frames(commands)))
        for begin in range(0, len(whole), 7):
            stream.writer.write(whole[begin : begin + 7])
            await stream.writer.drain()
            await asyncio.sleep(0)
        seen: set[str] = set()
        while len(seen) < 3:
            seen |= {event.request_id for event in (await stream.read()).events}
        stream.abort()
        return seen

    assert asyncio.run(talk()) == {"a", "b", "c"}


@pytest.mark.parametrize("other", [2, 4])
def test_d3_another_incarnation_is_refused_with_both_numbers(served: Served, other: int) -> None:
    async def talk() -> str:
        stream = await RawStream.connect(served.server.stream)
        stream.write(opening(other))
        end = (await stream.read()).end
        stream.abort()
        return end.reason if end is not None else ""

    assert asyncio.run(talk()) == f"this is incarnation 3, the call is for incarnation {other}"


@pytest.mark.parametrize("told", [0, 1])
def test_a_router_of_an_older_protocol_is_refused_with_what_to_do(
    served: Served, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0: of a build that tells none."""
    monkeypatch.setattr(stream_frames, "OLDEST", 2)
    monkeypatch.setattr(stream_frames, "STREAM_PROTOCOL", 3)

    async def talk(protocol: int) -> str:
        stream = await RawStream.connect(served.server.stream)
        stream.write(opening(3, protocol=protocol))
        end = (await stream.read()).end
        stream.abort()
        return end.reason if end is not None else ""

    refused = asyncio.run(talk(told))
    assert "this router speaks version 1 of the messages between routers and workers, and this build 2 to 3" in refused
    assert "replace it" in refused
    assert asyncio.run(talk(2)) == "", "one that this build knows is served"
    assert asyncio.run(talk(9)) == "", "a newer one judges by itself"


def test_a_worker_whose_weights_were_changed_refuses_routers_that_would_go_on_with_answers_of_others(
    served: Served,
) -> None:
    async def talk(protocol: int) -> str:
        stream = await RawStream.connect(served.server.stream)
        stream.write(opening(3, protocol=protocol))
        end = (await stream.read()).end
        stream.abort()
        return end.reason if end is not None else ""

    assert asyncio.run(talk(stream_frames.WEIGHTS_SINCE - 1)) == ""
    served.host.changed_weights = True
    refused = asyncio.run(talk(stream_frames.WEIGHTS_SINCE - 1))
    assert f"knows version {stream_frames.WEIGHTS_SINCE}" in refused
    assert asyncio.run(talk(stream_frames.WEIGHTS_SINCE)) == ""


def test_a_router_of_version_1_is_told_so_in_bytes_that_it_reads(served: Served) -> None:
    """Its opening is protobuf: incarnation 3, version 1. So is what it reads: the text of field 3 is why."""

    async def talk() -> bytes:
        stream = await RawStream.connect(served.server.stream)
        stream.write(b"\x08\x03\x18\x01")
        last = await read_frame(stream.reader)
        assert await stream.reader.read() == b"", "and nothing more comes"
        stream.abort()
        return last

    last = asyncio.run(talk())
    assert last[0] == 3 << 3 | 2
    assert (last[1] & 0x7F | last[2] << 7) == len(last) - 3
    assert "this router speaks version 1 of the messages between routers and workers" in last[3:].decode()


def test_a_router_that_goes_away_has_its_session_dropped(served: Served) -> None:
    served.worker.hold = True

    async def talk() -> None:
        stream = await RawStream.open(served.server.stream, 3)
        stream.send(submit("a"))
        await until_running(served, 1)
        stream.abort()
        await until_running(served, 0)

    asyncio.run(talk())
    assert served.worker.dropped


def test_a_worker_that_dies_ends_its_streams_with_the_cause(served: Served) -> None:
    async def talk() -> str:
        stream = await RawStream.open(served.server.stream, 3)
        served.worker.fail = RuntimeError("bad device")
        return await stream.end()

    assert asyncio.run(talk()) == "RuntimeError: bad device"


def test_a_worker_that_has_ended_admits_nobody(served: Served) -> None:
    async def talk() -> str:
        assert served.host.stop(WAIT_S)
        stream = await RawStream.connect(served.server.stream)
        stream.write(opening(3))
        return await stream.end()

    assert "stopped" in asyncio.run(talk())


def test_a_server_that_stops_flushes_what_it_has_said_and_tells_why(served: Served) -> None:
    async def talk() -> tuple[list[RequestId], str]:
        stream = await RawStream.open(served.server.stream, 3)
        stream.send(submit("a", 2))
        said = [event.request_id for event in (await stream.read()).events]
        stopping = asyncio.create_task(asyncio.to_thread(served.server.stop, 5.0))
        why = await stream.end()
        await stopping
        with pytest.raises(ConnectionError):
            await RawStream.connect(served.server.stream)
        return said, why

    said, why = asyncio.run(talk())
    assert set(said) == {"a"}
    assert why == "the worker ends"


def test_a_router_that_reads_too_slowly_is_cut_off() -> None:
    """It reads nothing at all; what the kernel holds for it isn't the worker's."""

    async def talk() -> None:
        worker = FakeWorker(incarnation=3)
        host = WorkerThread(worker, idle_s=0.02)
        host.start()
        streams = RouterStreams(host, 3, outbox_bytes=200)
        address = f"127.0.0.1:{await streams.start('127.0.0.1')}"
        stream = await RawStream.open(address, 3)
        stream.writer.transport.pause_reading()  # type: ignore[attr-defined]
        stream.send(*(submit(f"request-{number}" + "x" * 1000, 2**31) for number in range(100)))
        async with asyncio.timeout(WAIT_S):
            while not worker.dropped:
                await asyncio.sleep(0.01)
        assert host.call(lambda worker: None).result(WAIT_S) is None
        stream.abort()
        await streams.stop(0.1)
        assert host.stop(WAIT_S)

    asyncio.run(talk())


def test_d9_where_there_is_a_secret_only_routers_with_its_token_come_in() -> None:
    secret = "5e" * 32

    async def refused(address: str, access: str) -> str:
        stream = await RawStream.connect(address)
        stream.write(opening(3, access))
        stream.send(submit("a"))
        end = (await stream.read()).end
        stream.abort()
        return end.reason if end is not None else ""

    async def admitted(address: str) -> str:
        stream = await RawStream.open(address, 3, access_token(secret))
        stream.send(submit("a"))
        first = (await stream.read()).events[0].request_id
        stream.abort()
        return first

    with serving(secret) as served:
        for stranger in ("", "guess", access_token("00" * 32), "\u00fc"):
            assert asyncio.run(refused(served.server.stream, stranger)) == "this stream lacks the cluster's token"
        assert served.worker.steps == 0
        assert asyncio.run(admitted(served.server.stream)) == "a"


NO_OPENINGS = {
    "too long": struct.pack(">I", OPENING_BYTES + 1),
    "noise": struct.pack(">I", 9) + b"\xff" * 9,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("what", NO_OPENINGS)
def test_who_opens_with_something_else_is_cut_off(served: Served, what: str) -> None:
    async def talk() -> None:
        stream = await RawStream.connect(served.server.stream)
        stream.writer.write(NO_OPENINGS[what])
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while await stream.reader.read(65536):
                    pass

    asyncio.run(talk())


@pytest.mark.parametrize("what", ["no commands", "a wrong type", "too long"])
def test_a_router_that_breaks_the_protocol_ends_alone(served: Served, what: str) -> None:
    served.worker.hold = True

    async def talk() -> None:
        good, bad = [await RawStream.open(served.server.stream, 3) for _ in range(2)]
        good.send(submit("good"))
        bad.send(submit("bad"))
        await until_running(served, 2)
        if what == "no commands":
            bad.write(b"\xff" * 20)
            assert "protocol error" in await bad.end()
        elif what == "a wrong type":
            bad.write_frame(submit("worse"), ["cancel", "bad", "0"])
            assert (await bad.end()).endswith("can't be read: message 1: Expected `int`, got `str` - at `$[2]`")
        else:
            bad.writer.write(struct.pack(">I", COMMANDS_BYTES + 1))
        await until_running(served, 1)
        served.worker.hold = False
        assert {event.request_id for event in (await good.read()).events} == {"good"}
        good.abort()
        bad.abort()

    asyncio.run(talk())


def test_routers_are_bounded_and_one_that_leaves_makes_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "MAX_ROUTERS", 2)

    async def talk() -> None:
        streams = [await RawStream.open(served.server.stream, 3) for _ in range(2)]
        third = await RawStream.connect(served.server.stream)
        third.write(opening(3))
        assert await third.end() == "2 routers are served already"
        streams.pop().abort()
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    streams.append(await RawStream.open(served.server.stream, 3))
                    break
                except AssertionError:
                    await asyncio.sleep(0.01)
        for stream in streams:
            stream.abort()

    asyncio.run(talk())


def test_who_says_nothing_makes_room_for_others_and_no_router_is_cut(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_connection, "STRANGERS", 4)

    async def talk() -> None:
        router = await RawStream.open(served.server.stream, 3)
        silent = [await RawStream.connect(served.server.stream) for _ in range(12)]
        async with asyncio.timeout(WAIT_S):
            for stranger in silent[:8]:
                assert await stranger.reader.read() == b""
        late = await RawStream.open(served.server.stream, 3)
        for stream in (router, late):
            stream.send(submit(f"r{id(stream)}", 1))
            assert (await stream.read()).events
            stream.abort()
        for stranger in silent:
            stranger.abort()

    asyncio.run(talk())


def test_who_says_nothing_is_cut_in_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "OPENING_S", 0.05)

    async def talk() -> str:
        return await (await RawStream.connect(served.server.stream)).end()

    assert asyncio.run(talk()) == "the first frame didn't come"
