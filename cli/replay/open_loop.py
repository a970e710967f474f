"""An open loop: requests go out when they are due, however slow the answers are.

Who is late is kept apart. A request that is due while too many are under way is *held*: that is the endpoint's
slowness, and counts into what its client waits for. The rest of a request's lateness is the client's own, who could not
keep up; figures with much of it are the client's and not the endpoint's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from twinpool.cli.replay.openai_client import Outcome
from twinpool.cli.replay.trace_prompts import Ask

Send = Callable[[bytes, Outcome], Awaitable[Outcome]]
"""Sends a request's bytes and follows its answer to the end; sets the outcome's `sent_s` first. Never raises for the
endpoint."""


class OpenLoop:
    """The sender of one run. Its figures may be read while it runs."""

    def __init__(
        self,
        send: Send,
        encode: Callable[[Ask, int], bytes],
        concurrency: int,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`encode`: the bytes of a request by its number. `now` and `sleep` are a clock, in seconds."""
        self._send, self._encode, self._now, self._sleep = send, encode, now, sleep
        self._places = asyncio.Semaphore(concurrency)
        self._held_until = 0.0
        """Until when the last request waited for a place: what was due before then waited, too."""
        self.began_s = 0.0
        self.sent = 0
        self.running = 0
        self.outcomes: list[Outcome] = []
        """Of requests that have been sent, in that order; `end_s` is 0 while one is under way."""

    async def run(self, asks: Iterable[Ask], on_end: Callable[[Outcome], None]) -> None:
        """Send all `asks`, each at its `at_s` after the start, and wait for their ends."""
        self.began_s = self._now()
        async with asyncio.TaskGroup() as group:
            for number, ask in enumerate(asks):
                request = self._encode(ask, number)  # Before it is due, not after.
                due = self.began_s + ask.at_s
                await self._sleep(max(0.0, due - self._now()))
                if self._places.locked():
                    await self._places.acquire()
                    self._held_until = self._now()
                else:
                    await self._places.acquire()
                held = max(0.0, self._held_until - due)
                outcome = Outcome(due, due, len(ask.tokens), ask.output_tokens, held_s=held)
                self.outcomes.append(outcome)
                self.sent += 1
                self.running += 1
                group.create_task(self._one(request, outcome, on_end))
                await asyncio.sleep(0)  # It goes out before the next one is made.

    async def _one(self, request: bytes, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        try:
            await self._send(request, outcome)
        finally:
            self.running -= 1
            self._places.release()
        on_end(outcome)
