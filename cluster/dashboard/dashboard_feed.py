"""The dashboard's frames on their way from the controller to routers, and the pace at which its numbers come.

While nobody watches, the cluster's state is taken in every few seconds, for the history alone, and routers and workers
tell their counters as seldom. Once somebody does, all of it comes about once a second, and one frame is built for all
who watch, whoever they are. A router that doesn't read gets the latest frame when it does, and none in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from twinpool.cluster.dashboard.cluster_frames import SAMPLE_S, ClusterFrames, ClusterState
from twinpool.contracts.clock import Clock
from twinpool.contracts.compact_json import compact_json
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.messages.router_report import RouterReport, bare

log = logging.getLogger("twinpool.dashboard")

FRAME_S = 1.0
"""Seconds between two frames."""
FRAME_WORKERS = 128
"""Workers from which on frames come more seldom, in proportion."""
COUNTER_WORKERS = 32
"""Workers from which on they tell their counters more seldom than each second, in proportion; never more seldom than
`SAMPLE_S`."""
PAST_S = SAMPLE_S / 2
"""Seconds for which the past is the same for all who ask."""
MAX_WATCHERS = 256
"""Routers that watch at once."""


class TooManyWatch(TwinpoolError):
    """Raised when as many watch the frames as may."""


class _Watcher:
    """One watcher, and the frame that it hasn't had yet."""

    def __init__(self) -> None:
        self.frame = b""
        self.more = asyncio.Event()


class DashboardFeed:
    """The frames of one controller; on its loop. Call `tick` about every 100 ms."""

    def __init__(
        self, frames: ClusterFrames, state: Callable[[], ClusterState], clock: Clock, wall: Callable[[], float]
    ) -> None:
        """`state` returns the cluster's state; `wall` the seconds since 1970."""
        self.frames = frames
        self._state, self._clock, self._wall = state, clock, wall
        self._watchers: set[_Watcher] = set()
        self._next = clock.now()
        self._workers = 0
        self._past: tuple[float, bytes] | None = None
        self.failed = 0
        """Frames that couldn't be made, by a bug of ours."""

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    @property
    def frame_s(self) -> float:
        """Seconds between two frames."""
        return FRAME_S * max(1.0, self._workers / FRAME_WORKERS)

    @property
    def report_s(self) -> float:
        """Seconds until a router is to report again."""
        return FRAME_S if self._watchers else SAMPLE_S

    @property
    def counters_s(self) -> float:
        """Seconds between two heartbeats of a worker that carry its counters."""
        return min(SAMPLE_S, FRAME_S * max(1.0, self._workers / COUNTER_WORKERS)) if self._watchers else SAMPLE_S

    def report(self, report: RouterReport) -> float:
        """Take in a router's report; returns the seconds until it is to report again."""
        self.frames.report(report, self._clock.now(), self._wall())
        return self.report_s

    def routers(self) -> list[RouterReport]:
        """The routers that are there, each with who it is and what it has under way."""
        return [bare(report) for report in self.frames.routers(self._clock.now())]

    def tick(self) -> None:
        """Take in the cluster's state, and give those who watch a frame, if it is time."""
        now = self._clock.now()
        if now < self._next:
            return
        self._next = max(self._next + (self.frame_s if self._watchers else SAMPLE_S), now)
        try:
            self._take()
        except Exception:  # Our own bug; leases and restarts go on without it.
            self.failed += 1
            log.exception("a frame of the dashboard failed")

    def _take(self) -> None:
        state = self._state()
        self._workers = len(state.workers)
        self.frames.take(state, self._clock.now(), self._wall())
        if self._watchers:
            frame = compact_json(self.frames.frame()).encode()
            for watcher in self._watchers:
                watcher.frame = frame
                watcher.more.set()

    async def watch(self) -> AsyncGenerator[bytes]:
        """Frames as JSON, the first one soon. Raises `TooManyWatch`."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatch(f"{MAX_WATCHERS} routers watch the dashboard's frames already")
        watcher = _Watcher()
        self._watchers.add(watcher)
        self._next = self._clock.now()
        try:
            while True:
                await watcher.more.wait()
                watcher.more.clear()
                yield watcher.frame
        finally:
            self._watchers.discard(watcher)

    def past(self) -> bytes:
        """The last minutes as JSON; built once for those who ask within `PAST_S`."""
        now = self._clock.now()
        if self._past is None or now >= self._past[0] + PAST_S:
            self._past = now, compact_json(self.frames.past()).encode()
        return self._past[1]
