"""Requests that schemathesis draws from `/openapi.json`, sent to a router whose answers must be described there."""

from __future__ import annotations

from typing import Any

from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.router.http_server import Server
from twinpool.router.openai.request_fields import STRUCTURED_OUTPUT

CHECKS: Any = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def shortened(body: Any) -> Any:
    """A body whose answers are short, and with no deadline of its own, which is answered 504."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if name != "timeout"}
    for name, most in (("max_tokens", 8), ("max_completion_tokens", 8), ("max_output_tokens", 8), ("n", 4)):
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    return body


def tempered(body: Any) -> Any:
    """A body without what most random ones are refused for: names of models, grammars, and tokens that aren't there."""
    if not isinstance(body, dict):
        return body
    grammars = [name for name in STRUCTURED_OUTPUT if body.get(name) is not None]
    left_out = {"model", "allowed_token_ids", "stop_token_ids", "logit_bias", "min_tokens", *grammars[1:]}
    if not body.get("tools"):
        left_out.add("tool_choice")
    if body.get("stream") is not True:
        left_out.add("stream_options")
    kept = {name: value for name, value in body.items() if name not in left_out and value is not None}
    return {**kept, "prompt": "x"} if kept.get("prompt") in ("", [], [""]) else kept


def described(server: Server, case: Any) -> None:
    """Send a request, as it was drawn and tempered; the answers must be ones that the document describes."""
    drawn = shortened(case.body)
    for body in (drawn, tempered(drawn)):
        case.body = body
        case.call_and_validate(base_url=server.url, checks=CHECKS)
