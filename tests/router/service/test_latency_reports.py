"""What a router tells the autoscaler, over the wire too, and what it shows of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from tests.router.http_server import eventually
from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.pool_changes import AddWorkers, ChangedWorkers, CordonNode, ScalePools
from twinpool.contracts.messages.router_report import AutoscalerView, LatencyCounts, PoolSizing, SizingDecision
from twinpool.router.core.router_actions import RouterCounts
from twinpool.router.core.router_core import RouterCore
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.controller_port import REPORT_S
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.service.controller_calls import LatencyReports

CONFIG = Config(autoscaling=AutoscalingConfig(enabled=True, ttft_target_s=2.0, itl_target_s=0.5))
VIEW = AutoscalerView(
    (PoolSizing(Role.DECODE, 1, 2, 3, 4, 1.5, "why"),), (SizingDecision(2.5, "grown"),), 7.5, {"grown": 3}
)


class Listener:
    """A controller that may be away. Implements `router.links.controller_port.LatencyListener`."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, LatencyCounts]] = []
        self.away = False

    async def report_latency(self, router: str, counts: LatencyCounts) -> AutoscalerView:
        self.heard.append((router, counts))
        if self.away:
            raise ConnectionError("it is away")
        return VIEW


class Scene:
    def __init__(self) -> None:
        self.clock, self.listener, self.counts = ManualClock(50.0), Listener(), RouterCounts()
        core = RouterCore(CONFIG.router, self.clock, lambda: "room")
        self.metrics = PrometheusMetrics(core, "shm")
        self.reports = LatencyReports(
            self.metrics, self.counts, self.listener, "router-1", self.clock, CONFIG.autoscaling
        )


def test_late_is_what_came_after_its_target_and_what_never_came() -> None:
    scene = Scene()
    target = scene.metrics.tally.target
    for seconds in (1.9, 2.0, 2.1):
        target.first_token(seconds)
    begun = cast(ChoiceOutput, SimpleNamespace(first_at=10.0, last_at=10.0, request=SimpleNamespace(priority=0)))
    for now in (10.5, 11.125):  # 0.5 s after the token before, which is in time, and 0.625 s
        scene.metrics.tally.tokens(begun, 1, now)
    scene.counts.submitted, scene.counts.refused_early, scene.counts.shed, scene.metrics.refused_full = 10, 4, 2, 1
    assert scene.reports.counts() == LatencyCounts(15, 3 + 7, 1 + 7, 2, 1)


@pytest.mark.asyncio
async def test_a_report_goes_out_every_second_and_one_at_a_time() -> None:
    scene = Scene()
    for _ in range(3):
        scene.reports.calls.tick()
    await eventually(lambda: scene.reports.view == VIEW)
    assert [name for name, _ in scene.listener.heard] == ["router-1"]
    await asyncio.sleep(0)
    scene.listener.away = True
    scene.clock.advance(REPORT_S)
    scene.reports.calls.tick()
    await eventually(lambda: len(scene.listener.heard) == 2)
    assert scene.reports.view == VIEW, "a controller that is away leaves what it told last"


def test_metrics_say_what_the_autoscaler_does() -> None:
    scene = Scene()
    scene.reports.view = VIEW
    scene.metrics.sources.append(scene.reports.families)
    text = asyncio.run(scene.metrics.scrapes.answer(""))[0].decode()
    assert 'twinpool_autoscaler_changes_total{kind="grown"} 3.0' in text
    assert 'twinpool_autoscaler_workers{role="decode"} 2.0' in text
    assert 'twinpool_autoscaler_need{role="decode"} 1.5' in text
    assert "twinpool_autoscaler_held_seconds 7.5" in text


# ---------------------------------------------------------------- over the wire, to a controller


class Site:
    def __init__(self) -> None:
        self.clock = ManualClock(10.0)
        self.core = Controller(self.clock, CONFIG.cluster, MemoryLedger())
        self.autoscaler = Autoscaler(self.core, self.clock, CONFIG)
        self.server = ControllerServer(self.core, autoscaler=self.autoscaler)
        self.directory = ControllerDirectory(self.server.endpoint)

    async def watched(self) -> None:
        self.directory.watch(lambda views: None)
        await eventually(self.directory.reachable)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.close()


@pytest.mark.asyncio
async def test_a_report_is_answered_with_what_the_autoscaler_does(site: Site) -> None:
    with pytest.raises(ConnectionError, match="away"):
        await site.directory.report_latency("router-1", LatencyCounts())
    await site.watched()
    view = await site.directory.report_latency("router-1", LatencyCounts(requests=3))
    assert [(pool.role, pool.least, pool.most) for pool in view.pools] == [(Role.PREFILL, 1, 4), (Role.DECODE, 1, 4)]
    with pytest.raises(ConnectionError, match="INVALID_ARGUMENT"):
        await site.directory.report_latency("", LatencyCounts())


@pytest.mark.asyncio
async def test_what_an_operator_orders_holds_the_autoscaler_and_a_cordon_does_not(site: Site) -> None:
    def held() -> float:
        return site.server.call(lambda _: site.autoscaler.view().held_s)

    site.server.call(lambda core: core.pools.add_some(Role.PREFILL, 1))
    site.server.call(lambda core: core.set_nodes([NodePlace("a" * 12, "a"), NodePlace("b" * 12, "b")]))
    await site.directory.change_pools(CordonNode("a"))
    assert held() == 0
    await site.directory.change_pools(AddWorkers(Role.DECODE, 1))
    assert held() == CONFIG.autoscaling.hold_s
    site.clock.advance(CONFIG.autoscaling.hold_s)
    assert held() == 0
    await site.directory.change_pools(ScalePools({Role.DECODE: 2}))
    assert held() == CONFIG.autoscaling.hold_s


@pytest.mark.asyncio
async def test_the_controller_says_who_starts_and_who_leaves_of_those_that_a_change_concerns(site: Site) -> None:
    """Over the wire: one more of decode, one fewer of prefill, which doesn't run yet."""
    site.server.call(lambda core: core.pools.add_some(Role.PREFILL, 2))
    site.server.call(lambda core: core.pools.add_some(Role.DECODE, 1))
    changed = await site.directory.change_pools(ScalePools({Role.DECODE: 2, Role.PREFILL: 1}))
    assert changed == ChangedWorkers(
        (WorkerName("decode-1"), WorkerName("prefill-1")),
        start=frozenset({WorkerName("decode-1")}),
        leave=frozenset({WorkerName("prefill-1")}),
    )
