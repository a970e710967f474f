from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import grpc
import grpc.aio
import pytest

from cluster.worker_process.asyncio_thread import AsyncioThread
from cluster.worker_process.grpc_service import ServiceServer, WorkerService, serve_worker
from cluster.worker_process.worker_thread import WorkerThread
from contracts.cluster_secret import access_metadata
from contracts.messages.worker_events import Event, Tokens
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire.command_protobuf import command_to_proto
from contracts.wire.event_protobuf import event_from_proto
from tests.cluster.fake_worker import FakeWorker, submit

WAIT_S = 20.0
METADATA = (("twinpool-incarnation", "3"),)


class Served:
    """A fake worker of incarnation 3 behind a real gRPC port."""

    def __init__(self, outbox_bytes: int | None = None) -> None:
        self.worker = FakeWorker(incarnation=3)
        self.host = WorkerThread(self.worker, idle_s=0.02)
        self.host.start()
        self.loop = AsyncioThread("test-service")
        if outbox_bytes is None:
            self.server, self.endpoint = serve_worker(self.loop, self.host, 3, "127.0.0.1")
        else:
            self.server = ServiceServer(self.loop, "127.0.0.1:0")
            service = WorkerService(self.host, 3, outbox_bytes)
            self.endpoint = f"127.0.0.1:{self.server.start(pb_grpc.add_WorkerServicer_to_server, service)}"

    def close(self) -> None:
        assert self.host.stop(WAIT_S)
        self.server.stop(0.1)
        self.loop.stop()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


async def _commands(*frames: pb.RouterFrame, then: asyncio.Event | None = None) -> AsyncIterator[pb.RouterFrame]:
    for frame in frames:
        yield frame
    if then is not None:
        await then.wait()


def _frame(*ids: str, max_tokens: int = 3) -> pb.RouterFrame:
    return pb.RouterFrame(commands=[command_to_proto(submit(i, max_tokens)) for i in ids])


def test_a_stream_carries_many_requests_and_one_frame_a_step(served: Served) -> None:
    async def talk() -> list[list[Event]]:
        async with grpc.aio.insecure_channel(served.endpoint) as channel:
            hold = asyncio.Event()
            call = pb_grpc.WorkerStub(channel).Serve(_commands(_frame("a", "b"), then=hold), metadata=METADATA)  # type: ignore[no-untyped-call]
            frames = []
            for _ in range(3):
                frame = await asyncio.wait_for(call.read(), WAIT_S)
                assert frame.incarnation == 3
                frames.append([event_from_proto(event) for event in frame.events])
            hold.set()
            return frames

    frames = asyncio.run(talk())
    assert [[e.request_id for e in frame if isinstance(e, Tokens)] for frame in frames] == [["a", "b"]] * 3


def test_a_call_for_another_incarnation_is_refused_with_both_numbers(served: Served) -> None:
    async def talk() -> list[str]:
        async with grpc.aio.insecure_channel(served.endpoint) as channel:
            stub = pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            wrong = (("twinpool-incarnation", "2"),)
            details = []
            for call in (stub.Serve(_commands(), metadata=wrong).read(), stub.Drain(pb.Empty(), metadata=wrong)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asyncio.wait_for(call, WAIT_S)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                details.append(str(caught.value.details()))
            return details

    for detail in asyncio.run(talk()):
        assert "incarnation 3" in detail
        assert "incarnation 2" in detail
    assert not served.worker.draining


def test_a_router_that_goes_away_has_its_session_dropped(served: Served) -> None:
    served.worker.hold = True

    async def talk() -> None:
        async with grpc.aio.insecure_channel(served.endpoint) as channel:
            call = pb_grpc.WorkerStub(channel).Serve(_commands(_frame("a"), then=asyncio.Event()), metadata=METADATA)  # type: ignore[no-untyped-call]
            await asyncio.wait_for(call.initial_metadata(), WAIT_S)
            while served.host.status().result(WAIT_S).running != 1:
                await asyncio.sleep(0)
            call.cancel()
            while served.host.status().result(WAIT_S).running != 0:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(talk(), WAIT_S))
    assert served.worker.dropped


