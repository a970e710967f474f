"""The stream between router and worker: cut, and silent. Both ends notice within the configured time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.cluster.fake_worker import FakeWorker, submit
from tests.support.fault_proxy import Proxy, Relay, proxying
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.worker_process import serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord
from twinpool.contracts.wire.grpc_calls import channel_options
from twinpool.router.links.worker_links import GrpcWorkerClient, WorkerStream

LINK_S = 5.0
WAIT_S = 60.0


class Scene:
    """A worker that never ends its requests, and a router's port to it through a proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self.worker = FakeWorker()
        self.worker.hold = True
        self.host = WorkerThread(self.worker, idle_s=0.02)
        self.host.start()
        self.loop = AsyncioThread("service")
        self.server = serve_worker(self.loop, self.host, 1, "127.0.0.1", link_timeout_s=LINK_S)
        self.proxy = proxy
        self.relay: Relay = proxy.relay("serve", "decode-0", self.server.stream)
        self.closed: list[StreamEnd] = []

    def record(self) -> WorkerRecord:
        name, limits = WorkerName("decode-0"), WorkerLimits(1, 1)
        return WorkerRecord(
            name, Role.DECODE, Incarnation(1), 1, "n", self.server.endpoint, "", limits, stream=self.relay.endpoint,
            stream_protocol=STREAM_PROTOCOL,
        )  # fmt: skip

    async def open(self) -> tuple[GrpcWorkerClient, WorkerStream]:
        port = GrpcWorkerClient(self.record(), LINK_S)
        heard: list[Event] = []

        def hear(events: Sequence[Event]) -> None:
            heard.extend(events)

        session = await port.connect(hear, self.closed.append)
        session.send([submit("a", 1000)])
        await until(lambda: bool(self.worker.running))
        return port, session

    def close(self) -> None:
        self.proxy.mend(self.relay)
        assert self.host.stop(WAIT_S)
        self.server.stop(0.1)
        self.loop.stop()


async def until(true: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("nobody noticed") from None


@pytest.fixture
def scene() -> Iterator[Scene]:
    with proxying() as proxy:
        scene = Scene(proxy)
        yield scene
        scene.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "silent"])
def test_c5_both_ends_of_a_dead_link_notice_and_the_workers_requests_end(scene: Scene, how: str) -> None:
    async def run() -> None:
        port, _ = await scene.open()
        if how == "cut":
            scene.proxy.cut(scene.relay)
        else:
            scene.proxy.silence(scene.relay)
        await until(lambda: scene.closed)
        await until(lambda: scene.worker.dropped)
        assert not scene.worker.running
        assert len(scene.closed) == 1
        scene.proxy.mend(scene.relay)
        again, session = await scene.open()
        session.close()
        await asyncio.gather(port.aclose(), again.aclose())

    asyncio.run(run())


@pytest.mark.slow
def test_an_idle_link_that_lives_is_kept(scene: Scene) -> None:
    async def run() -> None:
        port, session = await scene.open()
        passed = scene.relay.passed
        # Nothing is said for longer than is allowed; pings keep it. Time itself is what is waited for here.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.3 * LINK_S):
                await asyncio.Event().wait()
        assert scene.closed == []
        assert scene.worker.running
        assert scene.relay.passed > passed
        session.close()
        await port.aclose()

    asyncio.run(run())


def test_grpcs_ping_takes_half_of_the_time_and_its_answer_the_other() -> None:
    options = dict(channel_options(8.0))
    assert options["grpc.keepalive_time_ms"] == options["grpc.keepalive_timeout_ms"] == 4000
