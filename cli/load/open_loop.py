"""Requests of a trace, made anew and sent when they are due, however slow the answers are.

A trace has no text, only which parts of prompts are equal. A prompt is made of *blocks* of made-up tokens; a block's
content depends on (seed, block id) alone, so prompts that name the same blocks share content and so a prefix
(`sim.scale.traffic`).

Who is late is kept apart. A request that is due while too many are under way is *held*: that is the endpoint's
slowness, and counts into what its client waits for. The rest of a request's lateness is the client's own, who could not
keep up; figures with much of it are the client's and not the endpoint's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twinpool.cli.load.openai_client import Outcome
from twinpool.sim.scale.traffic import TRACE_BLOCK_TOKENS, TraceLine, scaled_lengths

_CONTENT = 3
"""The stream of randomness; the load of a bench has further ones."""

_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know"
)
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request before it has a form: when, what, how long an answer. `tokens` are ids or, for text, word numbers."""

    at_s: float
    tokens: tuple[int, ...]
    output_tokens: int

    def text(self) -> str:
        return " ".join(WORDS[token % len(WORDS)] for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Content:
    """Where made-up tokens come from: ids of [low, high), and how many of them stand for one asked-for token.

    `per_token` is below 1 for text, where a word can be more than one token.
    """

    seed: int
    low: int
    high: int
    per_token: float = 1.0

    def block(self, name: int, length: int) -> tuple[int, ...]:
        """The first `length` items of block `name`."""
        if length > TRACE_BLOCK_TOKENS:
            return _draw(self.seed, self.low, self.high, name, length)
        return _block(self.seed, self.low, self.high, name)[:length]

    def items(self, tokens: int) -> int:
        return max(1, round(tokens * self.per_token))


@lru_cache(maxsize=4096)
def _block(seed: int, low: int, high: int, name: int) -> tuple[int, ...]:
    return _draw(seed, low, high, name, TRACE_BLOCK_TOKENS)


def _draw(seed: int, low: int, high: int, name: int, length: int) -> tuple[int, ...]:
    """A longer draw begins with the shorter one."""
    return tuple(np.random.default_rng([_CONTENT, seed, name]).integers(low, high, length).tolist())


def asks_of(
    content: Content, lines: Sequence[TraceLine], scale: float = 1.0, speed: float = 1.0, max_context: int | None = None
) -> Iterator[Ask]:
    """Rebuild a trace's requests one by one, as all of them may not fit into memory: equal hash ids are equal content.

    `scale` multiplies all lengths (blocks shrink with the prompts, so prefixes stay shared) and `speed` divides the
    gaps between arrivals. To fit `max_context` tokens, answers are cut to half of it and prompts at their end.
    """
    block_items = content.items(round(TRACE_BLOCK_TOKENS * scale))
    for line in lines:
        length, output = scaled_lengths(line, scale, max_context)
        wanted = content.items(length)
        tokens: list[int] = []
        for name in line.hash_ids:
            tokens += content.block(name + 1, block_items)
        # Rounding can leave the scaled blocks a few tokens short of the scaled length.
        short = max(0, wanted - len(tokens))
        tokens += content.block(line.hash_ids[-1] + 1, short)
        yield Ask((line.at_s - lines[0].at_s) / speed, tuple(tokens[:wanted]), output)


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
