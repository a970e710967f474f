"""The dashboard of `twinpool serve` in one process: the same frames, from the workers here, without a controller."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from twinpool.cluster.dashboard.cluster_frames import ClusterFrames, ClusterState
from twinpool.cluster.dashboard.dashboard_feed import DashboardFeed, TooManyWatch
from twinpool.cluster.dashboard.event_log import EventKind
from twinpool.cluster.dashboard.request_rows import SHOWN
from twinpool.cluster.dashboard.worker_rates import WorkerSample
from twinpool.cluster.serve.local_directory import LocalDirectory
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.request_record import RequestRecord
from twinpool.contracts.messages.router_report import RouterReport

TICK_S = 0.1


class LocalDashboard:
    """Implements `router.service.dashboard_source.DashboardSource` over the workers of this process; on the router's
    loop."""

    def __init__(self, directory: LocalDirectory, name: str, clock: Clock) -> None:
        """`name`: the cluster's."""
        self._directory, self._clock = directory, clock
        frames = ClusterFrames(name, secrets.token_hex(8), build_id(), clock.now())
        frames.log.add(time.time(), EventKind.CONTROL, "router and workers run in one process: none is started again")
        self._feed = DashboardFeed(frames, self._state, clock, time.time)
        self._timer: asyncio.TimerHandle | None = None
        self.recent: Callable[[int], Sequence[RequestRecord]] = lambda count: ()
        """Returns the router's latest records; set once there is a router."""

    async def frames(self) -> AsyncIterator[bytes]:
        try:
            async with contextlib.aclosing(self._feed.watch()) as watched:  # type: ignore[type-var]
                async for frame in watched:
                    yield frame
        except TooManyWatch as error:
            raise ConnectionError(str(error)) from None

    async def past(self) -> bytes:
        return self._feed.past()

    async def routers(self) -> list[RouterReport]:
        return self._feed.routers()

    async def report(self, report: RouterReport) -> float:
        if self._timer is None:  # The first report comes once the router's loop runs.
            self._tick()
        return self._feed.report(report)

    def _tick(self) -> None:
        self._feed.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _state(self) -> ClusterState:
        now = self._clock.now()
        views = self._directory.views()
        dead = sum(view.status.state == "dead" for view in views)
        return ClusterState([WorkerSample(view, now) for view in views], deaths=dead, requests=self.recent(SHOWN))
