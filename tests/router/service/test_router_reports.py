"""What a router tells the dashboard of itself: what is in it, how often it comes, and who may be away."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import eventually, serving
from tests.router.service.fake_dashboard import FakeDashboard
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.messages.router_report import COUNTERS, UNNAMED, RouterReport
from twinpool.router.core.router_core import RouterCore
from twinpool.router.links.controller_port import REPORT_S
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.service.controller_calls import MAX_PAUSE_S, MIN_PAUSE_S, RouterReports


class Source(FakeDashboard):
    """A controller that may be away, and asks for reports as often as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_s, self.away = 1.0, False
        self.answers = asyncio.Event()
        self.answers.set()

    async def report(self, report: RouterReport) -> float:
        self.reports.append(report)
        await self.answers.wait()
        if self.away:
            raise ConnectionError("it is away")
        return self.pause_s


class Scene:
    def __init__(self) -> None:
        self.clock, self.source = ManualClock(50.0), Source()
        core = RouterCore(Config().router, self.clock, lambda: "room")
        self.metrics = PrometheusMetrics(core, "shm")
        self.reports = RouterReports(self.source, self.metrics, core, None, "start-1", "demo", UNNAMED, self.clock)

    async def tick(self) -> bool:
        """Whether a tick made a report."""
        before = len(self.source.reports)
        self.reports.calls.tick()
        await eventually(lambda: not self.reports.calls.busy)
        return len(self.source.reports) > before


@pytest.mark.asyncio
async def test_reports_come_as_often_as_they_are_asked_for_within_bounds() -> None:
    scene = Scene()
    for asked, waited in ((1.0, 1.0), (5.0, 5.0), (0.0, MIN_PAUSE_S), (1e9, MAX_PAUSE_S)):
        scene.source.pause_s = asked
        assert await scene.tick()
        scene.clock.advance(waited - 0.01)
        assert not await scene.tick()
        scene.clock.advance(0.02)
    assert await scene.tick()


@pytest.mark.asyncio
async def test_a_controller_that_is_away_is_tried_again_and_a_viewer_hurries_the_next_report() -> None:
    scene = Scene()
    scene.source.away = True
    assert await scene.tick()
    assert not await scene.tick()
    scene.clock.advance(REPORT_S)
    scene.source.away, scene.source.pause_s = False, 5.0
    assert await scene.tick()
    assert not await scene.tick()
    scene.reports.seen_by(2)
    assert await scene.tick()
    assert scene.source.reports[-1].viewers == 2
    scene.reports.calls.close()


@pytest.mark.asyncio
async def test_a_viewer_that_comes_while_a_report_is_under_way_is_told_with_the_next_tick() -> None:
    scene = Scene()
    scene.source.pause_s = 5.0
    scene.source.answers.clear()
    scene.reports.calls.tick()
    await eventually(lambda: bool(scene.source.reports))
    scene.reports.seen_by(1)
    scene.source.answers.set()
    await eventually(lambda: not scene.reports.calls.busy)
    assert await scene.tick()
    assert [report.viewers for report in scene.source.reports] == [0, 1]
    assert not await scene.tick(), "from then on as often as it is asked for"


def test_a_report_has_what_the_metrics_have() -> None:
    dashboard = FakeDashboard()
    with serving(FakeCluster(), dashboard=dashboard) as server:
        for _ in range(3):
            server.complete(max_tokens=5)
        lines = [line.rpartition(" ") for line in server.client.get("/metrics").text.splitlines() if line[:1] != "#"]
        metrics = {name: float(value) for name, _, value in lines}
        assert server.service.controller.reports is not None
        report = server.call(server.service.controller.reports.report)
        server.wait_until(lambda: bool(dashboard.reports))
    assert set(report.counters) == set(COUNTERS)
    for name in ("requests_submitted", "requests_ended", "generated_tokens", "replays", "fallbacks", "requests_shed"):
        assert report.counters[name] == metrics[f"twinpool_{name}_total"], name
    assert sum(report.first_tokens) == metrics["twinpool_time_to_first_token_seconds_count"] == 3
    assert sum(report.gaps) == metrics["twinpool_inter_token_latency_seconds_count"]
    assert sum(report.output_tokens) == metrics["twinpool_time_per_output_token_seconds_count"] == 3
    assert report.cpu_s > 0
    assert (report.model, report.in_flight, report.open_breakers) == ("demo", 0, ())
