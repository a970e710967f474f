"""The answers in `/openapi.json`: their schemas by name, and which statuses an endpoint has."""

from __future__ import annotations

from typing import Any

from twinpool.router.api.openapi_bodies import TEXT, TOKENS, Schema

_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_TIMELINE: Schema = {"description": "Where the time went, for requests with the header X-Twinpool-Timeline: 1."}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(optional: Schema | None = None, **required: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_STOP_REASON = {"anyOf": [TEXT, _INTEGER, {"type": "null"}]}
_USAGE = _object(
    prompt_tokens=_INTEGER,
    completion_tokens=_INTEGER,
    total_tokens=_INTEGER,
    prompt_tokens_details=_object(cached_tokens=_INTEGER),
)
_IDS: Schema = {"token_ids": TOKENS, "prompt_token_ids": TOKENS}
_LOGPROB = _object(token=TEXT, logprob=_NUMBER, bytes=_array(_INTEGER))
_CHAT_LOGPROBS = _object(content=_array(_object(token=TEXT, logprob=_NUMBER, top_logprobs=_array(_LOGPROB))))
_TEXT_LOGPROBS = _object(
    tokens=_array(TEXT),
    token_logprobs=_array(_or_null(_NUMBER)),
    top_logprobs=_array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_array(_INTEGER),
)
_CALL = _object(id=TEXT, type={"const": "function"}, function=_object(name=TEXT, arguments=TEXT))
_MESSAGE = _object(
    {"reasoning_content": TEXT, "tool_calls": _array(_CALL)}, role={"const": "assistant"}, content=_or_null(TEXT)
)
_STATUSES = {"enum": ["in_progress", "completed", "incomplete"]}
_ITEM = {
    "oneOf": [
        _object(
            id=TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            status=_STATUSES,
            content=_array(_object(type={"const": "output_text"}, text=TEXT, annotations=_array(_OBJECT))),
        ),
        _object(
            id=TEXT,
            type={"const": "reasoning"},
            status=_STATUSES,
            summary=_array(_OBJECT),
            content=_array(_object(type={"const": "reasoning_text"}, text=TEXT)),
        ),
        _object(id=TEXT, type={"const": "function_call"}, status=_STATUSES, call_id=TEXT, name=TEXT, arguments=TEXT),
    ]
}
_BLOCK = {
    "oneOf": [
        _object(type={"const": "text"}, text=TEXT),
        _object(type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
        _object(type={"const": "tool_use"}, id=TEXT, name=TEXT, input=_OBJECT),
    ]
}
_MODEL = _object(
    id=TEXT,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=TEXT,
    root=TEXT,
    parent={"type": "null"},
    max_model_len=_INTEGER,
)

_ENDS = ["stop", "length"]


def _completion(kind: str, optional: Schema, ends: list[str], **said: Schema) -> Schema:
    """The schema of an answer of OpenAI's; each choice has what is `said`, and one of `ends` for its end."""
    choice = _object(_IDS, index=_INTEGER, **said, finish_reason={"enum": ends}, stop_reason=_STOP_REASON)
    return _object(
        {"twinpool": _TIMELINE, **optional},
        id=TEXT,
        object={"const": kind},
        created=_INTEGER,
        model=TEXT,
        choices=_array(choice),
        usage=_USAGE,
    )


SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
    "MessagesError": _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT)),
    "Completion": _completion("text_completion", {}, _ENDS, text=TEXT, logprobs=_or_null(_TEXT_LOGPROBS)),
    "ChatCompletion": _completion(
        "chat.completion",
        {"prompt_token_ids": TOKENS},
        [*_ENDS, "tool_calls"],
        message=_MESSAGE,
        logprobs=_or_null(_CHAT_LOGPROBS),
    ),
    "Message": _object(
        {"twinpool": _TIMELINE},
        id=TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=TEXT,
        content=_array(_BLOCK),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_or_null(TEXT),
        usage=_object(
            input_tokens=_INTEGER,
            cache_creation_input_tokens=_INTEGER,
            cache_read_input_tokens=_INTEGER,
            output_tokens=_INTEGER,
        ),
    ),
    "Response": _object(
        {"twinpool": _TIMELINE, "user": TEXT, "prompt_cache_key": TEXT, "safety_identifier": TEXT},
        id=TEXT,
        object={"const": "response"},
        created_at=_INTEGER,
        completed_at=_or_null(_INTEGER),
        status={"enum": ["completed", "incomplete"]},
        error={"type": "null"},
        incomplete_details=_or_null(_object(reason={"const": "max_output_tokens"})),
        model=TEXT,
        output=_array(_ITEM),
        usage=_object(
            input_tokens=_INTEGER,
            input_tokens_details=_object(cached_tokens=_INTEGER, cache_write_tokens=_INTEGER),
            output_tokens=_INTEGER,
            output_tokens_details=_object(reasoning_tokens=_INTEGER),
            total_tokens=_INTEGER,
        ),
        instructions=_or_null(TEXT),
        max_output_tokens=_or_null(_INTEGER),
        metadata=_OBJECT,
        parallel_tool_calls=_BOOLEAN,
        reasoning=_OBJECT,
        text=_OBJECT,
        tool_choice={"anyOf": [TEXT, _OBJECT]},
        tools=_array(_OBJECT),
        temperature=_NUMBER,
        top_p=_NUMBER,
        store={"const": False},
        background={"const": False},
        previous_response_id={"type": "null"},
        truncation={"const": "disabled"},
        service_tier=TEXT,
    ),
    "ResponseTokens": _object(object={"const": "response.input_tokens"}, input_tokens=_INTEGER),
    "MessageTokens": _object(input_tokens=_INTEGER),
    "Tokens": _object({"token_strs": _array(TEXT)}, count=_INTEGER, max_model_len=_INTEGER, tokens=TOKENS),
    "Text": _object(prompt=TEXT),
    "Model": _MODEL,
    "Models": _object(object={"const": "list"}, data=_array(_MODEL)),
    "Health": _object(
        status={"enum": ["ok", "unhealthy", "draining"]},
        problems=_array(TEXT),
        serving={"type": "object", "additionalProperties": _INTEGER},
        in_flight=_INTEGER,
        waiting=_INTEGER,
    ),
    "Live": _object(status={"const": "alive"}),
    "Version": _object(version=TEXT),
    "Load": _object(server_load=_INTEGER),
    "Workers": _object(workers=_array(_OBJECT)),
    "Records": _object(records=_array(_OBJECT)),
    "Check": _object(ok=_BOOLEAN, workers=_array(_OBJECT)),
    "Operation": _OBJECT,
}
"""Answers by name."""

