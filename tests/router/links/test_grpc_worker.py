"""Ports and the directory over real gRPC: what is sent arrives, other incarnations are refused, ends are told once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec
import pytest
from msgspec.structs import replace

from tests.router.fake_worker import FakeCluster, FakeWorker, prefill_frames
from tests.router.grpc_fakes import grpc_cluster, start_controller, start_worker
from tests.router.http_server import demo_spec, eventually
from tests.support.free_ports import free_port
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId
from twinpool.contracts.messages.pool_changes import DrainWorkers
from twinpool.contracts.messages.router_commands import Cancel, PeerRef, Submit
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Done, Event, LegReport, PromptScores, Tokens
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.message_codec import FRAME_BYTES, FrameWriter, decode_commands
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.worker_links import GrpcWorkerClient
from twinpool.router.service.open_answers import ClientRequest
from twinpool.router.service.router_service import RouterService
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind

pytestmark = pytest.mark.asyncio

SAMPLING = SamplingParams(
    4, seed=2**64 - 1, logprobs=1, prompt_logprobs=1, logit_bias=((5, -1.5),), stop_token_ids=(9,)
)


def submit(worker: FakeWorker, number: int = 0) -> Submit:
    peer = PeerRef(worker.name, worker.incarnation, "tcp://x:1")
    return Submit(RequestId(f"r{number}"), 2, RoomId("room"), (5, 6, 7), 3, SAMPLING, peer, "salt", 5.0, -3)


class Ear:
    """Hears what a session says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reasons: list[str] = []
        self.left = False

    def on_events(self, events: Sequence[Event]) -> None:
        self.events += events

    def on_closed(self, end: StreamEnd) -> None:
        self.reasons.append(end.reason)
        self.left = end.left


def nothing_listens() -> str:
    return f"127.0.0.1:{free_port()}"


async def test_commands_and_events_arrive_whole_and_in_order() -> None:
    worker = FakeWorker("prefill-0", Role.PREFILL)
    server, _ = await start_worker(worker)
    port, ear = GrpcWorkerClient(worker.record), Ear()
    session = await port.connect(ear.on_events, ear.on_closed)
    worker.paused = True
    sent = [submit(worker, i) for i in range(200)]
    session.send(sent[:150])
    session.send([*sent[150:], Cancel(RequestId("r7"), 2)])
    await eventually(lambda: bool(worker.cancels))
    assert worker.submits == sent
    worker.resume()
    await eventually(lambda: len(ear.events) == 199 * 3)
    want = [e for f in prefill_frames(sent[0], worker.name) for e in f]
    assert [e for e in ear.events if e.request_id == "r0"] == want
    assert [type(e) for e in want] == [PromptScores, Tokens, LegReport]
    assert not [e for e in ear.events if e.request_id == "r7"]
    session.close()
    await eventually(lambda: not worker.sessions)
    assert ear.reasons == []
    await port.aclose()
    await server.stop(0)


async def test_operators_calls_go_through() -> None:
    worker = FakeWorker("decode-0", Role.DECODE)
    server, _ = await start_worker(worker)
    port = GrpcWorkerClient(worker.record)
    assert (await port.status()) == worker.status()
    assert (await port.drain()).state == "draining"
    assert (await port.undrain()).state == "ready"
    worker.violations = ("a", "b")
    assert (await port.check()) == worker.check()
    await port.aclose()
    await server.stop(0)


async def test_another_incarnation_is_refused_with_both_numbers() -> None:
    worker = FakeWorker("decode-0", Role.DECODE)
    server, _ = await start_worker(worker)
    port = GrpcWorkerClient(worker.record)
    worker.restart()
    with pytest.raises(ConnectionError, match="incarnation 2, the call is for 1"):
        await port.connect(print, print)
    with pytest.raises(ConnectionError):
        await port.status()
    assert not worker.sessions
    await port.aclose()
    await server.stop(0)


async def test_nobody_at_the_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.router.links.worker_links.CONNECT_TIMEOUT_S", 600.0)
    worker = FakeWorker("decode-0", Role.DECODE)
    worker.endpoint = worker.stream = nothing_listens()
    port = GrpcWorkerClient(worker.record)
    async with asyncio.timeout(60):
        with pytest.raises(ConnectionError, match="decode-0"):
            await port.connect(print, print)
    await port.aclose()


