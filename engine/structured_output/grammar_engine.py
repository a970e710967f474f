"""The port to a structured-output engine, which compiles grammars, follows answers, and makes token masks; and the
grammar of one answer.

A matcher's state is a function of its grammar and of the tokens it has consumed. So it is never sent anywhere: whoever
takes an answer over makes a new one from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from twinpool.contracts.errors import TwinpoolError
from twinpool.engine.runner.sampling.logits_processors import TokenMask


class GrammarError(TwinpoolError):
    """Raised where a grammar can't be compiled, is too costly, or doesn't fit the tokens before; says why."""


class GrammarMatcher(Protocol):
    """Follows one answer."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on behind `tokens`. Raises `GrammarError` for one that the grammar doesn't allow there."""

    def fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` the grammar allows next, one after another."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that spell the only text that may come next; none where there is a choice."""


class StartedGrammar(NamedTuple):
    """A matcher, and the mask of the token that it expects."""

    matcher: GrammarMatcher
    mask: TokenMask


class GrammarEngine(Protocol):
    """Compiles grammars and makes masks. `start` may be called on any thread."""

    def start(self, grammar: str, emitted: Sequence[int]) -> Future[StartedGrammar]:
        """Compile, off the caller's thread, and go on behind the answer's tokens so far. The future raises
        `GrammarError`."""

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[TokenMask] | GrammarError]:
        """Return the masks of each matcher: of its next token, and of those behind each of its drafts, which must all
        fit. A mask that takes too long is an error. Matchers don't move."""

    def close(self) -> None:
        """End what compiles; futures may never be done."""


class AnswerGrammar:
    """A matcher that is brought up to the answer's tokens whenever it is asked."""

    def __init__(self, started: StartedGrammar, emitted: int) -> None:
        """`emitted`: tokens of the answer that the grammar was started behind."""
        self._matcher, self.first = started
        self._consumed = emitted

    def behind(self, answer: Sequence[int]) -> GrammarMatcher:
        """Return the matcher behind all tokens of `answer`, of which there are never fewer than before. Raises
        `GrammarError` for a token that the grammar doesn't allow."""
        assert len(answer) >= self._consumed, "tokens of an answer are never taken back"
        if fresh := answer[self._consumed :]:
            self._matcher.consume(fresh)
            self._consumed = len(answer)
        return self._matcher
