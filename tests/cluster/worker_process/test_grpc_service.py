"""A worker's gRPC service: who may call it, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.cluster.fake_worker import FakeWorker, submit
from tests.support.raw_frames import RawStream
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.worker_process import WorkerServer, serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.cluster_secret import access_metadata
from twinpool.contracts.messages.calls import CHECK_WORKER, DRAIN_WORKER, UNDRAIN_WORKER, WORKER_STATUS, Empty
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed

WAIT_S = 60.0
METADATA = (("twinpool-incarnation", "3"),)


class Served:
    """A fake worker of incarnation 3 behind real ports."""

    def __init__(self, secret: str = "") -> None:
        self.worker = FakeWorker(incarnation=3)
        self.host = WorkerThread(self.worker, idle_s=0.02)
        self.host.start()
        self.loop = AsyncioThread("test-service")
        self.server: WorkerServer = serve_worker(self.loop, self.host, 3, "127.0.0.1", secret)

    def close(self) -> None:
        assert self.host.stop(WAIT_S)
        self.server.stop(0.1)
        self.loop.stop()


@contextmanager
def serving(secret: str = "") -> Iterator[Served]:
    served = Served(secret)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def test_a_call_for_another_incarnation_is_refused_with_both_numbers(served: Served) -> None:
    async def talk() -> str:
        async with CallChannel(served.server.endpoint, metadata=(("twinpool-incarnation", "2"),)) as channel:
            with pytest.raises(CallFailed) as caught:
                await channel.call(DRAIN_WORKER, Empty(), WAIT_S)
            assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
            return caught.value.reason

    detail = asyncio.run(talk())
    assert "incarnation 3" in detail
    assert "incarnation 2" in detail
    assert not served.worker.draining


def test_status_check_drain_and_undrain_answer_over_the_wire(served: Served) -> None:
    served.worker.hold = True

    async def talk() -> None:
        stream = await RawStream.open(served.server.stream, 3)
        stream.send(submit("a"))
        async with CallChannel(served.server.endpoint, metadata=METADATA) as channel:
            while (await channel.call(WORKER_STATUS, Empty(), WAIT_S)).running != 1:
                await asyncio.sleep(0)
            assert (await channel.call(CHECK_WORKER, Empty(), WAIT_S)).leases == 1
            assert (await channel.call(DRAIN_WORKER, Empty(), WAIT_S)).state == "draining"
            assert (await channel.call(UNDRAIN_WORKER, Empty(), WAIT_S)).state == "ready"
            assert served.host.undrains == 1
        stream.abort()

    asyncio.run(asyncio.wait_for(talk(), WAIT_S))


def test_d9_where_there_is_a_secret_only_calls_with_its_token_come_in() -> None:
    secret = "5e" * 32

    async def call(served: Served, metadata: tuple[tuple[str, str], ...]) -> WorkerStatus:
        async with CallChannel(served.server.endpoint, metadata=metadata) as channel:
            return await channel.call(DRAIN_WORKER, Empty(), WAIT_S)

    with serving(secret) as served:
        ((key, token),) = access_metadata(secret)
        guesses = ("", " ", "guess", token[:-1], token + "0", token.upper(), secret)
        for strangers in ((), *(((key, guess),) for guess in guesses), access_metadata("00" * 32)):
            with pytest.raises(CallFailed, match="UNAUTHENTICATED"):
                asyncio.run(call(served, strangers))
        assert not served.worker.draining
        assert asyncio.run(call(served, access_metadata(secret))).state == "draining"
        assert secret not in access_metadata(secret)[0][1]
