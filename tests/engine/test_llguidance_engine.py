"""The structured-output engine: answers of one grammar don't use each other up, and what is kept is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from twinpool.cluster.models import DEMO
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output import grammar_engine as module
from twinpool.engine.structured_output.grammar_engine import GrammarError, GrammarMatcher, LLGuidanceEngine

GREEDY_OF_STATES = LLMatcher.grammar_from_regex("(?:[a-z]*a[a-z]{60}[0-9]|c)+")
"""Each letter may be the `a` that counts: its lexer has 2**60 states, of which an answer makes some for each token."""
DIGITS = LLMatcher.grammar_from_regex("[0-9]{3}")


@pytest.fixture
def engine() -> Iterator[LLGuidanceEngine]:
    found = LLGuidanceEngine((DEMO / "tokenizer.json").read_text(), 2048, [0, 2])
    yield found
    found.close()


def allowed(mask: TokenMask) -> list[int]:
    """The tokens that may come, in order."""
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little"))]


def go_on(engine: LLGuidanceEngine, matcher: GrammarMatcher, rng: random.Random, tokens: int) -> str:
    """Follow an answer of random tokens; returns why it couldn't go on, empty where it could."""
    for _ in range(tokens):
        (made,) = engine.masks([(matcher, ())])
        if isinstance(made, GrammarError):
            return str(made)
        matcher.consume([rng.choice(allowed(made[0]))])
    return ""


def test_a_grammar_whose_states_an_answer_has_used_up_is_compiled_anew_for_the_next(engine: LLGuidanceEngine) -> None:
    rng = random.Random(1)
    first = engine.start(GREEDY_OF_STATES, ()).result()
    assert "too many states" in go_on(engine, first.matcher, rng, 4000)
    for _ in range(2):
        later = engine.start(GREEDY_OF_STATES, ()).result()
        assert go_on(engine, later.matcher, rng, 50) == ""


def test_answers_share_a_compiled_grammar_and_only_so_many(
    engine: LLGuidanceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = engine._compile

    def counting(grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile_(grammar)

    monkeypatch.setattr(engine, "_compile", counting)
    for _ in range(2 * module._SHARED_BY + 1):
        engine.start(DIGITS, ()).result()
    assert compiled == [DIGITS] * 3


def test_the_first_mask_of_an_answer_is_of_its_own_place_in_a_grammar_that_others_share(
    engine: LLGuidanceEngine,
) -> None:
    """An answer that goes on at another worker begins behind what it has emitted."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    opening, found = tokenizer.token_to_id("q"), []
    assert opening is not None
    for emitted in ((), (opening,), ()):
        mask = engine.start(LLMatcher.grammar_from_regex("q[0-9]"), emitted).result().mask
        found.append({tokenizer.id_to_token(token) for token in allowed(mask)})
    assert found == [{"q"}, set("0123456789"), {"q"}]


def test_grammars_that_are_kept_are_bounded_and_the_latest_used_stay(
    engine: LLGuidanceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 3)
    grammars = [LLMatcher.grammar_from_regex(f"[0-9]{{{count}}}") for count in range(1, 5)]
    for number in (0, 1, 2, 0, 3):
        engine.start(grammars[number], ()).result()
    assert list(engine._compiled) == [grammars[2], grammars[0], grammars[3]]


def test_a_start_behind_tokens_that_dont_fit_is_an_error_each_time(engine: LLGuidanceEngine) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError):
            engine.start(DIGITS, (ord("z"),)).result()
    assert engine.start(DIGITS, ()).result().matcher.forced() == []


@pytest.mark.parametrize("grammar", [DIGITS, "\ud800"])
@pytest.mark.parametrize("tokenizer", ["{}", "not json", '{"model": {"type": "Unigram", "vocab": []}}'])
def test_a_vocabulary_or_a_grammar_that_cant_be_read_is_an_error_of_each_answer(grammar: str, tokenizer: str) -> None:
    engine = LLGuidanceEngine(tokenizer, 2048, [0, 2])
    for _ in range(2):
        with pytest.raises(GrammarError):
            engine.start(grammar, ()).result()
    engine.close()


def test_a_grammar_that_is_no_text_is_an_error_and_the_next_one_is_compiled(engine: LLGuidanceEngine) -> None:
    with pytest.raises(GrammarError):
        engine.start("\ud800", ()).result()
    engine.start(DIGITS, ()).result()
