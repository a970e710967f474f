"""The structured-output engine of workers: llguidance (docs/decisions/0046).

Grammars are compiled on a thread of their own, which holds no lock of the interpreter meanwhile, and kept, as the same
schema comes again and again. Reading the vocabulary takes seconds where it is large, and begins with the engine.

What a client asks for is bounded at every step: the size of a grammar, the states of its lexer, and the work of one
mask. A bound is an error of that answer alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from contracts.grammar import BOUNDS, GRAMMAR_ENGINE, engine_error
from engine.runner.sampling.token_mask import TokenMask
from engine.structured_output.grammar_engine import GrammarError, GrammarMatcher, StartedGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 128
"""Compiled grammars that are kept."""
_WORD = 32


class LLGuidanceMatcher:
    """Implements `engine.structured_output.grammar_engine.GrammarMatcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def consume(self, tokens: Sequence[int]) -> None:
        if not self.matcher.consume_tokens(list(tokens)):
            raise GrammarError(engine_error(self.matcher.get_error()))

    def fitting(self, tokens: Sequence[int]) -> int:
        return self.matcher.validate_tokens(list(tokens))

    def forced(self) -> Sequence[int]:
        return self.matcher.compute_ff_tokens()


class LLGuidanceEngine:
    """Implements `engine.structured_output.grammar_engine.GrammarEngine` for one checkpoint's vocabulary."""

    version = GRAMMAR_ENGINE

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], threads: int = 1) -> None:
        """`tokenizer_json`: the content of `tokenizer.json`. `threads`: how many make masks, beside the caller's."""
        from llguidance import LLExecutor, LLParserLimits

        bounds: dict[str, Any] = {**BOUNDS, "verbose_errors": False}
        self._words = -(-vocab_size // _WORD)
        self._limits = LLParserLimits(**bounds)
        self._executor = LLExecutor(max(1, threads))
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        """Matchers at their beginning, the latest used last; of the compiling thread alone."""
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._tokenizer: Future[LLTokenizer] = self._compiling.submit(
            _read_vocabulary, tokenizer_json, vocab_size, list(eos_token_ids)
        )

    def start(self, grammar: str, emitted: Sequence[int]) -> Future[StartedGrammar]:
        return self._compiling.submit(self._start, grammar, emitted)

    def _start(self, grammar: str, emitted: Sequence[int]) -> StartedGrammar:
        matcher = LLGuidanceMatcher(self._beginning(grammar).deep_copy())
        matcher.consume(emitted)
        # The lexer's states at this place are made by the first mask: here, and not in a step.
        (first,) = self.masks([(matcher, ())])
        if isinstance(first, GrammarError):
            raise first
        return StartedGrammar(matcher, first[0])

    def _beginning(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        found = self._compiled.pop(grammar, None)
        if found is None:
            found = LLMatcher(self._tokenizer.result(), grammar, limits=self._limits, log_level=0)
            if found.is_error():
                raise GrammarError(engine_error(found.get_error()))
        self._compiled[grammar] = found
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return found

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[TokenMask] | GrammarError]:
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        words_nw = np.zeros((sum(1 + len(drafts) for _, drafts in wanted), self._words), np.int32)
        places: list[tuple[LLMatcher, int, list[int]]] = []
        at = 0
        for matcher, drafts in wanted:
            places.append((cast("LLGuidanceMatcher", matcher).matcher, at, list(drafts)))
            at += 1 + len(drafts)
        if drafted := [place for place in places if place[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, words_nw)
        if others := [(matcher, first) for matcher, first, drafts in places if not drafts]:
            fill_next_token_bitmask_par(self._executor, others, words_nw)
        out: list[list[TokenMask] | GrammarError] = []
        for filled, first, drafts in places:
            if filled.is_error():
                out.append(GrammarError(engine_error(filled.get_error())))
            else:
                out.append([TokenMask(words_w) for words_w in words_nw[first : first + 1 + len(drafts)]])
        return out

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)


def _read_vocabulary(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_ids or None)
