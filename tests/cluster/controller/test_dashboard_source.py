"""The controller's dashboard over real gRPC: what is in its frames, at whose pace it comes, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
import pytest
from msgspec.structs import replace

from tests.cluster.fake_worker import FakeWorker
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.dashboard.cluster_frames import SAMPLE_S
from twinpool.cluster.worker_process import lease_keeper
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper
from twinpool.contracts.clock import ManualClock, SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import REPORT_ROUTER
from twinpool.contracts.messages.pool_changes import AddWorkers, DrainWorkers
from twinpool.contracts.messages.router_report import (
    BUCKETS,
    COUNTERS,
    MAX_BREAKERS,
    RouterIdentity,
    RouterReport,
    bare,
    checked,
)
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed
from twinpool.router.links.controller_directory import ControllerDirectory

REPORT = RouterReport(
    "start-1", "node", 7, "build", "demo", 3, 1, {name: i for i, name in enumerate(COUNTERS)},
    tuple(range(BUCKETS)), tuple(range(BUCKETS)), ("decode-0",), 2,
    RouterIdentity("router-0", "10.0.0.1:8000", "a-digest", True), tuple(range(5, 5 + BUCKETS)), 12.5, 7.5, 0.75,
)  # fmt: skip
WAIT_S = 60.0


class Site:
    """A controller with one worker's start ordered, ticked as its process would, and a router's directory of it."""

    def __init__(self) -> None:
        self.core = Controller(SystemClock(), ClusterConfig(name="north"), MemoryLedger())
        self.server = ControllerServer(self.core)
        self.server.call(lambda core: core.pools.add(WorkerName("decode-0"), Role.DECODE))
        self.server.call(Controller.tick)
        self.directory = ControllerDirectory(self.server.endpoint)

    @contextlib.asynccontextmanager
    async def linked(self) -> AsyncIterator[ControllerDirectory]:
        """The directory once it watches, with the controller ticked meanwhile."""
        unwatch = self.directory.watch(lambda views: None)
        ticking = asyncio.create_task(self._tick())
        try:
            async with asyncio.timeout(WAIT_S):
                while not self.directory.reachable():
                    await asyncio.sleep(0.01)
            yield self.directory
        finally:
            ticking.cancel()
            unwatch()

    async def _tick(self) -> None:
        while True:
            await asyncio.to_thread(self.server.tick)
            await asyncio.sleep(0.02)


async def frame_where(frames: AsyncIterator[bytes], true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        async for one in frames:
            frame: dict[str, Any] = json.loads(one)
            if true(frame):
                return frame
    raise AssertionError("the frames ended")


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.server.close()


def keeper(site: Site, worker: FakeWorker) -> LeaseKeeper:
    record = WorkerRecord(
        WorkerName("decode-0"), Role.DECODE, Incarnation(1), 7, "n", "127.0.0.1:1", "tcp://x", WorkerLimits(64, 64)
    )
    return LeaseKeeper(
        record, site.server.endpoint, SystemClock(), 0.02, worker.status, LeaseHandlers(lambda reason: None)
    )


@pytest.mark.asyncio
async def test_a_frame_has_what_workers_routers_and_operators_have_told(site: Site) -> None:
    async with site.linked() as directory:
        held = keeper(site, FakeWorker(incarnation=1))
        await held.start(WAIT_S)
        site.server.tell("127.0.0.1:7", 4, ("127.0.0.1:8",))
        assert await directory.dashboard.report(REPORT) == SAMPLE_S
        frames = directory.dashboard.frames()
        frame = await frame_where(frames, lambda one: one["workers"][0]["state"] == "ready")
        assert frame["cluster"] == "north"
        assert frame["control"]["leader"] == "127.0.0.1:7"
        assert (frame["control"]["term"], frame["control"]["standbys"]) == (4, ["127.0.0.1:8"])
        assert frame["totals"] == REPORT.counters
        assert frame["routers"][0]["open_breakers"] == ["decode-0"]
        assert await directory.dashboard.report(REPORT) == 1.0, "sooner, while somebody watches"
        await directory.change_pools(DrainWorkers("decode-0"))
        await directory.change_pools(AddWorkers(Role.DECODE, 1))
        frame = await frame_where(frames, lambda one: len(one["workers"]) == 2)
        texts = [event["text"] for event in frame["events"]]
        assert "an operator drains decode-0" in texts
        assert any(text.startswith("an operator has added decode-1") for text in texts)
        past = json.loads(await directory.dashboard.past())
        assert past["boot"] == frame["boot"]
        assert past["events"]
        await held.close()


@pytest.mark.asyncio
async def test_workers_say_their_counters_each_second_while_somebody_watches(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[float] = []
    pace = LeaseKeeper._pace_counters

    def noted(self: LeaseKeeper, seconds: float) -> None:
        paces.append(seconds)
        pace(self, seconds)

    monkeypatch.setattr(LeaseKeeper, "_pace_counters", noted)
    async with site.linked() as directory:
        held = keeper(site, FakeWorker(incarnation=1))
        await held.start(WAIT_S)

        async def paced(seconds: float) -> None:
            async with asyncio.timeout(WAIT_S):
                while not paces or paces[-1] != seconds:
                    await asyncio.sleep(0.01)

        await paced(SAMPLE_S)
        frames = directory.dashboard.frames()
        await anext(frames)
        await paced(1.0)
        await frames.aclose()  # type: ignore[attr-defined]
        await paced(SAMPLE_S)
        await held.close()


def test_a_worker_hurries_its_counters_when_they_are_to_come_sooner() -> None:
    clock = ManualClock(100.0)
    record = WorkerRecord(WorkerName("w"), Role.DECODE, Incarnation(1), 7, "n", "", "", WorkerLimits(64, 64))
    held = LeaseKeeper(
        record, "127.0.0.1:1", clock, 0.5, FakeWorker(incarnation=1).status, LeaseHandlers(lambda reason: None)
    )

    def said(seconds: float) -> list[float]:
        """When counters are said in so many seconds, with a heartbeat each half."""
        found = []
        for _ in range(round(seconds / 0.5)):
            if not held._renewal().status.counters_left_out:
                found.append(clock.now())
            clock.advance(0.5)
        return found

    assert said(12.0) == [100.0, 105.0, 110.0]
    held._pace_counters(1.0)
    assert said(3.0) == [113.0, 114.0]
    held._pace_counters(lease_keeper.COUNTERS_S)
    assert len(said(10.0)) <= 3


@pytest.mark.asyncio
async def test_the_stream_ends_with_its_controller_and_says_so(site: Site) -> None:
    async with site.linked() as directory:
        frames = directory.dashboard.frames()
        await anext(frames)
        await asyncio.to_thread(site.server.close)
        with pytest.raises(ConnectionError):
            await frame_where(frames, lambda one: False)
        with pytest.raises(ConnectionError):
            await directory.dashboard.past()
        with pytest.raises(ConnectionError):
            await directory.dashboard.report(REPORT)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wrong",
    [
        {"router": ""},
        {"router": "x" * 300},
        {"identity": RouterIdentity(address="x" * 300)},
        {"gaps": (1, 2, 3)},
        {"output_tokens": (1, 2, 3)},
        {"cpu_s": float("nan")},
        {"cpu_s": float("inf")},
        {"cpu_s": -1.0},
        {"ttft_slo_s": float("nan")},
        {"open_breakers": ("b",) * (MAX_BREAKERS + 1)},
    ],
)
async def test_a_report_that_makes_no_sense_is_refused(site: Site, wrong: dict[str, Any]) -> None:
    async with CallChannel(site.server.endpoint) as channel:
        with pytest.raises(CallFailed) as refused:
            await channel.call(REPORT_ROUTER, replace(REPORT, **wrong), WAIT_S)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_counters_that_nobody_knows_are_left_out_of_a_report() -> None:
    assert checked(replace(REPORT, counters=REPORT.counters | {"invented": 3})) == REPORT


@pytest.mark.asyncio
async def test_routers_are_told_of_each_other_without_their_counts(site: Site) -> None:
    async with site.linked() as directory:
        other = replace(REPORT, router="start-2", identity=RouterIdentity("by-hand", "10.0.0.2:8000"))
        assert await directory.dashboard.routers() == []
        for report in (REPORT, other):
            await directory.dashboard.report(report)
        assert await directory.dashboard.routers() == [replace(bare(one), tokens_per_s=0.0) for one in (REPORT, other)]
        await asyncio.to_thread(site.server.close)
        with pytest.raises(ConnectionError):
            await directory.dashboard.routers()
