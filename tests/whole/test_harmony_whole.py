"""A gpt-oss over the whole way: random weights, its own special tokens, answers in the harmony format by grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.router.parsers.test_harmony import byte_tokenizer
from tests.router.text.published_templates import TEMPLATES
from tests.support.model_families import FAMILIES
from tests.support.served_cluster import serving
from twinpool.router.parsers.harmony_messages import HARMONY_MARKS

PARAMETERS = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 3]}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ASKED: list[Any] = [{"role": "user", "content": "Where does it rain?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FAMILIES["gpt_oss"](tmp_path_factory.mktemp("gpt-oss") / "model")
    tokenizer = byte_tokenizer(HARMONY_MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES["harmony"]}))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(checkpoint, tmp_path_factory.mktemp("run"), sections={"transfer": {"plane": "local"}}) as cluster:
        with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as found:
            yield found
        cluster.settle()


@pytest.fixture(scope="module")
def biases(checkpoint: Path) -> dict[str, int]:
    """Random weights would reason for ever."""
    tokens = byte_tokenizer(HARMONY_MARKS)
    return {str(tokens.token_to_id("<|end|>")): 12}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_required_call_is_made_and_a_stream_tells_the_same(client: Any, biases: dict[str, int], seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "model", "input": ASKED, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 400,
        "extra_body": {"seed": seed, "logit_bias": biases},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.status == "completed", whole.output
    *before, call = whole.output
    assert {item.type for item in before} <= {"reasoning", "message"}
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["town"] in ("Rome", "Oslo")
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response().output
    assert [item.type for item in streamed] == [item.type for item in whole.output]
    assert streamed[-1].arguments == call.arguments
    if before and before[0].type == "reasoning":
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    chat = client.chat.completions.create(
        model="model", messages=ASKED, tools=[CHAT_TOOL], tool_choice="required", max_tokens=400, seed=seed,
        logit_bias=biases,
    )  # fmt: skip
    (told,) = chat.choices[0].message.tool_calls
    assert told.function.arguments == call.arguments
    # The call and its result go back, and the model answers.
    items = [*ASKED, *whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    last = client.responses.create(
        model="model", input=items, tools=[TOOL], tool_choice="none", max_output_tokens=20,
        text={"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["wet", "dry"]}}},
        extra_body={"seed": seed, "logit_bias": biases},
    )  # fmt: skip
    assert all(item.type in ("reasoning", "message") for item in last.output)
    if last.status == "completed":
        assert json.loads(last.output_text) in ("wet", "dry")
