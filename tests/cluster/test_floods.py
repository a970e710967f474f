"""Garbage on the ports of controller and workers: whoever it comes from harms nobody else."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]
from msgspec import structs

from tests.cluster.fake_worker import FakeWorker, submit
from tests.support.raw_frames import RawStream
from twinpool.cluster.controller import controller_service
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper
from twinpool.cluster.worker_process.worker_process import serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import CALLS_VERSION, CHANGE_POOLS, RENEW, WATCH
from twinpool.contracts.messages.cluster_view import WatchRequest
from twinpool.contracts.messages.leases import Renewal
from twinpool.contracts.messages.pool_changes import DrainWorkers
from twinpool.contracts.messages.worker_events import Tokens
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.wire.grpc_calls import CONTROL_BYTES
from twinpool.contracts.wire.message_codec import encode

NAME = WorkerName("decode-0")
WAIT_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHODS = {
    "Controller": ["Register", "Renew", "Leave", "ChangePools", "Watch", "LeaseQuota", "Nonsense"],
    "Worker": ["Status", "Check", "Drain", "Undrain", "Nonsense"],
}


class Scene:
    """A controller and one worker with a lease, both on real ports."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, ClusterConfig(), MemoryLedger())
        self.controller = ControllerServer(self.core)
        self.controller.call(lambda core: core.pools.add(NAME, Role.DECODE))
        self.controller.call(Controller.tick)
        self.worker = FakeWorker(incarnation=1)
        self.host = WorkerThread(self.worker, idle_s=0.01)
        self.host.start()
        self.loop = AsyncioThread("worker-service")
        self.server = serve_worker(self.loop, self.host, 1, "127.0.0.1")
        self.lost: list[str] = []
        limits = WorkerLimits(1024, 2048)
        record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", self.server.endpoint, "", limits)
        self.keeper = LeaseKeeper(
            record, self.controller.endpoint, self.clock, 0.01, self.host.heartbeat, LeaseHandlers(self.lost.append)
        )
        self.loop.run(self.keeper.start(WAIT_S), WAIT_S)

    def close(self) -> None:
        self.loop.run(self.keeper.close(), WAIT_S)
        self.server.stop(0.1)
        assert self.host.stop(WAIT_S)
        self.loop.stop()
        self.controller.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def blobs(seed: int, count: int) -> Iterator[bytes]:
    """What strangers may send: noise, other protocols, and HTTP/2 that goes wrong after its first bytes."""
    rng = random.Random(seed)
    for number in range(count):
        noise = rng.randbytes(rng.choice([1, 9, 200, 70_000]))
        yield (noise, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + noise, PREFACE + noise, PREFACE)[number % 4]


async def hurl(endpoint: str, blob: bytes) -> None:
    """Send it and wait for the other side to hang up, or hang up first."""
    host, _, port = endpoint.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(blob)
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(0.05):
            while await reader.read(65536):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()


async def call_with(channel: grpc.aio.Channel, path: str, raw: bytes) -> grpc.StatusCode:
    """Call a method with bytes in its message's place."""

    def same(data: bytes) -> bytes:
        return data

    call: Any = channel.stream_stream(path, request_serializer=same, response_deserializer=same)
    try:
        async with asyncio.timeout(WAIT_S):
            stream = call(iter([raw]), timeout=WAIT_S)
            if path.endswith("Watch"):
                first = await stream.read()
                stream.cancel()
                return grpc.StatusCode.OK if first is not EOF else await stream.code()
            async for _ in stream:
                pass
            code: grpc.StatusCode = await stream.code()
            return code
    except grpc.aio.AioRpcError as error:
        return error.code()


def descriptors() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


async def answer_of(stream: RawStream, request: str) -> list[int]:
    """The tokens of one request."""
    found = list[int]()
    stream.send(submit(request, 4))
    async with asyncio.timeout(WAIT_S):
        while len(found) < 4:
            for event in (await stream.read()).events:
                if isinstance(event, Tokens):
                    found += event.tokens
    return found