async def test_a_worker_that_hangs_is_told_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.router.links.worker_links.CONNECT_TIMEOUT_S", 0.1)
    worker = FakeWorker("decode-0", Role.DECODE)
    server, _ = await start_worker(worker)
    worker.hangs = True
    port = GrpcWorkerClient(worker.record)
    with pytest.raises(ConnectionError, match=r"didn't answer in 0\.1 s"):
        await port.connect(print, print)
    await port.aclose()
    await server.stop(0)


@pytest.mark.parametrize("how", ["worker ends", "server dies", "wrong frame"])
async def test_an_end_of_the_stream_is_told_once(how: str) -> None:
    worker = FakeWorker("prefill-0", Role.PREFILL)
    server, fake = await start_worker(worker)
    port, ear = GrpcWorkerClient(worker.record), Ear()
    session = await port.connect(ear.on_events, ear.on_closed)
    session.send([submit(worker)])
    await eventually(lambda: bool(ear.events))
    if how == "worker ends":
        worker.break_links()
    elif how == "server dies":
        await server.stop(0)
    else:
        fake.says = Incarnation(7)
        session.send([submit(worker, 1)])
    await eventually(lambda: bool(ear.reasons))
    session.send([submit(worker, 2)])
    session.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(ear.reasons) == 1
    assert ear.reasons[0]
    await port.aclose()
    await server.stop(0)


async def test_the_directory_follows_the_controller_and_outlives_it() -> None:
    cluster = FakeCluster()
    controller, fake, port = await start_controller(cluster)
    directory = ControllerDirectory(f"127.0.0.1:{port}")
    seen: list[tuple[WorkerView, ...]] = []
    unwatch = directory.watch(seen.append)
    await eventually(lambda: bool(seen))
    assert seen[-1] == cluster.views()
    cluster["decode-0"].state = "draining"
    fake.changed()
    await eventually(lambda: seen[-1] == cluster.views())
    await controller.stop(0)
    count = len(seen)
    late: list[tuple[WorkerView, ...]] = []
    directory.watch(late.append)()
    assert late == [seen[-1]], "while the controller is away its last table stands"
    assert len(seen) == count
    cluster["decode-0"].restart()
    controller, fake, _ = await start_controller(cluster, port)
    await eventually(lambda: seen[-1] == cluster.views())
    unwatch()
    fake.changed()
    await controller.stop(0)
    assert directory._task is None


async def test_a_command_waits_for_a_controller_that_is_started_again() -> None:
    refused = asyncio.Event()

    def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        refused.set()

    nobody = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = nobody.sockets[0].getsockname()[1]
    command = asyncio.create_task(ControllerDirectory(f"127.0.0.1:{port}").change_pools(DrainWorkers("decode-0")))
    await refused.wait()
    nobody.close()
    await nobody.wait_closed()
    controller, _, _ = await start_controller(FakeCluster(), port)
    assert (await command).names == ("decode-0",)
    await controller.stop(0)


@pytest.mark.slow
async def test_a_router_serves_over_grpc_and_replays_when_a_worker_restarts() -> None:
    cluster = FakeCluster()
    async with grpc_cluster(cluster) as address:
        service = RouterService(demo_spec(), Config(), ControllerDirectory(address))
        await service.start()
        await eventually(lambda: bool(service.core.serving(Role.PREFILL) and service.core.serving(Role.DECODE)))
        body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 1}
        raw = json.dumps(body).encode()
        stream = await service.open(ClientRequest(FrameKind.COMPLETION, raw, "me"))
        await stream.ended()
        whole = stream.choices[0].tokens
        assert len(whole) == 20
        cluster["decode-0"].pause()
        stream = await service.open(ClientRequest(FrameKind.COMPLETION, raw, "me"))
        await eventually(lambda: bool(cluster["decode-0"].legs) and len(stream.choices[0].tokens) == 1)
        for _ in range(5):
            cluster["decode-0"].step()
        await eventually(lambda: len(stream.choices[0].tokens) == 6)
        cluster["decode-0"].break_links()
        cluster["decode-0"].resume()
        await stream.ended()
        assert stream.choices[0].tokens == whole
        assert cluster["decode-0"].submits[-1].tokens == (5, 6, 7, *whole[:6])
        assert service.check() == []
        await service.close()
        await eventually(lambda: not any(w.sessions for w in cluster.workers.values()))


