"""A grammar's matcher is brought up to an answer's tokens, each once, however many came since it was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import CancelledError
from threading import Event

import numpy as np
import pytest

from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import (
    AnswerGrammar,
    GrammarError,
    LLGuidanceEngine,
    StartedGrammar,
    with_marks_apart,
)

MASK = TokenMask(np.zeros(1, np.int32))


class Matcher:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.consumed: list[list[int]] = []

    def consume(self, tokens: Sequence[int]) -> None:
        self.consumed.append(list(tokens))

    def fitting(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def forced(self) -> Sequence[int]:
        return ()


def test_a_matcher_consumes_each_token_once_and_nothing_of_what_it_was_started_behind() -> None:
    matcher = Matcher()
    grammar = AnswerGrammar(StartedGrammar(matcher, MASK), emitted=2)
    assert grammar.first is MASK
    answer = [5, 6]
    for came in ([], [7], [8, 9, 10], [], [11]):
        answer += came
        assert grammar.behind(answer) is matcher
    assert matcher.consumed == [[7], [8, 9, 10], [11]]
    with pytest.raises(AssertionError, match="never taken back"):
        grammar.behind(answer[:-1])


def test_tokens_that_a_grammar_does_not_allow_are_refused_each_time_that_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(self: Matcher, tokens: Sequence[int]) -> None:
        raise GrammarError("not that")

    monkeypatch.setattr(Matcher, "consume", refuses)
    grammar = AnswerGrammar(StartedGrammar(Matcher(), MASK), emitted=0)
    for _ in range(2):  # A draft is looked for first, and then the step's mask.
        with pytest.raises(GrammarError, match="not that"):
            grammar.behind([5])


@pytest.mark.parametrize("vocab", [{"<unk>": 0, "a": 1}, [["<unk>", 0.0], ["a", -1.0]]], ids=["by name", "by score"])
def test_a_mark_that_stands_for_what_is_unknown_has_its_other_name_everywhere(vocab: object) -> None:
    """A tokenizer whose unknown token isn't in its vocabulary can't be read."""
    mark = {"id": 0, "content": "<unk>", "special": True}
    tree = json.loads(
        with_marks_apart(json.dumps({"added_tokens": [mark], "model": {"unk_token": "<unk>", "vocab": vocab}}))
    )
    name = tree["added_tokens"][0]["content"]
    assert name != "<unk>"
    assert name.endswith("<unk>")
    assert tree["model"]["unk_token"] == name
    pieces = list(tree["model"]["vocab"]) if isinstance(vocab, dict) else [one for one, _ in tree["model"]["vocab"]]
    assert pieces == [name, "a"]


def test_an_engine_that_is_closed_begins_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being compiled can't be stopped; what waits behind it would hold up the end of the process."""
    begun, goes_on = Event(), Event()

    def compiles(self: LLGuidanceEngine, grammar: str, emitted: Sequence[int]) -> None:
        begun.set()
        goes_on.wait(60)

    monkeypatch.setattr(LLGuidanceEngine, "_start", compiles)
    engine = LLGuidanceEngine("{}", 32, [0])
    first, second = (engine.start("a", ()) for _ in range(2))
    assert begun.wait(60)
    engine.close()
    assert second.cancelled()
    assert not first.done()
    goes_on.set()
    assert first.result(60) is None
    with pytest.raises(CancelledError):
        second.result()