@pytest.mark.slow
def test_a_flood_of_garbage_on_the_ports_of_controller_and_worker_harms_nobody(scene: Scene) -> None:
    async def flood() -> None:
        good = await RawStream.open(scene.server.stream, 1)
        undisturbed = await answer_of(good, "before")
        began = descriptors()
        for endpoint in (scene.controller.endpoint, scene.server.endpoint, scene.server.stream):
            for seed in range(4):
                await asyncio.gather(*(hurl(endpoint, blob) for blob in blobs(seed, 24)))
                assert await answer_of(good, f"{endpoint}-{seed}") == undisturbed
        rng = random.Random(5)
        for kind, endpoint in (("Controller", scene.controller.endpoint), ("Worker", scene.server.endpoint)):
            async with grpc.aio.insecure_channel(endpoint) as stranger:
                for method in METHODS[kind]:
                    for size in (0, 1, 40, 3000):
                        await call_with(stranger, f"/twinpool.v{CALLS_VERSION}.{kind}/{method}", rng.randbytes(size))
        assert await answer_of(good, "after") == undisturbed
        async with asyncio.timeout(WAIT_S):
            while descriptors() > began + 8:
                await asyncio.sleep(0.01)
        good.abort()

    asyncio.run(flood())
    assert scene.keeper.lease.held
    assert scene.lost == []
    (view,) = scene.controller.call(Controller.views)
    assert (view.record.name, view.status.state) == (NAME, "ready")
    assert scene.host.ended is None
    assert not scene.worker.draining


def test_a_call_of_more_than_its_bound_ends_alone(scene: Scene) -> None:
    async def talk() -> list[grpc.StatusCode]:
        bounds = [("grpc.max_send_message_length", 64 << 20)]
        async with grpc.aio.insecure_channel(scene.controller.endpoint, options=bounds) as stranger:
            too_long = encode(DrainWorkers("x" * (CONTROL_BYTES + 1)))
            long = encode(DrainWorkers("x" * (CONTROL_BYTES // 4)))
            return [await call_with(stranger, CHANGE_POOLS.path, raw) for raw in (too_long, long)]

    codes = asyncio.run(talk())
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT]
    assert scene.keeper.lease.held


@pytest.mark.parametrize(
    "status",
    [{"stalled_s": float("nan")}, {"stalled_s": float("inf")}, {"longest_step_s": float("nan")}, {"role": "x"}],
)
def test_a_heartbeat_that_makes_no_sense_is_refused_and_fences_nobody(scene: Scene, status: dict[str, Any]) -> None:
    async def talk() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(scene.controller.endpoint) as stranger:
            ready = WorkerStatus(NAME, Role.DECODE, "ready", 7, "n", Incarnation(1), 0, 0, 8, 8)
            renewal = Renewal(NAME, Incarnation(1), structs.replace(ready, **status))
            return await call_with(stranger, RENEW.path, encode(renewal))

    assert asyncio.run(talk()) is grpc.StatusCode.INVALID_ARGUMENT
    (view,) = scene.controller.call(Controller.views)
    assert view.status.state == "ready"


def test_watchers_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_service, "MAX_WATCHERS", 2)

    async def open_three() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(scene.controller.endpoint) as channel:
            call: Any = channel.stream_stream(WATCH.path)  # type: ignore[call-arg]
            streams = []
            for _ in range(3):
                stream = call(timeout=WAIT_S)
                await stream.write(encode(WatchRequest()))
                streams.append(stream)
                if len(streams) < 3:
                    await stream.read()
            code: grpc.StatusCode = await streams[2].code()
            for stream in streams[:2]:
                stream.cancel()
            return code

    assert asyncio.run(open_three()) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_all_watchers_are_told_the_same_table_which_is_built_once(scene: Scene) -> None:
    built = controller_service.ControllerService(scene.core)
    first = built.view()
    assert built.view() is first
    scene.controller.call(lambda core: core.pools.add(WorkerName("decode-1"), Role.DECODE))
    assert [w.record.name for w in built.view().workers] == ["decode-0", "decode-1"]
