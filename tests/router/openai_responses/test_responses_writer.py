"""Answers in the shape of OpenAI's Responses API: every event is one of the client's types, and together they make the
object that isn't streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseFailedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.router.http_server import Server
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import OutputDelta
from twinpool.router.openai_responses.responses_request import read_responses
from twinpool.router.openai_responses.responses_writer import ResponsesWriter
from twinpool.router.parsers.answer_parts import (
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentPart,
    ReasoningPart,
    joined,
)

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARTS: list[AnswerPart] = [
    ReasoningPart("h"), ReasoningPart("m"), ContentPart("Let"), ContentPart(" me."), CallPart("f"),
    ArgumentsPart('{"n"'), ArgumentsPart(": 1}"), CallPart("g"), ArgumentsPart("{}"), ContentPart("Done."),
]  # fmt: skip

ASKED: dict[str, Any] = {
    "input": "hello",
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "max_output_tokens": 9,
}


@dataclass
class Told:
    """What a writer reads of a choice."""

    parts: list[AnswerPart] | None
    finish: str | None = "stop"
    cached_tokens: int = 3
    reasoning_tokens: int = 2
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    text: list[str] = field(default_factory=list)
    ended_at: float = 107.5
    request: Any = None

    def __post_init__(self) -> None:
        self.request = type("Request", (), {"prompt": tuple(range(10)), "arrived": 100.0})


def writer(told: Told) -> ResponsesWriter:
    sampling = type("Sampling", (), {"temperature": 0.5, "top_p": 1.0})
    request: Any = type("Request", (), {"repeated": json.dumps(read_responses(ASKED).repeated), "sampling": sampling})
    found = ResponsesWriter(request, "id", 1700000000, "demo")
    found.bind([told])  # type: ignore[list-item]
    return found


def whole(told: Told) -> dict[str, Any]:
    return dict(json.loads(b"".join(writer(told).whole(None))))


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked: it is of one of the client's types, and says nothing that this lacks."""
    found = []
    for number, event in enumerate(raw.decode().strip().split("\n\n")):
        name, data = event.split("\n")
        tree = json.loads(data.removeprefix("data: "))
        assert name == f"event: {tree['type']}"
        assert tree["sequence_number"] == number
        assert says_no_more(EVENTS.validate_python(tree, strict=True), tree)
        found.append(tree)
    return found


def says_no_more(model: Any, tree: Any) -> bool:
    """Whether the client's type has every field that is told."""
    if isinstance(tree, dict) and hasattr(model, "model_extra"):
        # OpenAI's service repeats it too, and the client's type hasn't it.
        extra = set(model.model_extra or ()) - {"store"}
        assert not extra, f"{type(model).__name__} has no {extra}"
        return all(says_no_more(getattr(model, key), part) for key, part in tree.items() if hasattr(model, key))
    if isinstance(tree, list):
        return all(says_no_more(*pair) for pair in zip(model, tree, strict=True))
    return True


def streamed(told: Told, pieces: list[list[AnswerPart]]) -> list[dict[str, Any]]:
    found = writer(told)
    last = len(pieces) - 1
    raw = b"".join(
        found.chunk(OutputDelta(0, "", (), (), told.finish if number == last else None, None, number == 0, piece))
        for number, piece in enumerate(pieces)
    )
    return events(raw + found.closing(None))


def put_together(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of a stream's deltas, and of nothing else; other events say the same."""
    items: list[dict[str, Any]] = []
    done = 0
    for event in told:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items) == done, "one item at a time"
                items.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                assert len(items[-1]["content"]) == event["content_index"] == 0
                items[-1]["content"].append(dict(event["part"]))
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == items[-1]["arguments"]
            case "content_part.done":
                assert event["part"] == items[-1]["content"][0]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert event["item"] == items[-1]
                done += 1
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    assert done == len(items)
    return items


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("pieces", [[PARTS], [[part] for part in PARTS], [PARTS[:1], PARTS[1:5], [], PARTS[5:]]])
def test_a_stream_put_together_is_the_whole_response(pieces: list[list[AnswerPart]], finish: str) -> None:
    one = whole(Told(PARTS, finish))
    Response.model_validate(one, strict=True)
    told = streamed(Told(PARTS, finish), pieces)
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["output"] == [] for event in told[:2])
    assert put_together(told) == one["output"]
    assert told[-1]["response"] == one
    status = "completed" if finish == "stop" else "incomplete"
    assert (told[-1]["type"], one["status"]) == (f"response.{status}", status)
    assert [item["type"] for item in one["output"]] == [
        "reasoning", "message", "function_call", "function_call", "message"
    ]  # fmt: skip
    assert [item["status"] for item in one["output"]] == ["completed"] * 4 + [status]
    assert one["output"][2]["arguments"] == '{"n": 1}'
    assert len({item["id"] for item in one["output"]} | {item.get("call_id") for item in one["output"]}) == 8


