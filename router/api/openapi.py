"""The document at `/openapi.json`, made from the same tables that requests are read with, so that the two agree."""

from __future__ import annotations

from functools import cache
from typing import Any

from twinpool.contracts.build_id import package_version
from twinpool.router.api.openapi_answers import (
    COUNTING,
    GENERATION,
    LISTING,
    OPEN,
    OPERATION,
    SCHEMAS,
    answers,
)
from twinpool.router.api.openapi_bodies import BODIES, TEXT
from twinpool.router.openai.resume_headers import KEY_HEADER, MAX_KEY_CHARS, SEEN_HEADER
from twinpool.router.service.request_limits import SESSION_HEADER, SLO_HEADER

_GENERATE = {
    "/v1/completions": ("Complete prompts", "Completion"),
    "/v1/chat/completions": ("Answer a chat", "ChatCompletion"),
    "/v1/messages": ("Answer a chat in the shape of Anthropic's Messages API", "Message"),
    "/v1/responses": ("Answer a chat in the shape of OpenAI's Responses API", "Response"),
}
_GENERATE_HEADERS = [
    {
        "name": SLO_HEADER,
        "in": "header",
        "required": False,
        "description": "Milliseconds to the first token beyond which the answer is of no use: then it is a 429.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10**9 - 1},
    },
    {
        "name": SESSION_HEADER,
        "in": "header",
        "required": False,
        "description": "Names a session, as the field user does; comes before it.",
        "schema": {"type": "string"},
    },
    {
        "name": KEY_HEADER,
        "in": "header",
        "required": False,
        "description": "The name under which the answer is kept for a client that comes back for it.",
        "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_KEY_CHARS}}}$"},
    },
    {
        "name": SEEN_HEADER,
        "in": "header",
        "required": False,
        "description": "The id of the last event that the client has of the answer with this key; the rest comes.",
        "schema": {"type": "string"},
    },
]
_COUNT = {
    "/v1/messages/count_tokens": ("Count the tokens of a body of /v1/messages", "MessageTokens"),
    "/v1/responses/input_tokens": ("Count the tokens of a body of /v1/responses", "ResponseTokens"),
    "/tokenize": ("Text or chat to token ids", "Tokens"),
    "/detokenize": ("Token ids to text", "Text"),
}
_LIST = {
    "/v1/models": ("The served model, under each of its names", "Models"),
    "/v1/models/{model}": ("One model", "Model"),
}
_HEALTH = "200 while requests can be served and work advances, else 503"
_OPEN = {
    "/": ("What is here, as a page for browsers and as JSON", "Operation"),
    "/live": ("200 while the process runs", "Live"),
    "/version": ("The server's version", "Version"),
    "/load": ("Answers that have not ended, as server_load", "Load"),
    "/openapi.json": ("This document", "Operation"),
}
_OPERATIONS = {
    "/cluster/check": ("Recount every book (operators only)", "Check", ()),
    "/cluster/drain/{worker}": ("Drain a worker or node (operators only)", "Operation", ("force", "now")),
    "/cluster/undrain/{worker}": ("Admit again, until it has left (operators only)", "Operation", ()),
    "/cluster/add": ("Start workers more (operators only)", "Operation", ("role", "count", "node")),
    "/cluster/scale": ("Bring pools to so many workers (operators only)", "Operation", ("prefill", "decode", "force")),
    "/cluster/apply": ("Change settings, named in JSON (operators only)", "Operation", ("dry_run",)),
    "/cluster/restart/{worker}": ("Drain a worker and start it again (operators only)", "Operation", ("force",)),
    "/cluster/cordon/{node}": ("Place no worker on a node any more (operators only)", "Operation", ()),
    "/cluster/uncordon/{node}": ("Let workers be placed on a node again (operators only)", "Operation", ()),
    "/cluster/role/{worker}": ("Start a worker in the other pool (operators only)", "Operation", ("role", "force")),
}

_CHECKED = frozenset({"/cluster/add", "/cluster/scale", "/cluster/apply"})
"""Operations that refuse a query or a body which means nothing."""
_WITH_BODY = frozenset({"/cluster/apply"})
_SECTIONS = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}


@cache
def openapi_document() -> dict[str, Any]:
    """Return the whole document, an OpenAPI 3.1 tree. It is cached: don't change it."""
    paths: dict[str, Any] = {}
    for path, (summary, name) in _GENERATE.items():
        operation = _post(path, summary, answers(name, GENERATION, streams=True, error=_error(path)))
        paths[path] = {"post": {**operation, "parameters": _GENERATE_HEADERS}}
    for path, (summary, name) in _COUNT.items():
        paths[path] = {"post": _post(path, summary, answers(name, COUNTING, error=_error(path)))}
    for path, (summary, name) in _LIST.items():
        paths[path] = {"get": _operation(path, summary, answers(name, LISTING))}
    paths["/v1/responses/{response}"] = {
        method: _operation("/v1/responses/{response}", "404: responses aren't stored", answers("Error", LISTING, ok=()))
        for method in ("get", "delete")
    }
    health = answers("Health", OPEN, ok=(200, 503))
    paths["/health"] = {"get": {"summary": _HEALTH, "responses": health}}
    paths["/ping"] = {method: {"summary": _HEALTH, "responses": health} for method in ("get", "post")}
    for path, (summary, name) in _OPEN.items():
        paths[path] = {"get": _operation(path, summary, answers(name, OPEN))}
    metrics = answers("Operation", OPEN)
    forms = {kind: {"schema": TEXT} for kind in ("text/plain", "application/openmetrics-text")}
    metrics["200"] = {"description": "Prometheus metrics", "content": forms}
    paths["/metrics"] = {"get": _operation("/metrics", "Prometheus metrics", metrics)}
    paths["/cluster/status"] = {
        "get": _operation("/cluster/status", "The workers (operators only)", answers("Workers", OPERATION))
    }
    requests = "/cluster/requests/{request}"
    summary = "What became of a request, by its id (operators only)"
    paths[requests] = {"get": _operation(requests, summary, answers("Records", (400, *OPERATION)))}
    frames = answers("Operation", (*OPERATION, 503))
    frames["200"] = {"description": "Events of the dashboard", "content": {"text/event-stream": {}}}
    paths["/cluster/dashboard"] = {
        "get": _operation("/cluster/dashboard", "What the dashboard shows (operators only)", frames)
    }
    for path, (summary, name, flags) in _OPERATIONS.items():
        statuses = (400, *OPERATION) if path in _CHECKED else OPERATION
        statuses = (*statuses, 413) if path in _WITH_BODY else statuses
        operation = _operation(path, summary, answers(name, statuses), flags)
        paths[path] = {"post": operation | ({"requestBody": _SECTIONS} if path in _WITH_BODY else {})}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Twinpool", "version": package_version()},
        "paths": paths,
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _error(path: str) -> str:
    return "MessagesError" if path.startswith("/v1/messages") else "Error"


def _post(path: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": BODIES[path]}}}
    return {**_operation(path, summary, responses), "requestBody": body}


def _operation(path: str, summary: str, responses: dict[str, Any], flags: tuple[str, ...] = ()) -> dict[str, Any]:
    _, _, rest = path.partition("{")
    named = [{"name": rest.removesuffix("}"), "in": "path", "required": True, "schema": TEXT}] if rest else []
    asked = [{"name": flag, "in": "query", "required": False, "schema": TEXT} for flag in flags]
    parameters = [*named, *asked]
    return {"summary": summary, "responses": responses, **({"parameters": parameters} if parameters else {})}
