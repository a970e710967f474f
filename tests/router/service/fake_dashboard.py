"""A dashboard of frames that say nothing, a few a second, for tests of who gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from twinpool.contracts.messages.router_report import RouterReport


class FakeDashboard:
    """Implements `router.links.controller_port.DashboardSource`."""

    def __init__(self) -> None:
        self.reports: list[RouterReport] = []

    async def frames(self) -> AsyncIterator[bytes]:
        number = 0
        while True:
            number += 1
            yield b'{"v":1,"n":%d}' % number
            await asyncio.sleep(0.05)

    async def past(self) -> bytes:
        return b'{"v":1}'

    async def routers(self) -> list[RouterReport]:
        return self.reports[-1:]

    async def report(self, report: RouterReport) -> float:
        self.reports.append(report)
        return 1.0