PART = st.one_of(
    st.builds(ContentPart, st.text("ab\n", max_size=3)),
    st.builds(ReasoningPart, st.text("xy", max_size=3)),
    st.tuples(st.builds(CallPart, st.sampled_from("fg")), st.builds(ArgumentsPart, st.sampled_from(["{}", ""]))),
)


@settings(max_examples=100, deadline=None)
@given(drawn=st.lists(PART, max_size=8), sizes=st.lists(st.integers(0, 3), max_size=10), stops=st.booleans())
def test_any_parts_in_any_pieces_make_the_same_response(drawn: list[Any], sizes: list[int], stops: bool) -> None:
    parts = [part for one in drawn for part in (one if isinstance(one, tuple) else (one,))]
    told = Told(list(joined(parts)), "stop" if stops else "length")
    pieces = []
    for size in sizes:
        pieces.append(list(joined(parts[:size])))
        parts = parts[size:]
    found = streamed(told, [*pieces, list(joined(parts))])
    assert found[-1]["response"] == whole(told)
    assert put_together(found) == found[-1]["response"]["output"]


def test_usage_and_what_was_asked_are_told() -> None:
    found = whole(Told(PARTS))
    assert found["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    same = ("instructions", "tool_choice", "metadata", "max_output_tokens", "text")
    assert {name: found[name] for name in same} == {name: ASKED[name] for name in same}
    assert found["reasoning"]["effort"] == "low"
    assert found["tools"][0]["name"] == "f"
    assert (found["store"], found["temperature"], found["created_at"]) == (False, 0.5, 1700000000)
    assert (found["completed_at"], found["error"], found["incomplete_details"]) == (1700000007, None, None)
    assert whole(Told(PARTS, "length"))["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("parts", [[], [ReasoningPart("hm")]])
def test_an_answer_that_ended_has_a_message_though_it_says_nothing(parts: list[AnswerPart]) -> None:
    assert [item["type"] for item in whole(Told(parts))["output"]][-1] == "message"
    assert len(whole(Told(parts, "length"))["output"]) == len(parts)


@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_that_fails_says_so_in_an_event(begun: bool) -> None:
    found = writer(Told([]))
    raw = found.chunk(OutputDelta(0, "", (), (), None, None, True, PARTS[:4])) if begun else b""
    told = events(raw + found.failed(ApiError(503, "the worker died", "server_error", "worker_failed")))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    last = told[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker died"}
    assert [item["type"] for item in last["response"]["output"]] == (["reasoning"] if begun else [])
    usage = last["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 4, 14), "they were computed"


def test_the_endpoint_answers_and_streams_the_same(server: Server) -> None:
    asked = {"model": "demo", "input": "hello", "max_output_tokens": 8, "seed": 1, "metadata": {"a": "b"}}
    one = server.post("/v1/responses", asked).json()
    Response.model_validate(one, strict=True)
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}
    same = server.post("/v1/chat/completions", chat).json()
    assert one["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert one["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert (one["status"], one["metadata"], one["usage"]["output_tokens"]) == ("incomplete", {"a": "b"}, 8)
    told = events(server.post("/v1/responses", {**asked, "stream": True}).content)
    last = told[-1]["response"]
    texts = [response["output"][0]["content"] for response in (one, last)]
    assert texts[0] == texts[1]
    counted = server.post("/v1/responses/input_tokens", {"input": "hello"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": one["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "resp_1"),
        ("DELETE", "resp_1"),
        ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"),
        ("POST", "compact"),
    ],
)
def test_what_isnt_stored_is_not_found(server: Server, method: str, path: str) -> None:
    answer = server.client.request(method, f"/v1/responses/{path}")
    assert answer.status_code == 404
    assert "aren't stored" in answer.json()["error"]["message"]


def test_a_wrong_field_is_named_as_it_was_sent(server: Server) -> None:
    asked = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}
    assert server.refused("/v1/responses", asked)["param"] == "text"
    assert server.refused("/v1/responses", {"input": "x", "reasoning": {"effort": "y"}})["param"] == "reasoning"
    long = server.refused("/v1/responses", {"input": "x", "max_output_tokens": 10**6})
    assert long["param"] == "max_output_tokens"
    assert "max_output_tokens (1000000)" in long["message"]
    assert server.refused("/v1/responses", {"input": "hello " * 3000})["param"] == "input"
    assert server.refused("/v1/responses", {"input": "x", "model": "gone"}, 404)["code"] == "model_not_found"


def test_a_worker_that_fails_in_mid_stream_ends_it_with_an_event(server: Server) -> None:
    server.pause("decode")
    stream = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).responses.create(
        model="demo", input="hello", max_output_tokens=16, stream=True
    )
    assert next(stream).type == "response.created"
    worker = server.call(lambda: next(w for w in server.cluster.workers.values() if w.legs))
    leg = next(iter(worker.legs.values()))
    done = Done(leg.submit.request_id, 0, "error", error=ErrorKind.INVALID, message="planted")
    server.call(lambda: leg.session.on_events([done]))
    *_, last = stream
    assert isinstance(last, ResponseFailedEvent)
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("invalid_prompt", "planted")
    server.call(worker.legs.clear)
