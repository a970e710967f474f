"""The port to a structured-output engine, which compiles grammars, follows answers, and makes token masks; and the
grammar of one answer.

A matcher's state is a function of its grammar and of the tokens it has consumed. So it is never sent anywhere: whoever
takes an answer over makes a new one from the tokens.

The engine is llguidance (docs/decisions/0046). Grammars are compiled on a thread of their own, which holds no lock of
the interpreter meanwhile, and kept, as the same schema comes again and again. Copies of a matcher share their lexer,
whose states are bounded and add up: so only some answers share one, and one that is used up is compiled anew. Reading
the vocabulary takes seconds where it is large, and begins with the engine.

What a client asks for is bounded at every step: the size of a grammar, the states of its lexer, and the work of one
mask. A bound is an error of that answer alone.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.grammar import BOUNDS, engine_error, is_mark
from twinpool.contracts.outside_data import read_json
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


if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 128
"""Compiled grammars that are kept."""
_SHARED_BY = 32
"""Answers that follow copies of one compiled grammar."""
_WORD = 32
_APART = "\ue000"
"""A private character of Unicode, before the names of marks."""


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


@dataclass(slots=True)
class _CompiledGrammar:
    """A matcher at its beginning, and how many answers may still begin with a copy of it."""

    matcher: LLMatcher
    left: int = _SHARED_BY


class LLGuidanceEngine:
    """Implements `engine.structured_output.grammar_engine.GrammarEngine` for one checkpoint's vocabulary."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], threads: int = 1) -> None:
        """`tokenizer_json`: the content of `tokenizer.json`. `threads`: how many make masks, beside the caller's."""
        from llguidance import LLExecutor, LLParserLimits

        bounds: dict[str, Any] = {**BOUNDS, "verbose_errors": False}
        self._words = -(-vocab_size // _WORD)
        self._limits = LLParserLimits(**bounds)
        self._executor = LLExecutor(max(1, threads))
        self._compiled: OrderedDict[str, _CompiledGrammar] = OrderedDict()
        """By text, the latest used last; of the compiling thread alone."""
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._tokenizer: Future[LLTokenizer] = self._compiling.submit(
            _read_vocabulary, tokenizer_json, vocab_size, list(eos_token_ids)
        )

    def start(self, grammar: str, emitted: Sequence[int]) -> Future[StartedGrammar]:
        return self._compiling.submit(self._start, grammar, emitted)

    def _start(self, grammar: str, emitted: Sequence[int]) -> StartedGrammar:
        known = self._compiled.get(grammar)
        if known is not None and known.left > 0:
            try:
                return self._begin(grammar, known, emitted)
            except GrammarError:  # Its lexer may be used up by others.
                pass
        return self._begin(grammar, _CompiledGrammar(self._compile(grammar)), emitted)

    def _begin(self, grammar: str, compiled: _CompiledGrammar, emitted: Sequence[int]) -> StartedGrammar:
        """Begin an answer with a copy of a compiled grammar, which is kept."""
        compiled.left -= 1
        self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        matcher = LLGuidanceMatcher(compiled.matcher.deep_copy())
        matcher.consume(emitted)
        # The lexer's states at this place are made by the first mask: here, and not in a step.
        (first,) = self.masks([(matcher, ())])
        if isinstance(first, GrammarError):
            raise first
        return StartedGrammar(matcher, first[0])

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            compiled = LLMatcher(self._tokenizer.result(), grammar, limits=self._limits, log_level=0)
        except Exception as error:  # A vocabulary or a grammar that the library can't even read; it raises all kinds.
            raise GrammarError(engine_error(str(error))) from error
        if compiled.is_error():
            raise GrammarError(engine_error(compiled.get_error()))
        return compiled

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

    known = with_marks_apart(tokenizer_json) if eos_token_ids else tokenizer_json
    return LLTokenizer(known, n_vocab=vocab_size, eos_token=eos_token_ids or None)


def with_marks_apart(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` in which no text reads like a mark (`contracts.grammar.is_mark`).

    llguidance takes marks for special whatever the file says, so that grammars have them by their ids alone; but where
    a text is forced that reads like one, it tokenises that text as the mark and refuses it. So marks are named apart.
    One that a merge of the tokenizer makes keeps its name.
    """
    tree = read_json(tokenizer_json)
    model, added = tree.get("model") or {}, tree.get("added_tokens") or ()
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ())
    merged = {piece for first, second in merges for piece in (first, second, first + second)}
    names = {t["content"]: _APART + t["content"] for t in added if is_mark(t) and t["content"] not in merged}
    for token in added:
        if token["content"] in names:
            token["special"], token["content"] = True, names[token["content"]]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    elif vocab is not None:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)
    return json.dumps(tree, ensure_ascii=False)
