"""Where a router has the dashboard's numbers from, and reports its own to: the controller, or this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from twinpool.contracts.messages.router_report import RouterReport


class DashboardSource(Protocol):
    """The dashboard of the whole cluster. All four raise `ConnectionError` where the controller doesn't answer."""

    def frames(self) -> AsyncIterator[bytes]:
        """Frames as JSON, about one a second, from now on; the latest alone where they aren't awaited in time."""

    async def past(self) -> bytes:
        """The last minutes as JSON."""

    async def routers(self) -> list[RouterReport]:
        """The routers that are there, without their counts."""

    async def report(self, report: RouterReport) -> float:
        """Tell what a router has counted; returns the seconds until it is to tell again."""
