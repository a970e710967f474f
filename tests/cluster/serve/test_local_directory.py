from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from tests.cluster.fake_worker import FakeWorker, submit
from twinpool.cluster.serve.serve_one_process import LocalDirectory
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.pool_changes import UndrainWorkers
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Done, Event
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView
from twinpool.router.links.controller_port import WorkerClient, WorkerDirectory

WAIT_S = 60.0


class Local:
    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.host = WorkerThread(self.worker, idle_s=0.02, on_end=lambda end, reason: self.local_directory.changed())
        self.record = WorkerRecord(
            WorkerName("decode-0"), Role.DECODE, Incarnation(1), 0, "node", "", "", self.worker.fits
        )
        self.local_directory = LocalDirectory([(self.record, self.host)], refresh_s=0.01)
        self.directory: WorkerDirectory = self.local_directory
        self.port: WorkerClient = self.directory.port(self.record)
        self.host.start()

    def run(self, talk: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(talk(), WAIT_S)

        asyncio.run(bounded())


@pytest.fixture
def local() -> Iterator[Local]:
    local = Local()
    yield local
    assert local.host.stop(WAIT_S)


def _no(reason: object) -> None:
    raise AssertionError(reason)


def test_a_request_goes_through_a_local_port_on_the_loop(local: Local) -> None:
    async def talk() -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        events: list[Event] = []

        def on_events(batch: Sequence[Event]) -> None:
            assert asyncio.get_running_loop() is done.get_loop()
            events.extend(batch)
            if isinstance(events[-1], Done):
                done.set_result(None)

        session = await local.port.connect(on_events, _no)
        session.send([submit("a", 3)])
        await done
        assert len(events) == 4
        session.close()
        session.send([submit("b")])
        assert (await local.port.status()).running == 0
        assert local.worker.dropped
        await local.port.aclose()

    local.run(talk)


def test_a_worker_that_dies_closes_its_sessions_and_shows_as_dead(local: Local) -> None:
    async def talk() -> None:
        closed: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_change(views: tuple[WorkerView, ...]) -> None:
            if views[0].status.state == "dead":
                dead.set_result(None)

        stop = local.directory.watch(on_change)
        await local.port.connect(_no, closed.set_result)
        local.worker.fail = RuntimeError("broken")
        assert await closed == StreamEnd("RuntimeError: broken")
        await dead
        stop()
        for call in (local.port.connect(_no, _no), local.port.check()):
            with pytest.raises(ConnectionError, match="broken"):
                await call

    local.run(talk)


def test_a_drained_worker_shows_as_draining_and_then_as_left(local: Local) -> None:
    local.worker.hold = True

    async def talk() -> None:
        seen: list[str] = []
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_change(views: tuple[WorkerView, ...]) -> None:
            seen.append(views[0].status.state)
            if seen[-1] == "left":
                left.set_result(None)

        stop = local.directory.watch(on_change)
        session = await local.port.connect(lambda events: None, lambda reason: None)
        session.send([submit("a")])
        assert (await local.port.drain()).state == "draining"
        while seen[-1] != "draining":
            await asyncio.sleep(0)
        local.worker.hold = False
        local.worker.wake()
        await left
        stop()
        assert seen[0] == "ready"

    local.run(talk)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_of_which_any_worker_has_left_is_not_undrained_as_if_all_were_there(gone: int) -> None:
    names = [WorkerName(f"decode-{number}") for number in range(2)]
    hosts = [WorkerThread(FakeWorker(name), idle_s=0.02) for name in names]
    records = [WorkerRecord(name, Role.DECODE, Incarnation(1), 0, "node", "", "", FakeWorker.fits) for name in names]
    directory = LocalDirectory(list(zip(records, hosts, strict=True)))
    for host in hosts:
        host.start()

    async def talk() -> None:
        assert (await directory.change_pools(UndrainWorkers("node"))).names == ()
        assert hosts[gone].stop(WAIT_S)
        with pytest.raises(RequestError, match=f"^{names[gone]} has left"):
            await directory.change_pools(UndrainWorkers("node"))
        assert (await directory.change_pools(UndrainWorkers(names[1 - gone]))).names == ()

    asyncio.run(talk())
    assert hosts[1 - gone].stop(WAIT_S)
