"""Bodies of OpenAI's Responses API as bodies of chats: what each field becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.contracts.errors import RequestError
from twinpool.router.openai_responses.responses_request import read_responses, renamed

ASK: dict[str, Any] = {"model": "demo", "input": "hello"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"n": 1}', "status": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "one"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def said(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part], **more}


def called(*calls: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [{"id": i, "type": "function", "function": {"name": name, "arguments": a}} for i, name, a in calls]


TALKS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("hello", [{"role": "user", "content": "hello"}]),
    (
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a\nb"}],
    ),
    (
        [
            {"role": "user", "content": "?"},
            THOUGHT,
            said("I look."),
            CALL,
            {**CALL, "call_id": "c2", "name": "g", "arguments": "{}"},
            OUTPUT,
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            said("Both."),
        ],
        [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "I look.",
                "tool_calls": called(("c1", "f", '{"n": 1}'), ("c2", "g", "{}")),
            },
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "name": "g", "content": "two"},
            {"role": "assistant", "content": "Both."},
        ],
    ),
    (
        [CALL, said("after a call"), said("and again"), {**THOUGHT, "content": None, "summary": []}, THOUGHT],
        [
            {"role": "assistant", "content": "", "tool_calls": called(("c1", "f", '{"n": 1}'))},
            {"role": "assistant", "content": "after a call"},
            {"role": "assistant", "content": "and again"},
            {"role": "assistant", "content": "", "reasoning_content": ""},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ],
    ),
    (
        [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "in short"}]}],
        [{"role": "assistant", "content": "", "reasoning_content": "in short"}],
    ),
]


@pytest.mark.parametrize(("items", "messages"), TALKS)
def test_items_become_the_messages_of_a_chat(items: Any, messages: list[dict[str, Any]]) -> None:
    assert read_responses({"input": items}).chat["messages"] == messages


def test_instructions_come_first() -> None:
    assert read_responses({**ASK, "instructions": "Be brief."}).chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]


def _format(**asked: Any) -> dict[str, Any]:
    return {"text": {"format": asked, "verbosity": "medium"}}


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9},
    ),
    ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
    ({"metadata": {"a": "b"}, "user": "u"}, {"metadata": {"a": "b"}, "user": "u"}),
    (
        {"tools": [TOOL]},
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
                }
            ]
        },
    ),
    ({"tools": [{"type": "function", "name": "f"}]}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        {"tool_choice": {"type": "function", "name": "f"}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
            }
        },
    ),
    (_format(type="text"), {}),
    (_format(type="json_object"), {"response_format": {"type": "json_object"}}),
    (
        _format(type="json_schema", name="p", strict=True, schema=SCHEMA),
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    (
        {"include": ["reasoning.encrypted_content"], "truncation": "disabled", "service_tier": "auto"},
        {"service_tier": "auto"},
    ),
    ({"store": True}, {"store": True}),  # As in chats; the answer says that it isn't stored.
    ({"store": False}, {"store": False}),
    ({"background": False, "previous_response_id": None, "top_logprobs": 0}, {}),
    ({"max_output_tokens": None, "tools": None, "text": None, "seed": None, "n": None}, {}),
    ({"seed": 5, "min_p": 0.1}, {"seed": 5, "min_p": 0.1}),
]


@pytest.mark.parametrize(("asked", "chat"), FIELDS, ids=str)
def test_a_field_becomes_the_one_of_chats(asked: dict[str, Any], chat: dict[str, Any]) -> None:
    found = read_responses({**ASK, **asked}).chat
    assert {name: value for name, value in found.items() if name not in ("model", "messages")} == chat


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "a string or an array"),
    ({"input": []}, "input", "at least one item"),
    ({"input": [5]}, "input", r"input\[0\] must be an object"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "role"),
    ({"input": [{"role": "user", "content": 5}]}, "input", "content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "input",
        "files aren't stored",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": 5}]}]}, "input", "image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input", "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input", "input_audio"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "with a text"),
    ({"input": [OUTPUT]}, "input", "aren't stored"),
    ({"input": [CALL, CALL]}, "input", "twice"),
    ({"input": [{**CALL, "name": 5}]}, "input", "name"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "nothing is stored"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "web_search_call"),
    ({"input": [{"type": "reasoning", "summary": 5}]}, "input", "summary"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input", "another server"),
    ({"instructions": 5}, "instructions", "string"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "aren't stored"),
    ({"conversation": "conv_1"}, "conversation", "aren't stored"),
    ({"background": True}, "background", "stream"),
    ({"prompt": {"id": "p"}}, "prompt", "aren't stored"),
    ({"include": ["file_search_call.results"]}, "include", "file_search"),
    ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include", "logprobs"),
    ({"include": "x"}, "include", "not supported"),
    ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
    ({"max_output_tokens": 0}, "max_output_tokens", "from 1 to 2147483647"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "integer"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"messages": []}, "messages", "use input"),
    ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
    ({"n": 2}, "n", "/v1/chat/completions"),
    ({"tools": {}}, "tools", "array"),
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools", "custom"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "required"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["f"]}}, "tool_choice", "is named by"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "allowed_tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "json_schema"),
    ({"text": {"verbosity": "low"}}, "text", "verbosity"),
    ({"text": 5}, "text", "format"),
    ({"reasoning": {"mode": "pro"}}, "reasoning", "standard"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning", "auto"),
    ({"truncation": "auto"}, "truncation", "shorten"),
    ({"user": 5}, "user", "a string"),
    ({"prompt_cache_key": {}}, "prompt_cache_key", "a string"),
    ({"metadata": {"a": 5}}, "metadata", "strings"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
]


@pytest.mark.parametrize(("asked", "param", "text"), WRONG, ids=str)
def test_what_is_wrong_or_not_there_is_named(asked: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        read_responses({**ASK, **asked})
    assert caught.value.param == param


def test_an_error_about_a_chats_field_names_the_one_that_was_sent() -> None:
    error = renamed(RequestError("response_format.json_schema.schema is missing", param="response_format"))
    assert (str(error), error.param) == ("text.format.schema is missing", "text")
    other = RequestError("seed must be an integer", param="seed")
    assert renamed(other) is other


def test_the_answer_repeats_what_was_asked() -> None:
    asked = {
        **ASK,
        "tools": [{"type": "function", "name": "f"}],
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
    }
    found = read_responses(asked).repeated
    assert found["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
    ]
    assert found["reasoning"] == {"effort": "low", "summary": None}
    assert (found["metadata"], found["tool_choice"], found["text"]) == (
        {"a": "b"},
        "auto",
        {"format": {"type": "text"}},
    )