_ERRORS = {
    400: "A field is wrong, or the prompt too long",
    401: "An API key is needed, or unknown",
    403: "This client may not do that",
    404: "There is no such model, endpoint or worker",
    408: "The request came too slowly",
    409: "The worker's state doesn't allow it, or the client came back for this answer on another connection",
    413: "The body is too large",
    415: "The body isn't declared as JSON",
    422: "The Idempotency-Key was sent with another body before",
    429: "Too many answers are in flight, or a limit of the key is reached",
    431: "The headers are too large",
    500: "The router failed inside",
    503: "No worker can serve, or the router is at a limit",
    504: "The request's timeout is over",
}
_EVERY = (408, 431, 500, 503)
"""Statuses of every endpoint: of its connection, or of a fault."""
_KEYED = (401, 403)
_OF_BODY = (400, 404, 413, 415)
GENERATION = (*_EVERY, *_KEYED, *_OF_BODY, 409, 422, 429, 504)
COUNTING = (*_EVERY, *_KEYED, *_OF_BODY, 429)
LISTING = (*_EVERY, *_KEYED, 404)
OPEN = _EVERY
OPERATION = (*_EVERY, 403, 404, 409)
"""The statuses of errors of each kind of endpoint."""


def answers(
    name: str, errors: tuple[int, ...], *, streams: bool = False, error: str = "Error", ok: tuple[int, ...] = (200,)
) -> dict[str, Any]:
    """Return the answers of an endpoint: with the schema `name` where it is well, with `error` where it isn't.

    `ok`: the statuses of the former.
    """
    content: Schema = {"application/json": {"schema": _ref(name)}}
    if streams:
        content["text/event-stream"] = {}
    found: dict[str, Any] = {
        str(status): {"description": _ERRORS[status], "content": {"application/json": {"schema": _ref(error)}}}
        for status in sorted(errors)
    }
    for status in (429, 503):
        if status in errors:
            found[str(status)]["headers"] = {"Retry-After": {"description": "Seconds", "schema": _INTEGER}}
    for status in ok:
        found[str(status)] = {"description": "The answer", "content": content}
    return dict(sorted(found.items()))
