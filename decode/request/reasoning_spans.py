"""Reasoning spans: the tokens that a model thinks in, which the next turn of a conversation leaves out.

State of positions behind a left-out span is of no use to the next turn, whose tokens differ from there on. So with
`cache.strip_reasoning` decode gives the tree only the state up to the first span of the answer, and frees the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReasoningSpans:
    """The ids of the tokens that open and close a span."""

    opens: int
    closes: int

    @classmethod
    def of(cls, config: CacheConfig) -> ReasoningSpans | None:
        """Return None unless spans are stripped. Raises `ConfigError` where the tokens aren't given."""
        if not config.strip_reasoning:
            return None
        try:
            opens, closes = (int(part) for part in config.reasoning_tokens.split(","))
        except ValueError:
            raise ConfigError(
                "cache.strip_reasoning needs cache.reasoning_tokens, the ids of the tokens that open and close a span, "
                f'as "151667,151668"; got {config.reasoning_tokens!r}'
            ) from None
        return cls(opens, closes)

    def keeps(self, tokens: Sequence[int], prompt: int) -> int:
        """Return how many of `tokens` come before the first span of the answer, which begins after `prompt` tokens.

        A prompt that ends within a span leaves nothing of the answer.
        """
        for token in reversed(tokens[:prompt]):
            if token == self.opens:
                return prompt
            if token == self.closes:
                break
        answer = list(tokens[prompt:])
        return prompt + answer.index(self.opens) if self.opens in answer else len(tokens)
