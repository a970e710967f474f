"""A structured-output engine whose masks hang on every token before, so that one that was lost shows.

A grammar is a number. It allows a quarter to three quarters of the vocabulary: those tokens whose hash with the number
and with all tokens of the answer so far says so. Now and then it forces a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache

from twinpool.engine.runner.sampling.token_mask import TokenMask
from twinpool.engine.structured_output.grammar_engine import GrammarError, GrammarMatcher, StartedGrammar

VOCABULARY = 64


@lru_cache(maxsize=1 << 14)
def allowed(grammar: str, answer: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that may follow `answer`."""
    said = grammar.encode() + bytes(answer)
    bits = hashlib.blake2b(said, digest_size=VOCABULARY).digest()
    if bits[0] % 5 == 0:
        return (bits[1] % VOCABULARY,)
    return tuple(token for token in range(VOCABULARY) if bits[token] % 2) or (bits[2] % VOCABULARY,)


class SimMatcher:
    """Implements `engine.structured_output.grammar_engine.GrammarMatcher`."""

    def __init__(self, grammar: str) -> None:
        self.grammar, self.answer = grammar, tuple[int, ...]()

    def consume(self, tokens: Sequence[int]) -> None:
        if self.fitting(tokens) < len(tokens):
            raise GrammarError(f"{list(tokens)} doesn't fit behind {len(self.answer)} tokens")
        self.answer += tuple(tokens)

    def fitting(self, tokens: Sequence[int]) -> int:
        answer = self.answer
        for count, token in enumerate(tokens):
            if token not in allowed(self.grammar, answer):
                return count
            answer += (token,)
        return len(tokens)

    def forced(self) -> Sequence[int]:
        tokens, answer = list[int](), self.answer
        while len(only := allowed(self.grammar, answer)) == 1:
            tokens += only
            answer += only
        return tokens


class SimGrammars:
    """Implements `engine.structured_output.grammar_engine.GrammarEngine`; compiles at once."""

    def start(self, grammar: str, emitted: Sequence[int]) -> Future[StartedGrammar]:
        future, matcher = Future[StartedGrammar](), SimMatcher(grammar)
        try:
            matcher.consume(emitted)
            future.set_result(StartedGrammar(matcher, TokenMask.of(allowed(grammar, matcher.answer))))
        except GrammarError as error:
            future.set_exception(error)
        return future

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[TokenMask] | GrammarError]:
        out: list[list[TokenMask] | GrammarError] = []
        for matcher, drafts in wanted:
            assert isinstance(matcher, SimMatcher)
            behind = [(*matcher.answer, *drafts[:count]) for count in range(len(drafts) + 1)]
            out.append([TokenMask.of(allowed(matcher.grammar, answer)) for answer in behind])
        return out

    def close(self) -> None:
        pass
