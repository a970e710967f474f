"""The dashboard's frames on their way from the controller to the browsers that look at this router's page.

However many look, this router has one stream from the controller, and it has one only while somebody looks. Each viewer
is written to by itself: one that doesn't read gets the latest frame when it does, and none in between, and nobody waits
for it. While the controller is away viewers are told so, and how it goes on once it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from twinpool.contracts.clock import Clock
from twinpool.contracts.compact_json import sse_event
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.json_logs import log
from twinpool.router.links.controller_port import DashboardSource

MAX_VIEWERS = 64
"""Browsers that look at one router's page at once."""
RETRY_S = 0.5
"""Seconds between two attempts to get frames."""
SILENCE_S = 15.0
"""Seconds without a frame after which the stream counts as broken: a large cluster has one every few seconds."""
BEAT_S = 5.0
"""Seconds without an event after which a viewer gets a comment, by which both ends see that the connection is there."""
PAST_S = 2.0
"""Seconds for which the past is the same for all viewers."""
BEAT = b": beat\n\n"


class NoViewer(TwinpoolError):
    """Raised when as many browsers look as may, or the router ends."""


class DashboardViewer:
    """One browser's events."""

    def __init__(self, relay: DashboardRelay) -> None:
        self._relay = relay
        self._more = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """End the events: the client has left, or the router ends. Idempotent."""
        self._closed = True
        self._relay.left(self)
        self._more.set()

    def wake(self) -> None:
        self._more.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Events of a stream: `past`, at the beginning and whenever frames begin anew; `frame`; `away`."""
        relay, seen, stream = self._relay, 0, 0
        while not self._closed:
            if stream != relay.stream:
                stream, past = relay.stream, await relay.past()
                if past:
                    yield past
            elif seen != relay.number:
                seen = relay.number
                yield relay.latest
            elif not await self._woken():
                yield BEAT

    async def _woken(self) -> bool:
        try:
            async with asyncio.timeout(BEAT_S):
                await self._more.wait()
        except TimeoutError:
            return False
        self._more.clear()
        return True


class DashboardRelay:
    """The frames of one router; on its event loop."""

    def __init__(self, source: DashboardSource, clock: Clock, on_viewers: Callable[[int], None]) -> None:
        """`on_viewers` is told how many look, whenever that changes."""
        self._source, self._clock, self._on_viewers = source, clock, on_viewers
        self._viewers: set[DashboardViewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._past: tuple[int, float, bytes] | None = None
        self._closed = False
        self.latest = b""
        """The latest event."""
        self.number = 0
        """How many events there were."""
        self.stream = 0
        """How many streams of frames there were that have brought one."""

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    def open(self) -> DashboardViewer:
        """A viewer more; its `close` must be called. Raises `NoViewer`."""
        if self._closed:
            raise NoViewer("this router ends: ask again, and another answers")
        if len(self._viewers) >= MAX_VIEWERS:
            raise NoViewer(f"{MAX_VIEWERS} browsers look at this router's dashboard already")
        viewer = DashboardViewer(self)
        self._viewers.add(viewer)
        self._on_viewers(len(self._viewers))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())
        return viewer

    def left(self, viewer: DashboardViewer) -> None:
        if viewer in self._viewers:
            self._viewers.discard(viewer)
            self._on_viewers(len(self._viewers))
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all viewers' events, and take none any more. Idempotent."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.close()

    async def past(self) -> bytes:
        """The event `past`; empty where the controller doesn't answer: it comes once frames do."""
        now, kept = self._clock.now(), self._past
        if kept is None or kept[0] != self.stream or now >= kept[1] + PAST_S:
            try:
                kept = self._past = self.stream, now, sse_event(await self._source.past(), "past")
            except ConnectionError as error:
                log("dashboard without its past", reason=str(error))
                return b""
        return kept[2]

    async def _follow(self) -> None:
        """Get frames until nobody looks any more, from one stream after the other."""
        said = ""
        while True:
            began = self.stream
            reason = await self._frames()
            if reason != said or self.stream != began:
                log("dashboard's frames have ended", reason=reason)
                self._tell(sse_event(json.dumps({"reason": reason}), "away"))
            said = reason
            await asyncio.sleep(RETRY_S)

    async def _frames(self) -> str:
        """Pass on one stream's frames; returns why it ended."""
        began = False
        try:
            async with contextlib.aclosing(self._source.frames()) as frames:  # type: ignore[type-var]
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        frame = await anext(frames)
                    self.stream += not began
                    began = True
                    self._tell(sse_event(frame, "frame"))
        except TimeoutError:
            return f"the controller has sent nothing for {SILENCE_S:g} s"
        except (ConnectionError, StopAsyncIteration) as error:
            return str(error) or "the frames have ended"

    def _tell(self, event: bytes) -> None:
        self.latest, self.number = event, self.number + 1
        for viewer in self._viewers:
            viewer.wake()
