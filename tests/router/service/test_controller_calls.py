"""What a router asks and tells its controller beside its requests: each kind of call is made, and all end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import pytest

from tests.router.service.fake_dashboard import FakeDashboard
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import QuotaClaim, QuotaSlice
from twinpool.contracts.messages.router_report import AutoscalerView, LatencyCounts, RouterReport
from twinpool.router.core.router_core import RouterCore
from twinpool.router.links.controller_port import ControllerPorts, ReportCalls
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.security.tenant_accounts import TenantAccounts
from twinpool.router.service.controller_calls import ControllerCalls, NoViewer


class Hanging(FakeDashboard):
    """A controller that answers nothing; `under_way`: the calls that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: set[str] = set()

    async def _hang(self, call: str) -> NoReturn:
        self.under_way.add(call)
        try:
            while True:
                await asyncio.Event().wait()
        finally:
            self.under_way.discard(call)

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> list[QuotaSlice]:
        await self._hang("quotas")

    async def report_latency(self, router: str, counts: LatencyCounts) -> AutoscalerView:
        await self._hang("latency")

    async def report(self, report: RouterReport) -> float:
        await self._hang("report")

    async def frames(self) -> AsyncIterator[bytes]:
        await self._hang("frames")
        yield b""


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_every_kind_of_call_is_made_and_none_of_them_outlives_the_router() -> None:
    clock, controller, accounts = ManualClock(50.0), Hanging(), TenantAccounts(leased=True)
    config = Config(autoscaling=AutoscalingConfig(enabled=True))
    core = RouterCore(config.router, clock, lambda: "room")
    calls = ControllerCalls(
        ControllerPorts(lessor=controller, reporter=controller, dashboard=controller),
        config, core, accounts, PrometheusMetrics(core, "shm"), None, "demo", lambda: "start", clock,
    )  # fmt: skip
    assert accounts.lacks("acme", TenantLimits(requests_per_minute=8), 1, 1, clock.now())
    accounts.wait_for("acme", 1, 1)
    calls.tick()
    assert calls.dashboard is not None
    viewer = calls.dashboard.open()

    async def look() -> list[bytes]:
        return [event async for event in viewer.events()]

    looking = asyncio.ensure_future(look())
    await settle()
    assert controller.under_way == {"quotas", "latency", "report", "frames"}
    assert not looking.done()
    calls.close()
    await settle()
    assert (controller.under_way, looking.done()) == (set(), True), "whoever looks is told the end"
    with pytest.raises(NoViewer, match="ends"):
        calls.dashboard.open()


@pytest.mark.asyncio
async def test_what_comes_when_there_was_nothing_to_report_is_reported_at_once() -> None:
    """At the next turn, and the one after it has its second."""
    said: list[str] = []
    waiting: list[str] = []

    async def told(what: str) -> None:
        said.append(what)

    calls = ReportCalls(ManualClock(), "away", lambda: told(waiting.pop()) if waiting else None)
    calls.tick()
    for what in ("first", "second"):
        waiting.append(what)
        calls.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert said == ["first"]
