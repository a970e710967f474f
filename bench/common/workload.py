"""What is asked and when: prompts and arrivals, the same for the same seed.

Prompts are made of blocks, as those of traces are (`cli.replay.trace_prompts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinpool.cli.replay.trace_prompts import Ask, Content

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
