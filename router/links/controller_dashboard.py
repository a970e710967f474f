"""The controller's dashboard over gRPC: its frames, its past, and what this router reports to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from twinpool.contracts.messages.calls import DASHBOARD_PAST, LIST_ROUTERS, REPORT_ROUTER, WATCH_DASHBOARD, Empty
from twinpool.contracts.messages.router_report import RouterReport
from twinpool.contracts.wire.grpc_calls import CallChannel

CALL_S = 2.0
"""Seconds that a call waits for the controller."""


class ControllerDashboard:
    """Implements `router.service.dashboard_source.DashboardSource` over the connection to the controller."""

    def __init__(self, leader: Callable[[], CallChannel]) -> None:
        """`leader` returns the connection to the controller, and raises `ConnectionError` while it is away."""
        self._leader = leader

    async def frames(self) -> AsyncIterator[bytes]:
        async with aclosing(self._leader().subscribe(WATCH_DASHBOARD, Empty())) as frames:
            async for frame in frames:
                yield frame.json
        raise ConnectionError("the controller closed the stream")

    async def past(self) -> bytes:
        return (await self._leader().call(DASHBOARD_PAST, Empty(), CALL_S)).json

    async def routers(self) -> list[RouterReport]:
        return list((await self._leader().call(LIST_ROUTERS, Empty(), CALL_S)).routers)

    async def report(self, report: RouterReport) -> float:
        return (await self._leader().call(REPORT_ROUTER, report, CALL_S)).next_s
