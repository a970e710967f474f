"""OpenAI's Responses API over the whole way, with the client that people use: the demo model, its calls by grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.support.served_cluster import Serving, serving
from tests.whole.test_tools_whole import TIME as CHATS_TIME
from tests.whole.test_tools_whole import WEATHER as CHATS_WEATHER

WEATHER, NOW = ({"type": "function", **tool["function"]} for tool in (CHATS_WEATHER, CHATS_TIME))
"""Tools of chats, as responses name them."""
QUESTION = "How will the weather be in London?"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving("demo", tmp_path_factory.mktemp("responses")) as found:
        yield found
        found.settle()


@pytest.fixture(scope="module")
def client(cluster: Serving) -> Iterator[Any]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as found:
        yield found


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
        "model": "demo", "input": QUESTION, "tools": [WEATHER, NOW], "tool_choice": choice, "max_output_tokens": 120,
        "temperature": 0.9, "extra_body": {"seed": seed},
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
            schema = {"get_weather": WEATHER, "now": NOW}[call.name]["parameters"]
            jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.slow
def test_an_agent_that_must_use_a_tool_uses_it_and_comes_to_an_end(client: Any) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {
        "model": "demo",
        "tools": [WEATHER],
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
    counted = client.responses.input_tokens.count(model="demo", input=items, instructions="Be brief.", tools=[WEATHER])
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
    whole = client.responses.create(model="demo", input="It was", max_output_tokens=4)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.NotFoundError, match="aren't stored"):
        client.responses.retrieve(whole.id)
    assert client.responses.create(model="demo", input="x", max_output_tokens=4, store=True).store is False
    for wrong in ({"previous_response_id": whole.id}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="demo", input="x", **wrong)
        assert refused.value.param == next(iter(wrong))
