"""Events of a stream that are written at once, and those that must wait: all of them, once and in order."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from twinpool.router.openai.response_stream import KEEP_ALIVE, ResponseStream, StreamHeartbeat


class Writer:
    """Makes an event of a number."""

    def bind(self, choices: list[Any]) -> None:
        pass

    def chunk(self, piece: Any) -> bytes | tuple[bytes, ...]:
        return piece if isinstance(piece, tuple) else b"%d " % piece


def stream(buffer: int = 1000) -> ResponseStream:
    request: Any = SimpleNamespace(stream=True)
    answer: Any = Writer()
    found = ResponseStream("r", request, answer, buffer, "client", 600.0)
    choice: Any = SimpleNamespace(error=None)
    found.bind([choice])
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_written_at_once_or_waits_arrives_once_and_in_order(seed: int) -> None:
    """The client takes nothing at times, and the handler takes a while for what it writes itself."""
    rng = random.Random(seed)
    events, written, paused, direct = stream(), bytearray(), False, 0

    def write(event: bytes) -> bool:
        nonlocal direct
        if paused:
            return False
        written.extend(event)
        direct += 1
        return True

    async def handler() -> None:
        while piece := await events.more():
            events.write_directly(write, float)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            while paused:
                await asyncio.sleep(0)
            written.extend(piece)

    handling = asyncio.create_task(handler())
    number = 0
    while number < 500:
        for _ in range(rng.choice((1, 1, 5))):
            piece: Any = number if rng.random() < 0.9 else (b"%d" % number, b" ")
            events.push(piece)
            number += 1
        paused = rng.random() < 0.2
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
    paused = False
    events.close_one(events.choices[0])
    await handling
    assert written.decode().split() == [str(n) for n in range(number)]
    assert not events.overflowed
    assert direct > 50


@pytest.mark.asyncio
async def test_nothing_is_written_at_once_before_the_handler_has_begun_or_while_it_writes() -> None:
    events, written = stream(), []

    def write(event: bytes) -> bool:
        written.append(event)
        return True

    events.push(0)  # type: ignore[arg-type]
    assert await events.more() == b"0 "
    events.write_directly(write, float)
    events.push(1)  # type: ignore[arg-type]
    assert written == [], "what `more` has returned may not be written yet"
    assert await events.more() == b"1 "
    waiting = asyncio.create_task(events.more())
    await asyncio.sleep(0)
    events.push(2)  # type: ignore[arg-type]
    assert written == [b"2 "]
    events.beat()
    events.push(3)  # type: ignore[arg-type]
    assert written == [b"2 "], "it comes after what is queued"
    assert await waiting == b": keep-alive\n\n3 "


@pytest.mark.asyncio
async def test_a_client_that_takes_nothing_overflows_as_ever() -> None:
    events = stream(buffer=5)
    events.write_directly(lambda event: False, float)
    waiting = asyncio.create_task(events.more())
    await asyncio.sleep(0)
    for number in range(6):
        events.push(number)  # type: ignore[arg-type]
    assert events.overflowed
    assert await waiting == b"0 1 2 3 4 "


class Timers:
    """The timers of an event loop whose time a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        self._count += 1
        one = (self.now + delay_s, self._count, call)
        heapq.heappush(self.due, one)
        return SimpleNamespace(cancel=lambda: self._cancel(one))

    def _cancel(self, one: tuple[float, int, Callable[[], None]]) -> None:
        self.due = [other for other in self.due if other is not one]
        heapq.heapify(self.due)

    def move(self, until: float) -> None:
        while self.due and self.due[0][0] <= until:
            self.now, _, call = heapq.heappop(self.due)
            call()
        self.now = until


@pytest.mark.parametrize("beats", [0, 1, 3])
def test_a_stream_that_is_silent_is_kept_alive_until_its_end(beats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timers, events, told = Timers(), stream(), []
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    heartbeat = StreamHeartbeat(events, 10.0)
    for second in range(1, 35):
        timers.move(100.0 + second)
        if events.outbox:
            told.append((second, events.outbox.pop()))
            heartbeat.written()
        if second == 4:
            heartbeat.written()
        if len(told) == beats and second >= 10 * beats + 4:
            heartbeat.stop()
            break
    assert told == [(10 * number + 4, KEEP_ALIVE) for number in range(1, beats + 1)], "ten seconds after the last write"
    timers.move(1000.0)
    assert (events.outbox, timers.due) == ([], []), "nothing stays behind"


@pytest.mark.asyncio
async def test_events_that_are_written_at_once_put_the_next_sign_of_life_off(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, events = Timers(), stream()
    events.write_directly(lambda event: True, timers.time)
    waiting = asyncio.create_task(events.more())
    await asyncio.sleep(0)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "get_running_loop", lambda: timers)
        heartbeat = StreamHeartbeat(events, 10.0)
    timers.move(107.0)
    events.push(0)  # type: ignore[arg-type]
    timers.move(116.0)
    assert events.outbox == [], "nine seconds after the last event"
    timers.move(117.0)
    assert events.outbox == [KEEP_ALIVE]
    heartbeat.stop()
    assert await waiting == KEEP_ALIVE