def test_status_check_drain_and_undrain_answer_over_the_wire(served: Served) -> None:
    served.worker.hold = True

    async def talk() -> None:
        async with grpc.aio.insecure_channel(served.endpoint) as channel:
            stub = pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Serve(_commands(_frame("a"), then=asyncio.Event()), metadata=METADATA)
            await asyncio.wait_for(call.initial_metadata(), WAIT_S)
            while (await stub.Status(pb.Empty())).running != 1:
                await asyncio.sleep(0)
            assert (await stub.Check(pb.Empty())).leases == 1
            assert (await stub.Drain(pb.Empty(), metadata=METADATA)).state == "draining"
            assert (await stub.Undrain(pb.Empty())).state == "ready"
            assert served.host.undrains == 1
            call.cancel()

    asyncio.run(asyncio.wait_for(talk(), WAIT_S))


def test_a_worker_that_dies_ends_its_streams_with_the_cause(served: Served) -> None:
    async def talk() -> str:
        async with grpc.aio.insecure_channel(served.endpoint) as channel:
            call = pb_grpc.WorkerStub(channel).Serve(_commands(then=asyncio.Event()), metadata=METADATA)  # type: ignore[no-untyped-call]
            await asyncio.wait_for(call.initial_metadata(), WAIT_S)
            served.worker.fail = RuntimeError("bad device")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), WAIT_S)
            return str(caught.value.details())

    assert asyncio.run(talk()) == "RuntimeError: bad device"


def test_a_router_that_reads_too_slowly_is_cut_off() -> None:
    served = Served(outbox_bytes=200)
    try:

        async def talk() -> str:
            async with grpc.aio.insecure_channel(served.endpoint) as channel:
                call = pb_grpc.WorkerStub(channel).Serve(  # type: ignore[no-untyped-call]
                    _commands(_frame(*(f"request-{i}" for i in range(20))), then=asyncio.Event()), metadata=METADATA
                )
                try:
                    while True:
                        await asyncio.wait_for(call.read(), WAIT_S)
                except grpc.aio.AioRpcError as error:
                    return str(error.details())

        said = ""
        for _ in range(3):
            # gRPC hands events to the loops of a process in turn, and stops at one that an earlier test has closed:
            # what came behind is lost on it until something else happens.
            with suppress(TimeoutError):
                said = asyncio.run(talk())
                break
        assert "reads too slowly" in said
        assert served.host.call(lambda worker: None).result(WAIT_S) is None
        assert served.worker.dropped
    finally:
        served.close()


def test_d9_where_there_is_a_secret_only_calls_with_its_token_come_in() -> None:
    secret = "5e" * 32
    worker = FakeWorker(incarnation=3)
    host = WorkerThread(worker, idle_s=0.02)
    host.start()
    loop = AsyncioThread("test-service")
    server, endpoint = serve_worker(loop, host, 3, "127.0.0.1", secret)

    async def call(metadata: tuple[tuple[str, str], ...]) -> tuple[pb.WorkerStatus, pb.WorkerFrame]:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            stream = stub.Serve(_commands(_frame("a"), then=asyncio.Event()), metadata=metadata)
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await stub.Status(pb.Empty(), metadata=metadata), await asyncio.wait_for(stream.read(), WAIT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Drain(pb.Empty(), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError):
                await asyncio.wait_for(stream.read(), WAIT_S)
            return pb.WorkerStatus(), pb.WorkerFrame()

    try:
        for strangers in ((), (("twinpool-access", "guess"),), access_metadata("00" * 32)):
            assert asyncio.run(call(strangers)) == (pb.WorkerStatus(), pb.WorkerFrame())
        assert worker.steps == 0
        assert not worker.draining
        status, frame = asyncio.run(call(access_metadata(secret)))
        assert status.name == "decode-0"
        assert frame.events[0].request_id == "a"
        assert secret not in access_metadata(secret)[0][1]
    finally:
        host.stop(WAIT_S)
        server.stop(0.1)
        loop.stop()
