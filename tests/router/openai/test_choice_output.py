"""One choice by itself: what each batch of tokens adds to it, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from contracts.errors import ErrorKind
from contracts.ids import RequestId
from contracts.sampling_params import SamplingParams, TokenLogprob
from router.openai.chat_format import AnswerFormat
from router.openai.choice_output import ChoiceOutput
from router.openai.generate_request import GenerateRequest
from router.state.routed_request import RoutedRequest
from router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from tests.router.http_server import DEMO


@pytest.fixture(scope="module")
def model_tokenizer() -> ModelTokenizer:
    return read_model_tokenizer(DEMO, 10_000)


@dataclass(frozen=True)
class Asked:
    """What a choice reads of the request that it belongs to."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    eos: frozenset[int] = frozenset()
    answer_format: AnswerFormat | None = None


def choice_of(model_tokenizer: ModelTokenizer, asked: Asked) -> ChoiceOutput:
    routed = RoutedRequest(RequestId("r"), (1, 2), SamplingParams(max_tokens=50), now=0.0, deadline=60.0)
    return ChoiceOutput(0, routed, cast(GenerateRequest, asked), model_tokenizer, "")


def test_tokens_after_a_stop_string_are_dropped_with_their_log_probabilities(model_tokenizer: ModelTokenizer) -> None:
    ids = [
        token
        for word in ("one", " two", " three", " four")
        for token in model_tokenizer.encode(word, add_special=False)
    ]
    logprobs = [TokenLogprob(token, -float(at), ()) for at, token in enumerate(ids)]
    until = next(n for n in range(len(ids)) if "two" in model_tokenizer.decode(ids[: n + 1]))
    assert until + 1 < len(ids)
    choice = choice_of(model_tokenizer, Asked(stops=("two",)))
    delta = choice.take(ids, logprobs)
    assert list(delta.tokens) == ids[: until + 1] == choice.tokens
    assert list(delta.logprobs) == logprobs[: until + 1] == choice.logprobs
    assert (delta.text, delta.finish, delta.stop) == ("one ", "stop", "two")


def test_without_a_stop_all_tokens_are_told(model_tokenizer: ModelTokenizer) -> None:
    ids = list(model_tokenizer.encode("one two three", add_special=False))
    choice = choice_of(model_tokenizer, Asked())
    assert list(choice.take(ids, ()).tokens) == ids
    assert not choice.ended


def test_a_choice_whose_text_cannot_be_made_ends_in_an_error_that_says_so(model_tokenizer: ModelTokenizer) -> None:
    choice = choice_of(model_tokenizer, Asked())
    choice.fail("no text")
    assert choice.ended
    assert choice.error is not None
    assert (choice.error.error, choice.error.message, choice.error.reason) == (ErrorKind.WORKER, "no text", "error")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_reasoning_are_counted_however_tokens_are_grouped(model_tokenizer: ModelTokenizer, size: int) -> None:
    asked = Asked(answer_format=AnswerFormat(reasoning=True))
    thought = list(model_tokenizer.encode("<think>it was cold", add_special=False))
    answer = list(model_tokenizer.encode("</think>yes, it was", add_special=False))
    choice, ids = choice_of(model_tokenizer, asked), [*thought, *answer]
    for at in range(0, len(ids), size):
        choice.take(ids[at : at + size], ())
    # The last piece of reasoning is certain once it is known what follows it.
    assert len(thought) <= choice.reasoning_tokens <= len(thought) + 1
    one = choice_of(model_tokenizer, asked)
    one.take(ids, ())
    assert choice.reasoning_tokens == one.reasoning_tokens
    plain = choice_of(model_tokenizer, asked)
    plain.take(answer[1:], ())
    assert plain.reasoning_tokens == 0
