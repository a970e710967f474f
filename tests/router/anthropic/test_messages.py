"""Anthropic's Messages API as a translation of chats: bodies in, blocks and events out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.router.http_server import Server
from twinpool.contracts.errors import RequestError
from twinpool.router.anthropic.messages_request import IGNORED, REFUSED, read_messages_body
from twinpool.router.anthropic.messages_writer import MessagesWriter
from twinpool.router.openai.choice_output import OutputDelta
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart

ASK: dict[str, Any] = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TALK: dict[str, Any] = {
    "system": [
        {"type": "text", "text": "Be"},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"n": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
}


def test_a_conversation_becomes_the_turns_of_a_chat() -> None:
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}},
        {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert read_messages_body({"max_tokens": 9, **TALK}).chat["messages"] == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "and?"},
    ]


def read(*messages: dict[str, Any]) -> dict[str, Any]:
    return read_messages_body({"max_tokens": 9, "messages": [ASK["messages"][0], *messages]}).chat


def test_a_message_of_thoughts_alone_or_of_nothing_is_a_turn() -> None:
    thoughts = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}
    nothing = {"role": "user", "content": []}
    assert read(thoughts, nothing)["messages"][1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]


def test_the_assistants_last_words_are_gone_on_with_and_a_call_is_not() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    assert read({"role": "assistant", "content": "It was"})["continue_final_message"] is True
    assert (
        read({"role": "assistant", "content": [{"type": "text", "text": "It was"}]})["continue_final_message"] is True
    )
    for content in ([call], [{"type": "text", "text": "I look."}, call]):
        assert "continue_final_message" not in read({"role": "assistant", "content": content})


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("nothing", [None, [], {}, "", False])
def test_what_is_refused_may_be_named_with_nothing(name: str, nothing: object) -> None:
    try:
        assert read_messages_body({**ASK, name: nothing}).chat == ASK
    except RequestError as error:
        pytest.fail(f"a client that asks for nothing of it was refused: {error}")


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
    ({"stop_sequences": []}, {}),
    (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True},
    ),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto"}, {}),
    (
        {"tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}]},
        {"tools": [_tool(name="f", parameters=SCHEMA, description="d", strict=True)]},
    ),
    ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
    (
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    ({"tool_choice": {"type": "tool", "name": "f"}}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "reasoning_effort": "low"},
    ),
    ({"seed": 5}, {"seed": 5}),
]


@pytest.mark.parametrize(("asked", "chat"), FIELDS, ids=str)
def test_a_field_becomes_the_one_of_chats(asked: dict[str, Any], chat: dict[str, Any]) -> None:
    whole = read_messages_body({**ASK, **asked}).chat
    assert {name: value for name, value in whole.items() if name not in ASK} == chat
    assert whole["max_tokens"] == 5


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("says", [{"type": "ephemeral"}, None, []])
def test_what_has_no_effect_is_no_field_of_the_chat_and_is_told_where_it_says_something(name: str, says: Any) -> None:
    read = read_messages_body({**ASK, name: says})
    assert read.chat == ASK, "a chat would call it unknown"
    told = [] if not says or name == "cache_control" else [name]
    assert [one.split()[0] for one in read.ignored] == told


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "messages",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "messages"),
    ({"system": 5}, "system"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": {}}}, "tool_choice"),
    ({"thinking": True}, "thinking"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"compaction": {"type": "auto"}}, "compaction"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
]


@pytest.mark.parametrize(("asked", "param"), WRONG, ids=str)
def test_what_is_wrong_or_not_there_is_named(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages_body({**ASK, **asked})
    assert caught.value.param == param


@dataclass
class Told:
    """What a writer reads of a choice."""

    parts: list[AnswerPart] | None
    finish: str | None = "stop"
    stop: str | int | None = None
    cached_tokens: int = 3
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    text: list[str] = field(default_factory=list)
    request: Any = None
    calls: bool = False

    def __post_init__(self) -> None:
        self.request = type("Request", (), {"prompt": tuple(range(10))})
        self.calls = any(isinstance(part, CallPart) for part in self.parts or ())


PARTS: list[AnswerPart] = [
    ReasoningPart("h"), ReasoningPart("m"), ContentPart("Let"), ContentPart(" me."), CallPart("f"),
    ArgumentsPart('{"n"'), ArgumentsPart(": 1}"), CallPart("g"), ArgumentsPart("{}"),
]  # fmt: skip


def writer(told: Told) -> MessagesWriter:
    found = MessagesWriter("id", "demo")
    found.bind([told])  # type: ignore[list-item]
    return found


def events(told: Told, pieces: list[list[AnswerPart]]) -> list[tuple[str, dict[str, Any]]]:
    """All events of a stream, as a client reads them."""
    found = writer(told)
    last = len(pieces) - 1
    raw = b"".join(
        found.chunk(OutputDelta(0, "", (), (), told.finish if number == last else None, told.stop, number == 0, piece))
        for number, piece in enumerate(pieces)
    )
    text = (raw + found.closing(None)).decode()
    lines = [event.split("\n") for event in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


@pytest.mark.parametrize("pieces", [[PARTS], [[part] for part in PARTS], [PARTS[:1], PARTS[1:5], [], PARTS[5:]]])
def test_a_stream_put_together_is_the_whole_message(pieces: list[list[AnswerPart]]) -> None:
    (whole,) = writer(Told(PARTS)).whole(None)
    message = json.loads(whole)
    blocks: list[dict[str, Any]] = []
    told = events(Told(PARTS), pieces)
    assert told[0][0] == "message_start"
    assert [name for name, _ in told][-2:] == ["message_delta", "message_stop"]
    written: dict[int, str] = {}
    for name, event in told:
        assert event["type"] == name
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif name == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                blocks[event["index"]][key] += delta[key]
    for index, text in written.items():
        blocks[index]["input"] = json.loads(text)
    assert sum(name == "content_block_stop" for name, _ in told) == len(blocks) == 4
    assert blocks == message["content"], "ids of calls too"
    assert message["stop_reason"] == "tool_use" == told[-2][1]["delta"]["stop_reason"]
    assert message["usage"] == told[-2][1]["usage"]
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 10


@pytest.mark.parametrize(
    ("told", "reason", "stop"),
    [
        (Told([], "length"), "max_tokens", None),
        (Told([], "stop", "END"), "stop_sequence", "END"),
        (Told([], "stop"), "end_turn", None),
        (Told(None, "stop", 5), "end_turn", None),
        (Told([CallPart("f"), ArgumentsPart('{"a')], "length"), "max_tokens", None),
    ],
)
def test_an_ending_has_its_word(told: Told, reason: str, stop: str | None) -> None:
    message = json.loads(b"".join(writer(told).whole({"a": 1})))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert message["twinpool"] == {"a": 1}
    if told.calls:
        assert message["content"][0]["input"] == {}, "what was cut is no JSON"


def test_the_endpoint_answers_and_streams_the_same_text(server: Server) -> None:
    asked = {**ASK, "seed": 1}
    whole = server.post("/v1/messages", asked).json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    lines = server.post("/v1/messages", {**asked, "stream": True}).text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    text = "".join(e["delta"]["text"] for e in told if e["type"] == "content_block_delta")
    assert text == "".join(block["text"] for block in whole["content"])
    assert told[-1]["type"] == "message_stop"
    prompt = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert server.post("/v1/messages/count_tokens", {"messages": ASK["messages"]}).json() == {"input_tokens": prompt}


@pytest.mark.parametrize(
    ("asked", "status", "kind"),
    [
        ({"model": "gone"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"thread": {"type": "create"}}, 400, "invalid_request_error"),
    ],
)
def test_an_error_has_anthropics_shape(server: Server, asked: dict[str, Any], status: int, kind: str) -> None:
    answer = server.post("/v1/messages", {**ASK, **asked})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
