"""The relay: one stream for all who look, whoever reads and whoever doesn't, while the controller comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.router.http_server import eventually
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.messages.router_report import RouterReport
from twinpool.router.service import controller_calls
from twinpool.router.service.controller_calls import BEAT, MAX_VIEWERS, DashboardRelay, DashboardViewer, NoViewer


class FakeSource:
    """Frames that the test makes, from a controller that it has come and go."""

    def __init__(self) -> None:
        self.there = True
        self.streams = self.pasts = 0
        self.open: set[asyncio.Queue[bytes | None]] = set()

    async def frames(self) -> AsyncIterator[bytes]:
        if not self.there:
            raise ConnectionError("the controller is away")
        self.streams += 1
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.open.add(queue)
        try:
            while (frame := await queue.get()) is not None:
                yield frame
            raise ConnectionError("the controller closed the stream")
        finally:
            self.open.discard(queue)

    async def past(self) -> bytes:
        if not self.there:
            raise ConnectionError("the controller is away")
        self.pasts += 1
        return b"past %d" % self.streams

    async def routers(self) -> list[RouterReport]:
        return []

    async def report(self, report: RouterReport) -> float:
        return 1.0

    def send(self, frame: bytes | None) -> None:
        for queue in self.open:
            queue.put_nowait(frame)


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(controller_calls, "RETRY_S", 0.0)
        self.source, self.clock, self.viewers = FakeSource(), ManualClock(), [0]
        self.relay = DashboardRelay(self.source, self.clock, self.viewers.append)

    async def begun(self) -> None:
        await eventually(lambda: bool(self.source.open))

    async def sent(self, frame: bytes) -> None:
        number = self.relay.number
        self.source.send(frame)
        await eventually(lambda: self.relay.number > number)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def event(kind: str, data: str) -> bytes:
    return f"event: {kind}\ndata: {data}\n\n".encode()


async def reads(viewer: DashboardViewer, until: Callable[[bytes], bool]) -> list[bytes]:
    found = []
    async with asyncio.timeout(60):
        async for one in viewer.events():
            found.append(one)
            if until(one):
                break
    return found


@pytest.mark.asyncio
async def test_all_who_look_share_one_stream_which_ends_with_the_last_of_them(scene: Scene) -> None:
    viewers = [scene.relay.open() for _ in range(5)]
    await scene.begun()
    await scene.sent(b"1")
    for viewer in viewers:
        assert await reads(viewer, lambda one: b"frame" in one) == [event("past", "past 1"), event("frame", "1")]
    assert (scene.source.streams, scene.source.pasts) == (1, 1)
    for viewer in viewers:
        viewer.close()
    await eventually(lambda: not scene.source.open)
    assert scene.viewers == [0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0]


@pytest.mark.asyncio
async def test_one_that_does_not_read_gets_the_latest_frame_and_holds_up_nobody(scene: Scene) -> None:
    slow, quick = scene.relay.open(), scene.relay.open()
    await scene.begun()
    events, quick_events = slow.events(), quick.events()
    await scene.sent(b"1")
    assert [await anext(events), await anext(events)] == [event("past", "past 1"), event("frame", "1")]
    await anext(quick_events)
    for number in range(2, 50):
        await scene.sent(b"%d" % number)
        assert await anext(quick_events) == event("frame", str(number))
    assert await anext(events) == event("frame", "49")
    scene.relay.close()


@pytest.mark.asyncio
async def test_viewers_are_told_that_the_controller_is_away_and_get_the_past_again_when_it_is_back(
    scene: Scene,
) -> None:
    viewer = scene.relay.open()
    events = viewer.events()
    await scene.begun()
    await scene.sent(b"1")
    assert [await anext(events), await anext(events)] == [event("past", "past 1"), event("frame", "1")]
    scene.source.there = False
    scene.source.send(None)
    assert b"event: away" in await anext(events)
    assert b"the controller is away" in await anext(events), "and why it can't be had"
    scene.source.there = True
    await scene.begun()
    await scene.sent(b"2")
    assert [await anext(events), await anext(events)] == [event("past", "past 2"), event("frame", "2")]
    viewer.close()
    assert [one async for one in events] == []


@pytest.mark.asyncio
async def test_frames_that_begin_anew_while_a_viewer_waits_for_the_past_have_a_past_of_their_own(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, told = asyncio.Event(), scene.source.past

    async def late() -> bytes:
        past = await told()
        await come.wait()
        return past

    monkeypatch.setattr(scene.source, "past", late)
    viewer = scene.relay.open()
    await scene.begun()
    await scene.sent(b"1")
    events = viewer.events()
    first = asyncio.ensure_future(anext(events))
    await eventually(lambda: scene.source.pasts == 1)
    scene.source.send(None)
    await eventually(lambda: scene.source.streams == 2)
    await scene.sent(b"2")
    come.set()
    assert [await first, await anext(events)] == [event("past", "past 1"), event("past", "past 2")]
    viewer.close()


@pytest.mark.asyncio
async def test_a_controller_that_sends_nothing_counts_as_away(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_calls, "SILENCE_S", 0.0)
    viewer = scene.relay.open()
    assert b"has sent nothing" in (await reads(viewer, lambda one: b"away" in one))[-1]
    viewer.close()


@pytest.mark.asyncio
async def test_without_events_a_viewer_gets_a_beat(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_calls, "BEAT_S", 0.0)
    viewer = scene.relay.open()
    assert (await reads(viewer, lambda one: one == BEAT))[-1] == BEAT
    viewer.close()


@pytest.mark.asyncio
async def test_no_more_look_than_may_and_none_at_a_router_that_ends(scene: Scene) -> None:
    viewers = [scene.relay.open() for _ in range(MAX_VIEWERS)]
    with pytest.raises(NoViewer, match="already"):
        scene.relay.open()
    viewers[3].close()
    viewers[3].close()  # Idempotent.
    scene.relay.open()
    ended = [asyncio.ensure_future(reads(viewer, lambda one: False)) for viewer in viewers[:3]]
    await scene.begun()
    scene.relay.close()
    await asyncio.wait_for(asyncio.gather(*ended), 60)
    with pytest.raises(NoViewer, match="ends"):
        scene.relay.open()
    await eventually(lambda: not scene.source.open)
