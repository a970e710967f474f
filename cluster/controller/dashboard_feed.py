"""What the dashboard shows: frames of the controller's table and autoscaler, their way to routers, and records.

While nobody watches, the cluster's state is taken in every few seconds, for the history alone, and routers and workers
tell their counters as seldom. Once somebody does, all of it comes about once a second, and one frame is built for all
who watch, whoever they are. A router that doesn't read gets the latest frame when it does, and none in between.

Besides frames, the controller has a ring of requests' records (`RecordBoard`). A router reports only a part of what it
has, so a request that isn't in the ring is looked for at the routers that watch the table: the question goes out on
their streams, and the answers come with `ReportRecords`. A question ends when all have answered, or after `ASK_S`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.wanted_worker import WantedWorker
from twinpool.cluster.dashboard.cluster_frames import SAMPLE_S, ClusterFrames, ClusterState, EventKind
from twinpool.cluster.dashboard.frame_rows import SHOWN, WorkerSample
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.compact_json import compact_json
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.contracts.messages.request_record import MAX_RECENT, RecordRing, RequestRecord, in_order
from twinpool.contracts.messages.router_report import RouterReport, bare

MAX_RECORDS = 2_000
MAX_BYTES = 32 * 1024**2
ASK_S = 1.5
"""Seconds that routers have for an answer."""
MAX_ASKS = 64
"""Questions that are open at once; a further one is refused."""


class TooManyAsks(Exception):
    """Raised when so many requests are looked for at once that no further one is."""


@dataclass(eq=False, slots=True)
class _RecordAsk:
    routers: int
    """How many were asked."""
    answered: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class BoardAnswer:
    """What was found of a request."""

    records: Sequence[RequestRecord]
    asked: int = 0
    answered: int = 0


class RecordBoard:
    """The records of all routers, as far as they are told; on the controller's loop."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.ring: RecordRing[RequestRecord] = RecordRing(MAX_RECORDS, MAX_BYTES)
        self._wall = wall
        self._asks: dict[int, _RecordAsk] = {}
        self._number = 0

    def recent(self, count: int) -> list[RequestRecord]:
        """The newest records, `count` at most, the newest first."""
        return self.ring.recent(min(count, MAX_RECENT))

    @property
    def kept_s(self) -> float:
        """How far back the ring goes, in seconds."""
        return self.ring.kept_s(self._wall())

    def take(self, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]) -> None:
        """Take in a router's report, and its answers to questions; late ones are nobody's any more."""
        for record in records:
            self.ring.put(record)
        for number, found in answers:
            ask = self._asks.get(number)
            if ask is None:
                continue
            ask.records += found
            ask.answered += 1
            if ask.answered >= ask.routers:
                ask.over.set()

    async def find(self, asked: str, ask_routers: Callable[[int, str], int]) -> BoardAnswer:
        """The records that an id asks for. `ask_routers`: puts a question, with its number, to all routers that answer
        such; returns how many these are. Raises `TooManyAsks`."""
        if found := self.ring.find(asked):
            return BoardAnswer(in_order(found))
        if len(self._asks) >= MAX_ASKS:
            raise TooManyAsks(f"{MAX_ASKS} requests are looked for already; ask again")
        self._number += 1
        ask = _RecordAsk(0)
        self._asks[self._number] = ask
        try:
            ask.routers = ask_routers(self._number, asked)
            if ask.routers > ask.answered:
                async with asyncio.timeout(ASK_S):
                    await ask.over.wait()
        except TimeoutError:
            pass
        finally:
            self._asks = {number: one for number, one in self._asks.items() if one is not ask}
        return BoardAnswer(in_order(ask.records), ask.routers, ask.answered)


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


SCALING = "autoscaler: "
"""How the autoscaler's lines for the operator begin."""


def dashboard_of(
    core: Controller,
    autoscaler: Autoscaler | None,
    plane: Callable[[], ControlPlane],
    records: RecordBoard,
    clock: Clock,
    wall: Callable[[], float] = time.time,
) -> DashboardFeed:
    """The feed of a controller; what the operator is told from now on is in its log, too. `plane` returns who leads the
    controllers; `records` has what routers tell of requests."""

    def state() -> ClusterState:
        rows = core.table.rows.values()
        return ClusterState(
            [WorkerSample(row.view(core.table.cordoned(row)), row.counters_said) for row in rows],
            autoscaler.view() if autoscaler is not None else None,
            plane(),
            supervised=core.can_start or core.shutting_down,
            shutting_down=core.shutting_down,
            deaths=core.deaths,
            requests=records.recent(SHOWN),
            targets=autoscaler.targets if autoscaler is not None else (),
        )

    def noted(text: str) -> None:
        kind = EventKind.SCALE if text.startswith(SCALING) else EventKind.WORKER
        frames.log.add(wall(), kind, text.removeprefix(SCALING))

    def changed(row: WantedWorker) -> None:
        frames.changed(row.name, row.incarnation, row.state, row.role, wall())

    frames = ClusterFrames(core.table.config.name, secrets.token_hex(8), build_id(), clock.now())
    frames.log.add(wall(), EventKind.CONTROL, "a controller has begun to lead; what was before is with the one before")
    core.table.on_note(noted)
    core.table.on_row(changed)
    return DashboardFeed(frames, state, clock, wall)