async def test_a_done_with_an_error_keeps_its_kind_and_blame() -> None:
    worker = FakeWorker("prefill-0", Role.PREFILL)
    server, _ = await start_worker(worker)
    port, ear = GrpcWorkerClient(worker.record), Ear()
    await port.connect(ear.on_events, ear.on_closed)
    await eventually(lambda: bool(worker.sessions))
    done = Done(RequestId("r"), 1, "error", error=ErrorKind.ROOM, message="m", blame=worker.name)
    worker.sessions[0].on_events([done])
    await eventually(lambda: bool(ear.events))
    assert ear.events == [done]
    await port.aclose()
    await server.stop(0)


async def test_a_bug_in_the_router_ends_the_stream_and_never_leaves_it_unread() -> None:
    worker = FakeWorker("prefill-0", Role.PREFILL)
    server, _ = await start_worker(worker)
    port, ear = GrpcWorkerClient(worker.record), Ear()

    def fail(events: Sequence[Event]) -> None:
        raise AssertionError("planted")

    session = await port.connect(fail, ear.on_closed)
    session.send([submit(worker)])
    await eventually(lambda: bool(ear.reasons))
    assert "planted" in ear.reasons[0]
    await eventually(lambda: not worker.sessions)
    await port.aclose()
    await server.stop(0)


async def test_a_call_whose_channel_is_closed_meanwhile_fails_and_cancels_nobody() -> None:
    worker = FakeWorker("decode-0", Role.DECODE)
    server, fake = await start_worker(worker)
    worker.hangs = True
    port = GrpcWorkerClient(worker.record)
    asking = asyncio.create_task(port.status())
    await eventually(lambda: bool(fake.hanging))
    await port.aclose()
    with pytest.raises(ConnectionError, match="decode-0"):
        await asking
    await server.stop(0)


@pytest.mark.parametrize("tokens", [3, 1024, 5000])
async def test_choices_of_a_long_prompt_encode_it_once_and_arrive_whole(tokens: int) -> None:
    """128 of 100,000 tokens were 128 encodings on the loop; the oracle is msgpack's own reading of the bytes."""
    worker = FakeWorker("prefill-0", Role.PREFILL)
    prompt = tuple(range(100_000, 100_000 + tokens))
    commands: list[Submit | Cancel] = []
    for number in range(70):
        commands.append(replace(submit(worker, number), tokens=prompt, prompt_len=tokens))
        if number % 9 == 0:
            commands.append(Cancel(RequestId(f"r{number}"), 1))
    writer = FrameWriter()
    frames = list(writer.frames(commands))
    read = [c for raw in frames for c in msgpack.unpackb(raw)[0]]
    assert read == [msgpack.unpackb(msgspec.msgpack.encode(command)) for command in commands]
    assert [c for raw in frames for c in decode_commands(raw)[0]] == commands
    assert writer.encoded == (tokens >= 1024)
    assert all(len(msgpack.unpackb(raw)[0]) <= 64 for raw in frames)


async def test_what_was_encoded_of_one_prompt_is_never_sent_as_anothers_that_has_its_place_in_memory() -> None:
    worker, writer = FakeWorker("prefill-0", Role.PREFILL), FrameWriter()
    for first in range(40):  # None is held once it is sent, so the next one may lie where it lay.
        (frame,) = writer.frames([replace(submit(worker), tokens=tuple(range(first, first + 2000)), prompt_len=2000)])
        ((read,), _) = decode_commands(frame)
        assert isinstance(read, Submit)
        assert read.tokens == tuple(range(first, first + 2000))
    held = replace(submit(worker), tokens=tuple(range(2000)), prompt_len=2000)
    before = writer.encoded
    assert list(writer.frames([held])) == list(writer.frames([held]))
    assert writer.encoded - before == 2, "nothing is kept from one call to the next"


async def test_frames_of_long_prompts_stay_small() -> None:
    worker = FakeWorker("prefill-0", Role.PREFILL)
    prompt = tuple([200_000] * 200_000)
    commands = [replace(submit(worker, n), tokens=prompt, prompt_len=len(prompt)) for n in range(8)]
    (alone,) = FrameWriter().frames(commands[:1])
    sizes = [len(raw) for raw in FrameWriter().frames(commands)]
    assert len(sizes) == 4
    assert max(sizes) < FRAME_BYTES + len(alone)
