"""Chats, messages and responses with tools over the whole way, with the clients that people use: one cluster with the
demo model in one process, as nothing here is about processes, its calls by grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

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
QUESTION = "How will the weather be in London?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}, "auto"]
RESPONSES_WEATHER, RESPONSES_NOW = ({"type": "function", **tool["function"]} for tool in (WEATHER, TIME))
"""The same tools, as responses name them."""
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving("demo", tmp_path_factory.mktemp("tools"), sections={"transfer": {"plane": "local"}}) as found:
        yield found
        found.settle()


@pytest.fixture(scope="module")
def client(cluster: Serving) -> Iterator[Any]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as found:
        yield found


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
def test_an_agent_of_chats_that_must_use_a_tool_uses_it_and_comes_to_an_end(client: Any) -> None:
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
    from anthropic import Anthropic  # Takes longer than the test, in each process that lists tests.

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
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60).json()
    tokens = {"tokens": answer["prompt_token_ids"]}
    text = httpx.post(f"{cluster.url}/detokenize", json=tokens, timeout=60).json()["prompt"]
    assert json.dumps(TIME) in text
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "noon" in text


# ------------------------------------------------------------ responses


def without_ids(response: Response) -> list[dict[str, Any]]:
    """The items, without ids and what only the client adds."""
    items = [item.to_dict() for item in response.output]
    for item in items:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():  # type: ignore[attr-defined]
            part.pop("parsed", None)
    return items


def of_events(client: Any, **asked: Any) -> Response:
    """The response that a stream ends with, every event of which is one of the client's own types."""
    last: Any = None
    for number, last in enumerate(client.responses.create(stream=True, **asked)):
        assert last.sequence_number == number
        checked = EVENTS.validate_python(last.model_dump(), strict=True)
        assert type(checked) is type(last)
    assert last.type in ("response.completed", "response.incomplete")
    return last.response  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}, "auto"], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_tells_what_the_whole_response_has(client: Any, choice: Any, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "input": QUESTION, "tools": [RESPONSES_WEATHER, RESPONSES_NOW], "tool_choice": choice,
        "max_output_tokens": 120, "temperature": 0.9, "extra_body": {"seed": seed},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    streamed = of_events(client, **asked)
    assert without_ids(streamed) == without_ids(whole)
    assert streamed.status == whole.status
    assert streamed.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]
    with client.responses.stream(**asked) as stream:  # The client puts it together from deltas.
        events = list(stream)
    assert without_ids(events[-1].response) == without_ids(whole)
    if choice != "auto" and whole.status == "completed":
        for call in whole.output:
            schema = {"get_weather": RESPONSES_WEATHER, "now": RESPONSES_NOW}[call.name]["parameters"]
            jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.slow
def test_an_agent_of_responses_that_must_use_a_tool_uses_it_and_comes_to_an_end(client: Any) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {
        "model": "demo",
        "tools": [RESPONSES_WEATHER],
        "extra_body": {"seed": 5},
        "instructions": "Be brief.",
    }
    first = client.responses.create(
        input=items, tool_choice="required", parallel_tool_calls=False, max_output_tokens=120, **asked
    )
    (call,) = first.output
    assert (first.status, call.type) == ("completed", "function_call")
    assert json.loads(call.arguments)["days"] in (1, 3, 7)
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "grey"})
    last = client.responses.create(input=items, tool_choice="none", max_output_tokens=20, **asked)
    assert [item.type for item in last.output] == ["message"]
    assert last.output_text
    counted = client.responses.input_tokens.count(
        model="demo", input=items, instructions="Be brief.", tools=[RESPONSES_WEATHER]
    )
    assert counted.input_tokens == client.responses.create(input=items, max_output_tokens=1, **asked).usage.input_tokens
    again = client.responses.create(input=items, tool_choice="none", max_output_tokens=20, **asked)
    assert again.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.slow
def test_a_class_of_the_clients_is_what_comes_back(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "input": "Who lived in the old house?", "text_format": Person, "max_output_tokens": 300,
        "extra_body": {"seed": 1},
    }  # fmt: skip
    parsed = client.responses.parse(**asked)
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.slow
def test_what_isnt_there_is_refused_in_the_clients_own_classes(client: Any) -> None:
    more = {"ignore_eos": True}  # What is drawn could end sooner.
    whole = client.responses.create(model="demo", input="It was", max_output_tokens=4, extra_body=more)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.NotFoundError, match="aren't stored"):
        client.responses.retrieve(whole.id)
    assert client.responses.create(model="demo", input="x", max_output_tokens=4, store=True).store is False
    for wrong in ({"previous_response_id": whole.id}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="demo", input="x", **wrong)
        assert refused.value.param == next(iter(wrong))
