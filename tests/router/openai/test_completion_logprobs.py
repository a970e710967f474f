"""Log-probabilities of completions: each token is named by itself, and its offset is the place of its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from tests.router.http_server import demo_spec
from tests.router.parsers.test_harmony import byte_tokenizer
from tests.router.parsers.test_published_marks import sentencepiece_tokenizer
from twinpool.contracts.compact_json import joined
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import RequestId
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_writer import ResponseWriter
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.text.tokenizer import ModelTokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader

BEGIN, END = "<s>", "</s>"
PROMPT, ANSWER = "né 🙂 so", " 🙂🙂 日本 é."


def with_begin(make: Callable[[tuple[str, ...], tuple[str, ...]], Tokenizer]) -> Tokenizer:
    tokenizer = make((BEGIN, END), ())
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return tokenizer


@pytest.fixture(params=[byte_tokenizer, sentencepiece_tokenizer], ids=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return with_begin(request.param)


def told(tokenizer: Tokenizer, answer: list[TokenLogprob], **body: Any) -> dict[str, Any]:
    """The choice that a client is told of an answer to `PROMPT`, and the tokens of its prompt."""
    end = tokenizer.token_to_id(END)
    spec = demo_spec(vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(end,))
    model_tokenizer = ModelTokenizer(tokenizer, None, json.loads(tokenizer.to_str()))
    reader = BodyReader(spec, model_tokenizer, RouterConfig())
    prepared = reader.completion(json.dumps({"prompt": PROMPT, "logprobs": 2, **body}).encode())
    prompt = prepared.prompts[0].tokens
    routed = RoutedRequest(RequestId("r"), prompt, prepared.request.sampling, now=0.0, deadline=60.0)
    choice = ChoiceOutput(0, routed, prepared.request, model_tokenizer, prepared.prompts[0].text)
    choice.scores = tuple(TokenLogprob(token, -0.5, ()) for token in prompt[1:])
    writer = ResponseWriter(prepared.request, "a", 0, "m", model_tokenizer)
    writer.bind([choice])
    choice.take([one.token for one in answer], answer)
    whole: dict[str, Any] = json.loads(joined(writer.whole(None)))["choices"][0]
    return whole | {"prompt_tokens": [BEGIN, *(tokenizer.id_to_token(token) for token in prompt[1:])]}


def answer_of(tokenizer: Tokenizer, text: str = ANSWER) -> list[TokenLogprob]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [TokenLogprob(token, -float(at), ()) for at, token in enumerate(ids)]


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_where_the_text_of_tokens_begins(tokenizer: Tokenizer, echo: bool) -> None:
    choice = told(tokenizer, answer_of(tokenizer), echo=echo)
    shown, text = choice["logprobs"], choice["text"]
    assert text == (PROMPT if echo else "") + ANSWER
    assert len(shown["tokens"]) == len(answer_of(tokenizer)) + (len(choice["prompt_tokens"]) if echo else 0)
    offsets = shown["text_offset"]
    assert offsets[0] == 0
    for name, begin, end in zip(shown["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        own = "" if name == BEGIN or (name.startswith("bytes:") and begin == end) else text[begin:end]
        assert name in {own, BEGIN} or (name.startswith("bytes:") and len(own) <= 1), (name, own)


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_a_part_of_a_character_are_named_by_their_bytes(tokenizer: Tokenizer, echo: bool) -> None:
    shown = told(tokenizer, answer_of(tokenizer), echo=echo)["logprobs"]
    raw = b"".join(
        bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) if name.startswith("bytes:") else name.encode()
        for name in shown["tokens"]
        if name != BEGIN
    )
    assert raw.decode() == (PROMPT if echo else "") + ANSWER


def test_no_token_has_anothers_log_probability(tokenizer: Tokenizer) -> None:
    """Two bytes that are no text by themselves, and a special token whose text another one's name is."""
    first, second, third = tokenizer.encode("🙂", add_special_tokens=False).ids[:3]
    drawn = TokenLogprob(second, -1.5, ((first, -0.25), (third, -1.0)))
    (top,) = told(tokenizer, [drawn])["logprobs"]["top_logprobs"]
    assert list(top.values()) == [-0.25, -1.0, -1.5]


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_are_named_by_their_ids_where_that_is_asked_for(tokenizer: Tokenizer, echo: bool) -> None:
    ids = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    answer = [TokenLogprob(token, -1.0, ((5, -0.5),)) for token in ids]
    shown = told(tokenizer, answer, echo=echo, return_tokens_as_token_ids=True)["logprobs"]
    prompt = tokenizer.encode(PROMPT).ids if echo else []
    assert shown["tokens"] == [f"token_id:{token}" for token in (*prompt, *ids)]
    assert shown["top_logprobs"][-1] == {"token_id:5": -0.5, f"token_id:{ids[-1]}": -1.0}
