"""Tools and reasoning over the whole way, with the client that people use: the demo model, its calls by grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.support.served_cluster import Serving, serving

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 3, 7]}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
ASKED: list[Any] = [{"role": "user", "content": "How will the weather be in London?"}]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}, "auto"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving("demo", tmp_path_factory.mktemp("tools")) as found:
        yield found
        found.settle()


@pytest.fixture(scope="module")
def client(cluster: Serving) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def streamed(client: Any, **asked: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """The content, the calls and the end of a stream, put together as a client does."""
    content, calls, finish = "", list[dict[str, str]](), None
    for event in client.chat.completions.create(stream=True, **asked):
        for choice in event.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls)
                    calls.append({"id": call.id, "name": "", "arguments": ""})
                assert call.function is not None
                calls[call.index]["name"] += call.function.name or ""
                calls[call.index]["arguments"] += call.function.arguments or ""
    return content, calls, finish


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "auto"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_stream_tells_the_calls_that_the_whole_answer_has(client: Any, choice: Any, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "messages": ASKED, "tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": 120,
        "temperature": 0.9, "seed": seed,
    }  # fmt: skip
    (whole,) = client.chat.completions.create(**asked).choices
    content, calls, finish = streamed(client, **asked)
    told = whole.message.tool_calls or []
    assert content == (whole.message.content or "")
    assert [(c["name"], c["arguments"]) for c in calls] == [(c.function.name, c.function.arguments) for c in told]
    assert finish == whole.finish_reason
    assert len({c["id"] for c in calls} | {c.id for c in told}) == 2 * len(told), "no two calls share an id"
    if choice == "auto":
        return
    assert whole.message.content is None
    assert (finish == "tool_calls") <= (choice in ("auto", "required"))
    if finish != "length":
        assert told
        for call in told:
            schema = {"get_weather": WEATHER, "now": TIME}[call.function.name]["function"]["parameters"]
            jsonschema.validate(json.loads(call.function.arguments), schema)
    if choice != "required":
        assert {call.function.name for call in told} <= {"get_weather"}


@pytest.mark.slow
def test_an_agent_that_must_use_a_tool_uses_it_and_comes_to_an_end(client: Any) -> None:
    messages: list[Any] = list(ASKED)
    first = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=5,
        max_tokens=120,
    ).choices[0]  # fmt: skip
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls or []
    assert json.loads(call.function.arguments)["days"] in (1, 3, 7)
    messages.append(first.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "grey"})})
    last = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=20, seed=5
    ).choices[0]
    assert last.message.tool_calls is None
    assert last.message.content


@pytest.mark.slow
def test_anthropics_client_comes_through_the_same_loop(cluster: Serving) -> None:
    client: Any = Anthropic(base_url=cluster.url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    asked: dict[str, Any] = {
        "model": "demo", "max_tokens": 120, "messages": list(ASKED), "tools": [tool], "extra_body": {"seed": 5},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    first = client.messages.create(**asked)
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    jsonschema.validate(call.input, WEATHER["function"]["parameters"])
    with client.messages.stream(**asked) as stream:
        (streamed_call,) = stream.get_final_message().content
    assert streamed_call.input == call.input
    asked["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    last = client.messages.create(**{**asked, "tool_choice": {"type": "none"}, "max_tokens": 20})
    assert [block.type for block in last.content] == ["text"]
    counted = client.messages.count_tokens(model="demo", messages=asked["messages"], tools=[tool])
    assert counted.input_tokens > first.usage.input_tokens + first.usage.cache_read_input_tokens


@pytest.mark.slow
def test_a_chat_shows_the_model_its_tools_and_the_calls_before(cluster: Serving) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    ]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    body = {"messages": [*ASKED, called, result], "tools": [TIME], "max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body).json()
    text = httpx.post(f"{cluster.url}/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert json.dumps(TIME) in text
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "noon" in text
