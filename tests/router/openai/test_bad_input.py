"""Every bad request gets a clear error at once, in OpenAI's shape, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, demo_spec, router_config, serving
from twinpool.contracts.errors import ErrorKind

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK = {"prompt": [5, 6], "max_tokens": 2}
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def _tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def _called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": "5"}, "max_tokens", 'must be an integer from 0 to 2147483647; got "5"'),
    ({"max_tokens": True}, "max_tokens", "must be an integer from 0 to 2147483647; got true"),
    ({"max_tokens": 1.5}, "max_tokens", "must be an integer from 0 to 2147483647; got 1.5"),
    ({"max_tokens": -1}, "max_tokens", "from 0 to 2147483647; got -1"),
    ({"max_tokens": 10**30}, "max_tokens", "from 0 to 2147483647"),
    ({"max_tokens": 2047}, "max_tokens", "2 tokens) and max_tokens (2047) make 2049; the context is 2048"),
    ({"n": 0}, "n", "from 1 to 128"),
    ({"n": 129}, "n", "from 1 to 128"),
    ({"n": True}, "n", "must be an integer"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"temperature": 10**400}, "temperature", "from 0 to 100"),
    ({"top_p": -0.1}, "top_p", "from 0 to 1"),
    ({"top_p": 1.01}, "top_p", "from 0 to 1"),
    ({"top_k": -2}, "top_k", "from -1 to 2147483647"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    ({"seed": 2**63}, "seed", "from -9223372036854775808 to 9223372036854775807"),
    ({"seed": 1.5}, "seed", "must be an integer"),
    ({"priority": "high"}, "priority", "must be an integer"),
    ({"priority": 2**63}, "priority", "to 9223372036854775807"),
    ({"timeout": 0}, "timeout", "above 0"),
    ({"timeout": "1s"}, "timeout", "must be a number"),
    ({"timeout": 3601}, "timeout", "above the server's limit of 3600 s"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream": 1}, "stream", "true or false"),
    ({"echo": 1}, "echo", "true or false"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"logprobs": True}, "logprobs", "must be an integer"),
    ({"stop": 5}, "stop", "a string or an array of strings"),
    ({"stop": ["a", 5]}, "stop", "a string or an array of strings"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "1 to 1024"),
    ({"stop_token_ids": [5000000]}, "stop_token_ids", "out of range"),
    ({"stop_token_ids": "5"}, "stop_token_ids", "arrays of token ids"),
    ({"min_tokens": 3}, "min_tokens", "above max_tokens 2"),
    ({"min_tokens": 1, "stop_token_ids": list(range(2048))}, "min_tokens", "leaves no token"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "out of range"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": [5]}, "logit_bias", "an object"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids", "out of range"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "arrays of token ids"),
    ({"allowed_token_ids": [5, 6], "stop_token_ids": [6, 5], "min_tokens": 1}, "min_tokens", "allowed_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
    ({"stream": True, "stream_options": 5}, "stream_options", "an object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "true or false"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 2}, "best_of", "only 1 is supported"),
    ({"guided_json": [1]}, "guided_json", "JSON schema"),
    ({"guided_json": {"type": "object"}, "regex": "a"}, "regex", "combined"),
    ({"guided_json": {"x-guidance": {}}}, "guided_json", "no keyword"),
    ({"structured_outputs": {"nope": 1}}, "structured_outputs", "nope"),
    ({"guided_regex": "a("}, "guided_regex", "can't be followed"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "can't be combined"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_choice": ["a"], "allowed_token_ids": [5]}, "allowed_token_ids", "can't be combined"),
    ({"prompt": None}, "prompt", "missing or empty"),
    ({"prompt": []}, "prompt", "missing or empty"),
    ({"prompt": ""}, "prompt", "no token to begin with"),
    ({"prompt": [[]]}, "prompt", "no token to begin with"),
    ({"prompt": {"a": 1}}, "prompt", "a string, an array of token ids, or an array of either"),
    ({"prompt": [5, "a"]}, "prompt", "must be integers"),
    ({"prompt": ["a", 5]}, "prompt", "arrays of token ids"),
    ({"prompt": [5, True]}, "prompt", "must be integers"),
    ({"prompt": [5, 1.5]}, "prompt", "must be integers"),
    ({"prompt": [5, -1]}, "prompt", "token id -1 is out of range"),
    ({"prompt": [5, 2**70]}, "prompt", "out of range"),
    ({"prompt": [5] * 2048}, "prompt", "2048 tokens; the context of 2048"),
    ({"prompt": "word " * 20000}, "prompt", "tokens"),
    ({"prompt": "\ud800"}, "prompt", "surrogates"),
    ({"model": 5}, "model", "must be a string"),
]


@pytest.mark.parametrize(("wrong", "param", "message"), WRONG_FIELDS, ids=lambda v: str(v)[:40])
def test_a_wrong_field_is_named_with_what_is_right(
    server: Server, wrong: dict[str, Any], param: str, message: str
) -> None:
    response = server.client.post(COMPLETIONS, content=json.dumps({**OK, **wrong}).encode())
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "at least one message"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "at least one message"),
    ({"messages": ["hi"]}, "messages", "messages[0] must be an object"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages", "part of type text or image_url"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "this server takes no images"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "must have a function"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", "must be an array"),
    ({"messages": [_called("[1]")]}, "messages", "must be a JSON object"),
    ({"messages": [_called("{'a': 1}")]}, "messages", "not valid JSON"),
    ({"messages": [_called('{"a" 1}')]}, "messages", "not valid JSON"),
    ({"messages": [_called("[1")]}, "messages", "not valid JSON"),
    (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages",
        "use tool_calls",
    ),
    ({"tools": {}}, "tools", "must be an array"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be"),
    ({"tools": [_tool("f"), _tool("f")]}, "tools", "there twice"),
    ({"tools": [_tool("a b")]}, "tools", "letters, digits"),
    ({"tools": [_tool("f", parameters={"type": "array"})]}, "tools", "of an object"),
    ({"tools": [_tool("f", parameters={"type": "object", "properties": {"a": 5}})]}, "tools", "object of schemas"),
    ({"tools": [_tool("f", strict="yes")]}, "tools", "strict"),
    ({"tools": [_tool(f"f{n}") for n in range(129)]}, "tools", "at most 128"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [_tool("f")], "tool_choice": "any"}, "tool_choice", "required"),
    ({"tools": [_tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "no tool"),
    (
        {"tools": [_tool("f")], "tool_choice": _allowed("auto", {"function": {"name": "f"}})},
        "tool_choice",
        "is named by",
    ),
    ({"tools": [_tool("f")], "tool_choice": _allowed("required", _tool("f"), _tool("g"))}, "tool_choice", "no tool"),
    ({"tools": [_tool("f")], "tool_choice": _allowed("required")}, "tool_choice", "allowed_tools"),
    ({"tools": [_tool("f")], "tool_choice": _allowed("any", _tool("f"))}, "tool_choice", "allowed_tools"),
    ({"tools": [_tool("f")], "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"tools": [_tool("f")], "tool_choice": "required", "regex": "a"}, "tool_choice", "another output"),
    (
        {"tools": [_tool("f", parameters={"type": "object", "uniqueItems": 1, "not": {}})], "tool_choice": "required"},
        "tools",
        "can't be followed",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort", "one of none"),
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "missing"),
    ({"max_tokens": 0}, "max_tokens", "from 1 to 2147483647"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "from 1 to"),
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"functions": [{}]}, "functions", "use tools"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "checkpoint only"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "an object"),
]


@pytest.mark.parametrize(("wrong", "param", "message"), CHAT_FIELDS, ids=lambda v: str(v)[:40])
def test_a_wrong_chat_field_is_named_too(server: Server, wrong: dict[str, Any], param: str, message: str) -> None:
    error = server.refused(CHAT, {"messages": HELLO, "max_tokens": 2, **wrong})
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": NaN}', "NaN is no JSON number"),
        (b'{"temperature": Infinity, "prompt": [5]}', "Infinity is no JSON number"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 60_000, "not valid JSON"),
        (b"[" * 100_000, "more than 65536 lists and objects"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(server: Server, path: str, body: bytes, message: str) -> None:
    response = server.client.post(path, content=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_number_beyond_all_floats_is_out_of_range(server: Server) -> None:
    response = server.client.post(COMPLETIONS, content=b'{"prompt": [5], "temperature": 1e999}')
    assert response.status_code == 400
    assert "from 0 to 100" in response.json()["error"]["message"]


def test_unknown_models_paths_and_methods_are_named(server: Server) -> None:
    error = server.refused(COMPLETIONS, {**OK, "model": "gpt-9"}, 404)
    assert error["code"] == "model_not_found"
    assert "gpt-9" in error["message"]
    assert "demo" in error["message"]
    assert server.client.get("/v1/models/nope").status_code == 404
    assert server.client.get("/v2/x").json()["error"]["message"] == "no such endpoint: /v2/x"
    assert server.client.get(COMPLETIONS).status_code == 405
    assert server.client.delete("/v1/models").status_code == 405


def test_nulls_and_fields_without_effect_are_ignored(server: Server) -> None:
    body = {**OK, "user": "me", "frobnicate": None, "temperature": None, "stop": None, "suffix": None, "tools": None}
    assert server.post(COMPLETIONS, body).status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    limit = server.service.body_limit
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (16 * 2**20))
        client.sendall(b"x" * 1000)
        answer = b""
        while f"the limit is {limit}".encode() not in answer:
            answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    # A client that sends all of it before it listens, as most do, hears it too.
    response = server.client.post(COMPLETIONS, content=b"x" * (16 * 2**20))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_chunked_body_is_counted_while_it_is_read(server: Server) -> None:
    chunks = (b"x" * 2**20 for _ in range(10))
    assert server.client.post(COMPLETIONS, content=chunks).status_code == 413


@pytest.mark.slow
def test_a_full_queue_says_so_and_when_to_come_back(server: Server) -> None:
    config = router_config(max_queue=3, worker_wait_s=5.0)
    with serving(FakeCluster(), config=config) as full:
        assert full.post(COMPLETIONS, {**OK, "n": 4}).status_code == 400
        full.call(full.cluster["prefill-0"].pause)
        waiting = threading.Thread(target=full.post, args=(COMPLETIONS, {**OK, "n": 2}))
        waiting.start()
        full.wait_until(lambda: full.service.core.requests.in_flight == 2)
        response = full.post(COMPLETIONS, {**OK, "n": 2})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        full.call(full.cluster["prefill-0"].resume)
        waiting.join(60)
        assert full.post(COMPLETIONS, {**OK, "n": 2}).status_code == 200
        full.at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_pool_can_never_hold_is_refused_with_numbers(role: str) -> None:
    cluster = FakeCluster()
    cluster[f"{role}-0"].positions = 100
    with serving(cluster) as small:
        error = small.refused(COMPLETIONS, {"prompt": [5] * 101, "max_tokens": 2})
        assert error["param"] == "prompt"
        assert f"101 tokens) and answer (2) make 103; the {role} workers' pools hold 100 positions" in error["message"]
        assert small.refused(COMPLETIONS, {"prompt": [5] * 50, "max_tokens": 51})["param"] == "max_tokens"
        assert small.complete(prompt=[5] * 90)["usage"]["completion_tokens"] == 10


@pytest.mark.slow
def test_an_empty_prompt_begins_with_the_models_own_token() -> None:
    with serving(FakeCluster(), spec=demo_spec(bos_token_id=1)) as server:
        body = server.complete(prompt="", max_tokens=2, return_token_ids=True)
        assert body["choices"][0]["prompt_token_ids"] == [1]


@pytest.mark.parametrize(
    ("kind", "status"), [(ErrorKind.INVALID, 400), (ErrorKind.OVERLOADED, 503), (ErrorKind.DEADLINE, 504)]
)
def test_a_workers_refusal_keeps_its_meaning(server: Server, kind: ErrorKind, status: int) -> None:
    for name in ("prefill-0", "prefill-1"):
        server.cluster[name].refusals = [kind]
    response = server.post(COMPLETIONS, OK)
    assert response.status_code == status
    assert response.json()["error"]["message"] == f"planted: {kind}"
    assert (response.headers.get("retry-after") == "1") == (status == 503)
