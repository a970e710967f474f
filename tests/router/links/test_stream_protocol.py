"""The version of the messages between routers and workers: who is refused before anything is asked."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.router.http_server import eventually
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages import stream_frames
from twinpool.contracts.messages.router_commands import Cancel, PeerRef, Submit
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.message_codec import decode, decode_commands, encode
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.worker_links import MAX_COMMANDS, TURN_BYTES, WorkerLinks, WorkerStream, open_stream

WAIT_S = 60.0


def record(stream: str, protocol: int) -> WorkerRecord:
    return WorkerRecord(
        WorkerName("decode-0"), Role.DECODE, Incarnation(1), 7, "n", stream, "", WorkerLimits(64, 64), stream=stream,
        build="0.1.0+old", stream_protocol=protocol,
    )  # fmt: skip


@pytest.mark.parametrize("told", [0, 1])
def test_a_worker_that_is_too_old_isnt_even_connected_to(told: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(0.0)
        old = record(f"127.0.0.1:{nobody.getsockname()[1]}", told)

        async def opened() -> None:
            await open_stream(old, 1.0, None, lambda events: None, lambda reason: None, timeout_s=WAIT_S)

        with pytest.raises(ConnectionError, match=r"decode-0 of build 0\.1\.0\+old speaks version 1 .* replace it"):
            asyncio.run(opened())
        with pytest.raises(BlockingIOError):
            nobody.accept()


def test_versions_that_both_know_are_talked() -> None:
    assert stream_frames.refusal("a worker", stream_frames.OLDEST) == ""
    assert stream_frames.refusal("a worker", stream_frames.STREAM_PROTOCOL + 5) == ""
    assert stream_frames.OLDEST <= stream_frames.STREAM_PROTOCOL


def test_a_record_carries_the_version_over_the_wire() -> None:
    one = record("127.0.0.1:1", 3)
    assert decode(WorkerRecord, encode(one)) == (one, 0)


@pytest.mark.asyncio
async def test_an_operator_is_told_why_a_worker_has_no_link() -> None:
    directory = ControllerDirectory("127.0.0.1:1")
    links = WorkerLinks(
        directory,
        on_view=lambda views: None,
        on_linked=lambda key: None,
        on_unlinked=lambda key, end: None,
        on_events=lambda key, events: None,
    )
    old = record("127.0.0.1:1", 1)
    status = WorkerStatus(old.name, old.role, "ready", 7, "n", old.incarnation, 0, 0, 0, 0)
    links._changed((WorkerView(old, status),))
    key = (old.name, old.incarnation)
    assert links.refused(key) == ""
    await eventually(lambda: bool(links.refused(key)))
    assert "replace it" in links.refused(key)
    links._changed(())
    assert links.refused(key) == ""
    await links.close()


@pytest.mark.asyncio
async def test_a_worker_that_reads_no_commands_is_cut_before_they_fill_the_router() -> None:
    """It says that it lives all the while."""
    ends: list[str] = []
    connection = FrameConnection(WAIT_S)
    stream = WorkerStream(connection, Incarnation(1), lambda events: None, lambda end: ends.append(end.reason))
    stream.opened.set_result(None)
    connection.pause_writing()
    leave = [Cancel(RequestId("r-0"), 0)]
    for _ in range(MAX_COMMANDS):
        stream.send(leave)
    await asyncio.sleep(0)
    assert not ends
    stream.send(leave)
    await eventually(lambda: bool(ends))
    assert "doesn't read its commands" in ends[0]
    assert not stream._queue


@pytest.mark.asyncio
async def test_the_choices_of_a_long_prompt_go_out_in_several_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, with what is sent meanwhile behind them; each takes its part of a tenth of a second to encode."""
    connection, sent, turn, turns = FrameConnection(WAIT_S), list[bytes](), 0, list[int]()
    stream = WorkerStream(connection, Incarnation(1), lambda events: None, lambda end: None)
    stream.opened.set_result(None)
    connection.flows = True

    def send(frame: bytes) -> None:
        sent.append(frame)
        turns.append(turn)

    monkeypatch.setattr(connection, "send", send)
    prompt = tuple(range(100_000))
    peer = PeerRef(WorkerName("prefill-0"), Incarnation(1), "tcp://x:1")

    def submit(number: int) -> Submit:
        one = SamplingParams(4, seed=number)
        return Submit(RequestId(f"r{number}"), 0, RoomId("room"), prompt, len(prompt), one, peer, "", 5.0, 0)

    stream.send([submit(number) for number in range(32)])
    while turn < 2 or turns[-1] == turn - 1:
        await asyncio.sleep(0)
        turn += 1
        if turn == 2:
            stream.send([Cancel(RequestId("r0"), 0)])
    commands = [command for raw in sent for command in decode_commands(raw)[0]]
    assert [c.request_id for c in commands] == [*(f"r{number}" for number in range(32)), "r0"]
    for each in set(turns):
        frames = [len(frame) for frame, at in zip(sent, turns, strict=True) if at == each]
        assert sum(frames[:-1]) < TURN_BYTES
    assert len(set(turns)) >= sum(map(len, sent)) // (2 * TURN_BYTES) > 2
