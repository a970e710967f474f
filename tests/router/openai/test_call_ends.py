"""Why an answer with calls ended, as OpenAI's API says it: by `tool_choice`, and the same streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.router.parsers.test_harmony import byte_tokenizer
from tests.router.parsers.test_published_marks import CALL, MARKS, SPECIAL, TOOL, Site
from twinpool.contracts.compact_json import joined
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.anthropic.messages_writer import MessagesWriter
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_writer import ResponseWriter
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.tokenizer_pool.tokenizer_process import prepared_frame, prepared_of

FUNCTION = {"type": "function", "function": {"name": "get"}}
PARAMETERS = {"type": "object", "properties": {"x": {"enum": [1, 2]}}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FUNCTION]}}
ENDS: list[tuple[Any, str, str, str]] = [
    ("auto", CALL, "stop", "tool_calls"),
    ("required", CALL, "stop", "tool_calls"),
    (ALLOWED, CALL, "stop", "tool_calls"),
    (FUNCTION, CALL, "stop", "stop"),
    ("auto", "no", "stop", "stop"),
    ("required", CALL[:-20], "length", "length"),
    (FUNCTION, CALL[:-20], "length", "length"),
]


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site(byte_tokenizer((*SPECIAL, *MARKS)))
    yield found
    found.engine.close()


@pytest.mark.parametrize("read_elsewhere", [False, True])
@pytest.mark.parametrize(("choice", "text", "reason", "finish"), ENDS, ids=lambda v: str(v)[:40])
def test_the_reason_is_openais(
    site: Site, choice: Any, text: str, reason: str, finish: str, read_elsewhere: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "tool_choice": choice, "stream": True}
    prepared = site.reader.chat(json.dumps(body).encode())
    request = prepared_of(prepared_frame(prepared)).request if read_elsewhere else prepared.request
    routed = RoutedRequest(RequestId("r"), (1, 2), request.sampling, now=0.0, deadline=60.0)
    output = ChoiceOutput(0, routed, request, site.model_tokenizer, "")
    writer = ResponseWriter(request, "a", 0, "m", site.model_tokenizer)
    writer.bind([output])
    pieces = [output.take([token], ()) for token in site.marked(text)]
    events = [bytes(writer.chunk(piece)) for piece in pieces]  # type: ignore[arg-type]
    last = output.end(Done(RequestId("r"), 0, reason))
    assert last is not None
    events.append(bytes(writer.chunk(last)))  # type: ignore[arg-type]
    told = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events if event]
    reasons = [one["finish_reason"] for one in told]
    assert reasons == [None] * (len(told) - 1) + [finish]
    whole = json.loads(joined(writer.whole(None)))["choices"][0]
    assert whole["finish_reason"] == finish
    names = [call["function"]["name"] for call in whole["message"].get("tool_calls") or ()]
    assert names == (["get"] if text != "no" else [])
    streamed = [call["function"] for one in told for call in one["delta"].get("tool_calls") or ()]
    assert [call["name"] for call in streamed if call.get("name")] == names


def test_a_named_tool_of_messages_ends_as_any_other(site: Site) -> None:
    body = {
        "messages": [{"role": "user", "content": "?"}], "max_tokens": 90,
        "tool_choice": {"type": "tool", "name": "get"},
        "tools": [{"name": "get", "input_schema": PARAMETERS}],
    }  # fmt: skip
    request = site.reader.messages(json.dumps(body).encode()).request
    routed = RoutedRequest(RequestId("r"), (1, 2), request.sampling, now=0.0, deadline=60.0)
    output = ChoiceOutput(0, routed, request, site.model_tokenizer, "")
    writer = MessagesWriter("a", "m")
    writer.bind([output])
    output.take(site.marked(CALL), ())
    output.end(Done(RequestId("r"), 0, "stop"))
    assert json.loads(joined(writer.whole(None)))["stop_reason"] == "tool_use"
