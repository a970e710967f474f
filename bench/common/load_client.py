"""The client of benches: what is asked and when, the same for the same seed, and one router that is asked.

Prompts are made of blocks, as those of traces are (`cli.load.open_loop`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from twinpool.cli.load.open_loop import Ask, Content
from twinpool.cli.load.openai_client import Endpoint, Outcome, stream

TOKENS = (300, 900)
"""Ids of ordinary tokens, of the demo's vocabulary and of most."""
TIMEOUT_S = 300.0
SETTLE_S = 0.3
_SHARED_BLOCK = 0
_ARRIVALS, _LENGTHS = 1, 2
"""Streams of randomness, so that one does not move another; content has the third."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn evenly from low to high, both possible."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """``512`` or ``256:768``. Raises `ValueError` for anything else."""
        low, _, high = text.partition(":")
        parsed = cls(int(low), int(high or low))
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(f"lengths must be N or LOW:HIGH with 1 <= LOW <= HIGH; got {text}")
        return parsed


def synthetic(
    content: Content,
    count: int,
    inputs: LengthRange,
    outputs: LengthRange,
    shared_prefix: int = 0,
    rate: float | None = None,
) -> list[Ask]:
    """`count` requests; the first `shared_prefix` tokens of all prompts are the same.

    `rate` is requests a second with exponential gaps (a Poisson process); without it all are due at once.
    """
    lengths = np.random.default_rng([_LENGTHS, content.seed])
    gaps = np.random.default_rng([_ARRIVALS, content.seed])
    asks = []
    at_s = 0.0
    for number in range(count):
        length = int(lengths.integers(inputs.low, inputs.high + 1))
        output = int(lengths.integers(outputs.low, outputs.high + 1))
        shared = content.items(min(shared_prefix, length)) if shared_prefix else 0
        own = max(content.items(length) - shared, 0)
        tokens = content.block(_SHARED_BLOCK, shared) + content.block(number + 1, own)
        asks.append(Ask(at_s, tokens, output))
        if rate is not None:
            at_s += float(gaps.exponential(1 / rate))
    return asks


def greedy_completion(model: str, tokens: Sequence[int], output_tokens: int, **more: Any) -> dict[str, Any]:
    """The JSON of a streamed completion of exactly so many greedy tokens, with fields more."""
    asked = {"model": model, "prompt": list(tokens), "max_tokens": output_tokens, "temperature": 0}
    return {**asked, "ignore_eos": True, "stream": True, **more}


class LoadClient:
    """Asks one router for streamed completions of exact lengths."""

    def __init__(self, url: str, model: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        self.url, self._model = url, model
        self._endpoint = Endpoint.parse(url, headers)

    async def ask(self, tokens: Sequence[int], output_tokens: int, due_s: float = 0.0) -> Outcome:
        body = greedy_completion(self._model, tokens, output_tokens, stream_options={"include_usage": True})
        request = self._endpoint.encode("/v1/completions", body)
        return await stream(self._endpoint, request, Outcome(due_s, 0.0, len(tokens), output_tokens), TIMEOUT_S)

    async def ask_when_due(self, ask: Ask, start_s: float) -> Outcome:
        """`start_s`: when the load began, of `time.perf_counter`."""
        await asyncio.sleep(max(0.0, start_s + ask.at_s - time.perf_counter()))
        return await self.ask(ask.tokens, ask.output_tokens, ask.at_s)

    async def settle(self) -> None:
        """Wait until the router has no request."""
        async with httpx.AsyncClient(timeout=60) as client:
            while (await client.get(f"{self.url}/load")).json()["server_load"]:
                await asyncio.sleep(SETTLE_S)

    async def counter(self, name: str) -> int:
        """The sum of a metric of the router, over its labels."""
        async with httpx.AsyncClient(timeout=60) as client:
            lines = (await client.get(f"{self.url}/metrics")).text.splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
