"""What is asked and when: prompts and arrivals, the same for the same seed.

A prompt is made of *blocks* of made-up tokens; a block's content depends on (seed, block id) alone, so prompts that
name the same blocks share content and so a prefix, as requests of a trace do (`sim.scale.trace_file`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sim.scale.trace_file import TRACE_BLOCK_TOKENS, TraceLine

_SHARED_BLOCK = 0
_ARRIVALS, _LENGTHS, _CONTENT = 1, 2, 3
"""Streams of randomness, so that one does not move another."""

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


def from_trace(
    content: Content, lines: Sequence[TraceLine], scale: float = 1.0, speed: float = 1.0, max_context: int | None = None
) -> list[Ask]:
    """Rebuild a trace's requests: equal hash ids are equal content.

    `scale` multiplies all lengths (blocks shrink with the prompts, so prefixes stay shared) and `speed` divides the
    gaps between arrivals. To fit `max_context` tokens, answers are cut to half of it and prompts at their end.
    """
    block_items = content.items(round(TRACE_BLOCK_TOKENS * scale))
    asks = []
    for line in lines:
        output = max(1, round(line.output_length * scale))
        length = max(1, round(line.input_length * scale))
        if max_context is not None:
            output = min(output, max(1, max_context // 2))
            length = min(length, max_context - output)
        wanted = content.items(length)
        tokens: list[int] = []
        for name in line.hash_ids:
            tokens += content.block(name + 1, block_items)
        # Rounding can leave the scaled blocks a few tokens short of the scaled length.
        short = max(0, wanted - len(tokens))
        tokens += content.block(line.hash_ids[-1] + 1, short)
        asks.append(Ask((line.at_s - lines[0].at_s) / speed, tuple(tokens[:wanted]), output))
    return asks
