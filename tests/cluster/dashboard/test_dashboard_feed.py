"""The feed: how often what comes, who gets which frame, and that nothing of it can hurt the controller."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cluster.dashboard.made_workers import worker
from twinpool.cluster.controller.dashboard_feed import FRAME_S, MAX_WATCHERS, DashboardFeed, TooManyWatch
from twinpool.cluster.dashboard.cluster_frames import SAMPLE_S, ClusterFrames, ClusterState
from twinpool.cluster.dashboard.frame_rows import WorkerSample
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.messages.router_report import RouterReport


class Scene:
    """A feed whose clock and cluster are the test's."""

    def __init__(self, workers: int = 1) -> None:
        self.clock, self.asked, self.broken = ManualClock(100.0), 0, False
        self.views = [worker(f"decode-{i}") for i in range(workers)]
        self.feed = DashboardFeed(ClusterFrames("c", "b", "b", 100.0), self._state, self.clock, lambda: 1e9)

    def _state(self) -> ClusterState:
        self.asked += 1
        if self.broken:
            raise RuntimeError("a bug of ours")
        return ClusterState([WorkerSample(view, self.clock.now()) for view in self.views])

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.feed.tick()


@pytest.mark.asyncio
async def test_the_state_is_asked_for_as_often_as_somebody_watches_and_else_for_the_history_alone() -> None:
    scene = Scene()
    scene.run(60.0)
    assert scene.asked == pytest.approx(60 / SAMPLE_S, abs=1)
    scene.clock.advance(600.0)
    asked = scene.asked
    scene.run(SAMPLE_S - 1.0)
    assert scene.asked - asked <= 2, "what was missed while nothing ran isn't made up for"
    assert (scene.feed.report_s, scene.feed.counters_s) == (SAMPLE_S, SAMPLE_S)
    frames = scene.feed.watch()
    first = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    asked = scene.asked
    scene.run(0.1)
    await asyncio.sleep(0)
    assert scene.asked - asked == 1, "who has just come is shown something at once"
    assert first.done()
    scene.run(29.9)
    assert scene.asked - asked == pytest.approx(30 / FRAME_S, abs=1)
    assert (scene.feed.report_s, scene.feed.counters_s) == (FRAME_S, FRAME_S)
    await first
    await frames.aclose()
    assert not scene.feed.watched
    assert scene.feed.report_s == SAMPLE_S


@pytest.mark.asyncio
async def test_a_large_cluster_is_told_of_more_seldom() -> None:
    scene = Scene(workers=300)
    waiting = asyncio.ensure_future(anext(scene.feed.watch()))
    await asyncio.sleep(0)
    scene.run(1.0)
    assert scene.feed.frame_s == pytest.approx(300 / 128)
    assert scene.feed.counters_s == SAMPLE_S
    await waiting


@pytest.mark.asyncio
async def test_all_who_watch_get_one_frame_and_one_that_does_not_read_gets_the_latest_alone() -> None:
    scene = Scene()
    quick, slow = scene.feed.watch(), scene.feed.watch()
    waiting = [asyncio.ensure_future(anext(one)) for one in (quick, slow)]
    await asyncio.sleep(0)
    scene.run(0.1)
    first, same = await asyncio.gather(*waiting)
    assert first is same, "built once"
    for _ in range(5):
        scene.run(FRAME_S)
        read = await anext(quick)
    assert await anext(slow) is read
    assert json.loads(read)["n"] - json.loads(first)["n"] == 5


@pytest.mark.asyncio
async def test_no_more_watch_than_may_and_who_leaves_makes_room() -> None:
    scene = Scene()
    watching = [scene.feed.watch() for _ in range(MAX_WATCHERS)]
    tasks = [asyncio.ensure_future(anext(one)) for one in watching]
    await asyncio.sleep(0)
    with pytest.raises(TooManyWatch):
        await anext(scene.feed.watch())
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    late = asyncio.ensure_future(anext(scene.feed.watch()))
    await asyncio.sleep(0)
    scene.run(0.1)
    await asyncio.gather(late, *tasks[1:])


@pytest.mark.asyncio
async def test_a_bug_in_a_frame_ends_no_tick_and_the_next_frame_comes(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    waiting = asyncio.ensure_future(anext(scene.feed.watch()))
    await asyncio.sleep(0)
    scene.broken = True
    scene.run(2.0)
    assert scene.feed.failed == 2
    assert "a frame of the dashboard failed" in caplog.text
    scene.broken = False
    scene.run(1.0)
    assert await waiting


@pytest.mark.asyncio
async def test_the_past_is_built_once_for_those_who_ask_at_about_the_same_time() -> None:
    scene = Scene()
    scene.run(20.0)
    assert scene.feed.past() is scene.feed.past()
    before = scene.feed.past()
    scene.run(SAMPLE_S)
    assert scene.feed.past() is not before
    assert len(json.loads(scene.feed.past())["history"]["at"]) == 5


@pytest.mark.asyncio
async def test_a_report_is_answered_with_when_the_next_one_is_due() -> None:
    scene = Scene()
    report = RouterReport("r", "node", 1, "b", "demo", 0, 0)
    assert scene.feed.report(report) == SAMPLE_S
