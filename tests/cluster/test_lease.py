from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest

from cluster.controller import Controller, MemoryLedger, Start
from cluster.controller_service import ControllerServer, FileLedger
from cluster.lease import Lease, LeaseKeeper, LeaseRefused
from contracts.clock import ManualClock
from contracts.config import ClusterConfig
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import Fits
from contracts.ports import WorkerRecord
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from tests.cluster.fake_worker import FakeWorker

NAME = WorkerName("decode-0")
WAIT_S = 5.0


def test_a_lease_ends_at_the_worker_before_it_ends_at_the_controller() -> None:
    clock = ManualClock(100.0)
    lease = Lease(clock)
    assert not lease.held
    lease.granted(sent_at=100.0, lease_s=10.0)
    clock.advance(8.9)
    assert lease.held
    clock.advance(0.2)
    assert not lease.held


def test_a_late_answer_counts_from_when_its_question_was_sent() -> None:
    clock = ManualClock()
    lease = Lease(clock)
    clock.advance(8.0)
    lease.granted(sent_at=0.0, lease_s=10.0)
    clock.advance(1.5)
    assert not lease.held


def test_an_answer_that_overtakes_does_not_shorten_the_lease() -> None:
    clock = ManualClock()
    lease = Lease(clock)
    lease.granted(sent_at=5.0, lease_s=10.0)
    lease.granted(sent_at=0.0, lease_s=10.0)
    clock.advance(12.0)
    assert lease.held


def test_a_fenced_lease_never_holds_again() -> None:
    lease = Lease(ManualClock())
    lease.granted(0.0, 10.0)
    lease.fence()
    lease.granted(5.0, 10.0)
    assert not lease.held


class Wired:
    """A controller behind real gRPC with a clock moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.brain = Controller(self.clock, ClusterConfig(lease_s=10.0), MemoryLedger())
        self.server = ControllerServer(self.brain)
        self.server.call(lambda brain: brain.add(NAME, Role.DECODE))
        assert [a for a in self.server.call(Controller.tick) if isinstance(a, Start)]

    def keeper(self, incarnation: int, on_lost: Callable[[str], None] = lambda reason: None) -> LeaseKeeper:
        fits = Fits(1024, 2048)
        record = WorkerRecord(NAME, Role.DECODE, Incarnation(incarnation), 7, "n", "127.0.0.1:1", "tcp://x", fits)
        worker = FakeWorker(incarnation=incarnation)
        return LeaseKeeper(record, self.server.endpoint, self.clock, 0.01, worker.status, on_lost)

    def state(self) -> str:
        return self.server.call(lambda brain: brain.views()[0].status.state)


@pytest.fixture
def wired() -> Iterator[Wired]:
    wired = Wired()
    yield wired
    wired.server.close()


def test_register_renew_and_leave_over_the_wire(wired: Wired) -> None:
    async def life() -> None:
        keeper = wired.keeper(1)
        await keeper.start(WAIT_S)
        assert keeper.lease.held
        while wired.server.call(lambda brain: brain.views()[0].status.pages_total) == 0:
            await asyncio.sleep(0)
        await keeper.leave()

    asyncio.run(asyncio.wait_for(life(), WAIT_S))
    assert wired.state() == "left"


def test_an_unwanted_incarnation_is_refused(wired: Wired) -> None:
    with pytest.raises(LeaseRefused, match="incarnation 2 is no longer wanted"):
        asyncio.run(wired.keeper(2).start(WAIT_S))


def test_a_worker_is_told_when_its_lease_is_ended(wired: Wired) -> None:
    async def life() -> tuple[str, bool]:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        keeper = wired.keeper(1, lost.set_result)
        await keeper.start(WAIT_S)
        wired.server.call(lambda brain: brain.died(NAME, Incarnation(1), "operator"))
        reason = await asyncio.wait_for(lost, WAIT_S)
        held = keeper.lease.held
        await keeper.close()
        return reason, held

    assert asyncio.run(life()) == ("the controller has ended the lease", False)


def test_a_controller_that_is_gone_ends_the_lease_in_time(wired: Wired) -> None:
    async def life() -> str:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        keeper = wired.keeper(1, lost.set_result)
        await keeper.start(WAIT_S)
        await asyncio.to_thread(wired.server.close)
        assert keeper.lease.held
        wired.clock.advance(9.5)
        assert not keeper.lease.held
        reason = await asyncio.wait_for(lost, WAIT_S)
        await keeper.close()
        return reason

    assert "could not be reached" in asyncio.run(life())


def test_a_watcher_gets_the_table_now_and_at_each_change(wired: Wired) -> None:
    async def watch() -> list[str]:
        states = []
        async with grpc.aio.insecure_channel(wired.server.endpoint) as channel:
            call = pb_grpc.ControllerStub(channel).Watch(pb.Empty())
            keeper = wired.keeper(1)
            states.append((await asyncio.wait_for(call.read(), WAIT_S)).workers[0].status.state)
            await keeper.start(WAIT_S)
            states.append((await asyncio.wait_for(call.read(), WAIT_S)).workers[0].status.state)
            await keeper.leave()
            while states[-1] != "left":
                states.append((await asyncio.wait_for(call.read(), WAIT_S)).workers[0].status.state)
            call.cancel()
        return states

    states = asyncio.run(watch())
    assert states[:2] == ["starting", "ready"]


def test_the_ledger_survives_its_process_and_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "incarnations.json"
    FileLedger(path).record("decode-0", 4)
    brain = Controller(ManualClock(), ClusterConfig(), FileLedger(path))
    brain.add(NAME, Role.DECODE)
    assert [a.incarnation for a in brain.tick() if isinstance(a, Start)] == [5]
    assert FileLedger(path).load() == {"decode-0": 5}
