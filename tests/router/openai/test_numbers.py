"""Numbers of every size and kind in every field: what is out of range is told the range, and nothing takes long."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from tests.router.http_server import Server
from twinpool.contracts.errors import RequestError
from twinpool.router.openai.request_fields import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    STREAM_OPTIONS,
    TOKENIZE,
    RequestField,
)
from twinpool.router.tokenizer_pool import prepare_request
from twinpool.router.tokenizer_pool.prepare_request import read_json

COUNT = 2**31 - 1
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, COUNT),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 1),
    "min_tokens": (0, COUNT),
    "max_tokens": (0, COUNT),
    "max_completion_tokens": (1, COUNT),
    "max_output_tokens": (1, COUNT),
    "n": (1, 128),
    "truncate_prompt_tokens": (-1, COUNT),
    "priority": (-(2**63), 2**63 - 1),
    "timeout": (0, 10**9),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
ABOVE = {"repetition_penalty", "timeout"}
"""Whose lower bound is excluded."""
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
RESPONSE = {"input": "hello", "max_output_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 2},
    "/v1/chat/completions": HELLO,
    "/v1/messages": HELLO,
    "/v1/responses": RESPONSE,
    "/v1/messages/count_tokens": HELLO,
    "/v1/responses/input_tokens": RESPONSE,
}
NOT_THERE = {
    "/v1/messages": {"n", "top_logprobs", "prompt_logprobs", "max_completion_tokens"},
    "/v1/responses": {"n", "top_logprobs", "prompt_logprobs", "max_tokens", "max_completion_tokens"},
}
"""Fields of chats that these endpoints refuse by name, whatever their value."""
LONG = "9" * 5000
HOSTILE = {
    "5000 digits": LONG,
    "-5000 digits": f"-{LONG}",
    "1e400": "1e400",
    "-1e400": "-1e400",
    "401 digits": str(10**400),
    "-401 digits": str(-(10**400)),
    "true": "true",
    "a string": '"5"',
    "an array": "[5]",
    "an object": "{}",
}


def numeric(fields: dict[str, RequestField]) -> set[str]:
    return {name for name, field in fields.items() if field.kind in ("integer", "number")}


def table(path: str) -> set[str]:
    """The numeric fields of an endpoint."""
    if "completions" in path:
        return numeric(COMPLETION if path == "/v1/completions" else CHAT)
    base = "/v1/messages" if "messages" in path else "/v1/responses"
    return (numeric(CHAT) | ({"max_output_tokens"} if base == "/v1/responses" else set())) - NOT_THERE[base]


def post(server: Server, path: str, place: str, number: str) -> httpx.Response:
    """Ask with a field of a body in JSON as it is written."""
    others = {name: value for name, value in BODIES[path].items() if name != place}
    text = json.dumps(others)[:-1] + f', "{place}": {number}}}'
    return server.client.post(path, content=text.encode())


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"]) < 400
    return error


def lowest(path: str, name: str) -> float:
    return 1 if name == "max_tokens" and path != "/v1/completions" else RANGES[name][0]


def test_the_ranges_here_are_of_all_fields() -> None:
    tables = numeric(COMPLETION) | numeric(CHAT) | {"max_output_tokens"}
    assert tables == RANGES.keys()
    assert not numeric(TOKENIZE) | numeric(DETOKENIZE) | numeric(STREAM_OPTIONS)


@pytest.mark.parametrize("path", BODIES)
def test_a_number_out_of_range_is_told_the_range(server: Server, path: str) -> None:
    for name in sorted(table(path)):
        low, high = lowest(path, name), RANGES[name][1]
        step = 1 if high > 100 or name in ("n", "logprobs", "top_logprobs") else 0.25
        words = ("above", "and at most") if name in ABOVE else ("from", "to")
        for number in (*map(str, (low - step, high + step)), *HOSTILE.values()):
            error = error_of(post(server, path, name, number))
            assert f" {words[0]} {low} {words[1]} {high}; got " in error["message"], (name, number[:20])
            assert error.get("param", name) == name, "errors of messages have none"
    for name in ABOVE:
        assert "above 0 and at most" in error_of(post(server, path, name, "0"))["message"]


@pytest.mark.parametrize("path", BODIES)
def test_the_ends_of_a_range_are_within(server: Server, path: str) -> None:
    for name in sorted(table(path)):
        for number in (lowest(path, name), RANGES[name][1]):
            if number == 0 and name in ABOVE:
                continue
            response = post(server, path, name, str(number))
            assert "must be" not in response.text, (name, number)
            assert response.status_code in (200, 400), (name, number)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_number_in_json_is_none_here(server: Server, path: str, number: str) -> None:
    for name in sorted(table(path)):
        error = error_of(post(server, path, name, number))
        assert error["message"] == f"the body is not valid JSON: {number} is no JSON number"


WITHIN = {
    "/v1/completions": (
        '"logit_bias": {"5": NUMBER}', '"logit_bias": {"NUMBER": 1}', '"prompt": [5, NUMBER]', '"stop": ["x", NUMBER]',
        '"prompt": [[5], [6, NUMBER]]', '"stop_token_ids": [NUMBER]', '"allowed_token_ids": [5, NUMBER]',
        '"stream": true, "stream_options": {"include_usage": NUMBER}', '"metadata": {"a": [1, {"b": NUMBER}]}',
        '"guided_json": {"type": "integer", "minimum": NUMBER}', '"guided_json": {"type": "number", "maximum": NUMBER}',
        '"guided_json": {"type": "string", "maxLength": NUMBER}', '"guided_json": {"const": NUMBER}',
        '"guided_json": {"enum": ["a", NUMBER]}', '"guided_json": {"type": "integer", "multipleOf": NUMBER}',
        '"guided_json": {"type": "array", "items": {"type": "null"}, "minItems": NUMBER}',
        '"guided_json": {"type": "object", "maxProperties": NUMBER}', '"structured_outputs": {"choice": ["a", NUMBER]}',
        '"unheard_of": {"a": NUMBER}', '"suffix": [NUMBER]', '"user": NUMBER', '"model": NUMBER', '"echo": NUMBER',
    ),
    "/v1/chat/completions": (
        '"messages": [{"role": "user", "content": NUMBER}]', '"messages": [{"role": "user", "content": [NUMBER]}]',
        '"messages": [{"role": "user", "content": "a", "name": NUMBER}]', '"chat_template_kwargs": {"a": NUMBER}',
        '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": NUMBER}}}]}]',
        '"messages": [{"role": "assistant", "tool_calls": '
        '[{"function": {"name": "f", "arguments": "{\\"a\\": NUMBER}"}}]}]',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": '
        '{"a": {"type": "integer", "maximum": NUMBER}}}}}], "tool_choice": "required"',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": NUMBER}}}]',
        '"reasoning_effort": NUMBER', '"response_format": {"type": NUMBER}', '"parallel_tool_calls": NUMBER',
    ),
    "/v1/messages": (
        '"thinking": {"type": "enabled", "budget_tokens": NUMBER}', '"output_config": {"effort": NUMBER}',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": NUMBER}]}]', '"system": NUMBER',
        '"tools": [{"name": "f", "input_schema": {"type": "object", "x": NUMBER}}]', '"stop_sequences": [NUMBER]',
        '"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": '
        '{"a": NUMBER}}]}]',
    ),
    "/v1/responses": (
        '"reasoning": {"effort": NUMBER}', '"metadata": {"a": NUMBER}', '"text": {"format": {"type": NUMBER}}',
        '"input": [{"role": "user", "content": [{"type": "input_text", "text": NUMBER}]}]', '"instructions": NUMBER',
        '"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "integer", "maximum": NUMBER}}}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "x": NUMBER}}]',
        '"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\\"a\\": NUMBER}"}]',
        '"include": [NUMBER]', '"user": NUMBER', '"truncation": NUMBER', '"text": {"verbosity": NUMBER}',
    ),
    "/tokenize": ('"prompt": NUMBER', '"add_special_tokens": NUMBER', '"messages": [NUMBER]', '"tools": [NUMBER]'),
    "/detokenize": ('"tokens": [5, NUMBER]', '"tokens": NUMBER'),
}  # fmt: skip
SIZES = (
    LONG, f"-{LONG}", "1e400", "-1e400", str(10**400), str(-(10**400)), str(10**4299), "1e308", "5e-324", "-0.0",
    "0.1", "-1", str(2**53 + 1), str(2**64), "1" + "0" * 30 + ".5e-20",
)  # fmt: skip


def strictly(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
@pytest.mark.parametrize("path", WITHIN)
def test_a_number_within_a_field_is_taken_or_refused_by_name(server: Server, path: str) -> None:
    for fields in WITHIN[path]:
        names = {name for name in strictly("{" + fields.replace("NUMBER", "0") + "}")}
        for number in SIZES:
            others = {name: value for name, value in BODIES.get(path, {}).items() if name not in names}
            text = json.dumps(others)[:-1] + (", " if others else "") + fields.replace("NUMBER", number) + "}"
            response = server.client.post(path, content=text.encode())
            if "stream" in names and response.status_code == 200:
                continue
            assert response.status_code in (200, 400, 404), (fields, number[:20], response.text)
            answer = strictly(response.text)
            if response.status_code != 200 and path != "/v1/messages":
                known = names | {"include_usage", "prompt", "messages", "input"}  # Numbers may fill the context.
                assert answer["error"]["param"] in known, (fields, number[:20], answer)
            assert len(response.text) < 20_000


def test_long_numbers_are_never_read_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an integer takes the square of its length, a float its length: only short ones are tried."""
    tried: list[int] = []

    def integer(text: str) -> int:
        tried.append(len(text))
        return int(text)

    monkeypatch.setattr(prepare_request, "int", integer, raising=False)
    tree = read_json(f'{{"n": 12, "seed": {"9" * 1_000_000}, "top_k": -{"9" * 5000}}}'.encode())
    assert tree == {"n": 12, "seed": math.inf, "top_k": -math.inf}
    assert tried == [2]


def test_a_large_number_deep_within_is_found_by_its_place() -> None:
    """Its place is short, however long the names that lead to it."""
    name = "x" * 100_000
    with pytest.raises(RequestError) as raised:
        read_json(json.dumps({"a": {name: [1, {name: "NUMBER"}]}}).replace('"NUMBER"', LONG).encode())
    assert raised.value.param == "a"
    assert str(raised.value) == f"a.{'x' * 64}.1.{'x' * 64}: the number is too large to be read"


def test_what_is_no_json_is_told_as_before() -> None:
    for body, message in ((b'{"a": 1e400, ', "Expecting property"), (b'{"a": 1e400, "b": NaN}', "NaN is no JSON")):
        with pytest.raises(RequestError, match=message):
            read_json(body)
