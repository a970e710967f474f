"""A published model through the `openai` package: chats, JSON by a schema, a required call and a stream.

What it answers is what transformers does with the same masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from openai import OpenAI

from tests.soak.published import OutOfReach, published_model
from tests.support.checkpoints import Oracle, compare
from tests.support.served_cluster import serving
from twinpool.router.openai.chat_format import ChatFormat
from twinpool.router.openai.structured_output import read_grammar
from twinpool.router.openai.tools import read_tools

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "tennis", "reading"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
ASKED = [
    "Who is the oldest person that you know? Answer in JSON.",
    "Invent a student and tell me about her as JSON.",
    "Name a tennis player.",
    "How will the weather be in Paris this week?",
]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
    },
    "regex": {"guided_regex": "(?:[A-Z][a-z]+ ){1,3}is [0-9]{1,3} years old\\."},
    "tool": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return published_model()
    except OutOfReach as error:
        pytest.skip(f"SmolLM2-135M-Instruct can't be had here: {error}")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model, dtype="float32")


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Its template knows no tools, so their format is named.
    sections = {"engine": {"dtype": "float32"}, "router": {"tool_parser": "hermes"}}
    with serving(model, tmp_path_factory.mktemp("run"), sections=sections, ready_within=300, orderly=False) as cluster:
        yield OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=600, max_retries=0)
        cluster.settle()


def grammar_of(body: dict[str, Any]) -> str:
    use, chats = read_tools(body), ChatFormat("", tool_parser="hermes")
    return chats.grammar(use, chats.answer_format(use, ""), read_grammar(body).text)


def worst_gap(oracle: Oracle, model: Path, grammar: str, prompt: list[int], answer: list[int]) -> float:
    """How far a token's logit is below the best that the grammar allows there, at most, by the oracle's logits."""
    logits_nv = oracle.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    config = json.loads((model / "config.json").read_text())
    ends = config["eos_token_id"]
    vocabulary = LLTokenizer(
        (model / "tokenizer.json").read_text(),
        n_vocab=config["vocab_size"],
        eos_token=ends if isinstance(ends, list) else [ends],
    )
    matcher, worst = LLMatcher(vocabulary, grammar), 0.0
    for row_v, token in zip(logits_nv, answer, strict=True):
        words_1w = np.zeros((1, -(-config["vocab_size"] // 32)), np.int32)
        fill_next_token_bitmask(matcher, words_1w, 0)
        allowed_v = torch.from_numpy(
            np.unpackbits(words_1w.view(np.uint8), bitorder="little")[: len(row_v)].astype(bool)
        )
        assert allowed_v[token], "a token that the grammar doesn't allow"
        worst = max(worst, float(row_v[allowed_v].max() - row_v[token]))
        matcher.consume_token(token)
    return worst


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", BODIES)
def test_answers_are_transformers_with_the_same_masks(
    client: Any, oracle: Oracle, model: Path, kind: str, asked: str
) -> None:
    body = BODIES[kind]
    extra = {
        "return_token_ids": True,
        "repetition_penalty": 1.0,
        **{k: v for k, v in body.items() if k.startswith("guided")},
    }
    plain = {key: value for key, value in body.items() if key not in extra}
    messages = [{"role": "user", "content": asked}]
    sent = {"model": "model", "messages": messages, "max_tokens": 80, "temperature": 0, "extra_body": extra, **plain}
    sent["model"] = client.models.list().data[0].id
    whole = client.chat.completions.create(**sent)
    choice = whole.choices[0]
    prompt, answer = whole.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    if grammar := grammar_of(body):
        assert worst_gap(oracle, model, grammar, prompt, answer) <= 2 * oracle.difference
    else:
        assert compare(oracle, prompt, answer).equal
    told = "".join(
        (part.choices[0].delta.content or "")
        + "".join(call.function.arguments or "" for call in part.choices[0].delta.tool_calls or [])
        for part in client.chat.completions.create(**sent, stream=True)
        if part.choices
    )
    if kind == "tool":
        (call,) = choice.message.tool_calls
        assert told == call.function.arguments
        if choice.finish_reason == "tool_calls":
            jsonschema.validate(json.loads(told), WEATHER)
    else:
        assert told == choice.message.content
    if kind == "schema" and choice.finish_reason == "stop":
        jsonschema.validate(json.loads(told), PERSON)
    print(f"{kind}: {choice.finish_reason} {told!r}")
