"""The prompts of a trace's requests, made anew: a trace has no text, only which parts of prompts are equal.

A prompt is made of *blocks* of made-up tokens; a block's content depends on (seed, block id) alone, so prompts that
name the same blocks share content and so a prefix (`sim.scale.traffic`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

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
