"""What a worker refuses names the field of the request at fault, in the form of each API, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.http_server import Server
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Done

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
OF_RESPONSES = {"format": {"type": "json_schema", "name": "a", "schema": {"const": 1}}}
REFUSED: list[tuple[str, dict[str, Any], ErrorKind, str | None]] = [
    ("/v1/completions", {"prompt": [5, 6]}, ErrorKind.TOO_LONG, "prompt"),
    ("/v1/chat/completions", {"messages": HELLO}, ErrorKind.TOO_LONG, "messages"),
    ("/v1/responses", {"input": "hello"}, ErrorKind.TOO_LONG, "input"),
    ("/v1/completions", {"prompt": [5], "guided_regex": "a"}, ErrorKind.GRAMMAR, "guided_regex"),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"regex": "a"}}, ErrorKind.GRAMMAR, "structured_outputs"),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_object"}},
        ErrorKind.GRAMMAR,
        "response_format",
    ),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"},
        ErrorKind.GRAMMAR,
        "tools",
    ),
    ("/v1/responses", {"input": "hello", "text": OF_RESPONSES}, ErrorKind.GRAMMAR, "text"),
    ("/v1/completions", {"prompt": [5, 6]}, ErrorKind.GRAMMAR, None),
    ("/v1/completions", {"prompt": [5, 6]}, ErrorKind.INVALID, None),
    ("/v1/completions", {"prompt": [5, 6]}, ErrorKind.DEADLINE, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "kind", "param"), REFUSED, ids=lambda v: str(v)[:30])
def test_a_refusal_before_the_answer_names_the_field(
    server: Server, path: str, body: dict[str, Any], kind: ErrorKind, param: str | None, stream: bool
) -> None:
    for name in ("prefill-0", "prefill-1"):
        server.cluster[name].refusals = [kind]
    response = server.post(path, {**body, "stream": stream})
    assert response.status_code == (504 if kind is ErrorKind.DEADLINE else 400)
    assert response.headers["content-type"] == "application/json"
    code = "deadline" if kind is ErrorKind.DEADLINE else "invalid"
    kind_of_error = "server_error" if kind is ErrorKind.DEADLINE else "invalid_request_error"
    error = {"message": f"planted: {kind}", "type": kind_of_error, "param": param, "code": code}
    assert response.json() == {"error": error}


def test_messages_have_no_field_in_the_form_of_their_errors(server: Server) -> None:
    for name in ("prefill-0", "prefill-1"):
        server.cluster[name].refusals = [ErrorKind.TOO_LONG]
    response = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 4})
    assert response.status_code == 400
    error = {"type": "invalid_request_error", "message": f"planted: {ErrorKind.TOO_LONG}"}
    assert response.json() == {"type": "error", "error": error}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            "/v1/completions",
            {"prompt": [5], "guided_regex": "a{9}"},
            {"error": {"type": "invalid_request_error", "param": "guided_regex", "code": "invalid"}},
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            {"error": {"type": "invalid_request_error", "param": "response_format", "code": "invalid"}},
        ),
        (
            "/v1/responses",
            {"input": "hello", "text": OF_RESPONSES},
            {"type": "response.failed", "response": {"status": "failed", "error": {"code": "invalid_prompt"}}},
        ),
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 9, "output_config": OF_RESPONSES},
            {"type": "error", "error": {"type": "invalid_request_error"}},
        ),
    ],
)
def test_a_refusal_in_mid_stream_names_it_too(
    server: Server, path: str, body: dict[str, Any], told: dict[str, Any]
) -> None:
    server.pause("decode")
    with server.client.stream("POST", path, json={**body, "stream": True, "max_output_tokens": 9}) as response:
        lines = response.iter_lines()
        assert "data: " in next(line for line in lines if line.startswith("data: "))
        worker = server.call(lambda: next(w for w in server.cluster.workers.values() if w.legs))
        leg = next(iter(worker.legs.values()))
        done = Done(leg.submit.request_id, 0, "error", error=ErrorKind.GRAMMAR, message="planted")
        server.call(lambda: leg.session.on_events([done]))
        last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    server.call(worker.legs.clear)
    assert contains(last, told)
    assert "planted" in json.dumps(last)


def contains(whole: Any, part: Any) -> bool:
    if not isinstance(part, dict):
        return bool(whole == part)
    return isinstance(whole, dict) and all(name in whole and contains(whole[name], each) for name, each in part.items())
