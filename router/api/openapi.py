"""The document at `/openapi.json`. Its bodies are made from the tables that requests are read with, so that the two
agree."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from twinpool.contracts.build_id import package_version
from twinpool.router.anthropic import messages_request
from twinpool.router.api.admin_models import MODEL_SCHEMA, SERVED_BODIES, SERVED_PATHS
from twinpool.router.api.batch_endpoints import BATCH_PATHS, BATCH_SCHEMAS
from twinpool.router.openai.pooled_answers import CLASSIFY, RERANK, SCORE
from twinpool.router.openai.request_fields import (
    BOOLEAN,
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDINGS,
    IGNORED,
    INTEGER,
    OBJECT,
    OF_TEXT,
    PLAIN_OF_CHATS,
    TEXT,
    TOKENIZE,
    TOKENS,
    RequestField,
    Schema,
    array_of,
    object_of,
    or_null,
)
from twinpool.router.openai.request_headers import KEY_HEADER, MAX_KEY_CHARS, SEEN_HEADER, SESSION_HEADER, SLO_HEADER
from twinpool.router.openai.token_answers import GENERATE
from twinpool.router.openai_responses import responses_request

_NUMBER: Schema = {"type": "number"}
_TIMELINE: Schema = {"description": "Where the time went, for requests with the header X-Twinpool-Timeline: 1."}


def _object(optional: Schema | None = None, **required: Schema) -> Schema:
    return object_of(" ".join(required), **required, **(optional or {}))


def _pooled(one: Schema) -> Schema:
    """An answer of prefill alone, with something for each text or pair."""
    said = {"id": TEXT, "object": {"const": "list"}, "created": INTEGER, "model": TEXT}
    return _object({"twinpool": _TIMELINE}, **said, data=array_of(one), usage=_PROMPT_USAGE)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_STOP_REASON = {"anyOf": [TEXT, INTEGER, {"type": "null"}]}
_USAGE = _object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
)
_PROMPT_USAGE = _object(
    prompt_tokens=INTEGER, total_tokens=INTEGER, prompt_tokens_details=_object(cached_tokens=INTEGER)
)
_IDS: Schema = {"token_ids": TOKENS, "prompt_token_ids": TOKENS}
_LOGPROB = _object(token=TEXT, logprob=_NUMBER, bytes=array_of(INTEGER))
_CHAT_LOGPROBS = _object(content=array_of(_object(token=TEXT, logprob=_NUMBER, top_logprobs=array_of(_LOGPROB))))
_RANKED = _object(logprob=_NUMBER, rank=or_null(INTEGER), decoded_token=or_null(TEXT))
_PROMPT_LOGPROBS: Schema = {
    "prompt_logprobs": or_null(array_of(or_null({"type": "object", "additionalProperties": _RANKED})))
}
_ROUTED: Schema = {"routed_experts": {**TEXT, "contentEncoding": "base64"}}
_ID_LOGPROB = _object(token=TEXT, logprob=_NUMBER, bytes={"type": "null"})
_ID_LOGPROBS = array_of(_object(token=TEXT, logprob=_NUMBER, top_logprobs=array_of(_ID_LOGPROB)))
_TEXT_LOGPROBS = _object(
    tokens=array_of(TEXT),
    token_logprobs=array_of(or_null(_NUMBER)),
    top_logprobs=array_of(or_null({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=array_of(INTEGER),
)
_CALL = _object(id=TEXT, type={"const": "function"}, function=_object(name=TEXT, arguments=TEXT))
_MESSAGE = _object(
    {"reasoning_content": TEXT, "tool_calls": array_of(_CALL)}, role={"const": "assistant"}, content=or_null(TEXT)
)
_STATUSES = {"enum": ["in_progress", "completed", "incomplete"]}
_ITEM = {
    "oneOf": [
        _object(
            id=TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            status=_STATUSES,
            content=array_of(_object(type={"const": "output_text"}, text=TEXT, annotations=array_of(OBJECT))),
        ),
        _object(
            id=TEXT,
            type={"const": "reasoning"},
            status=_STATUSES,
            summary=array_of(OBJECT),
            content=array_of(_object(type={"const": "reasoning_text"}, text=TEXT)),
        ),
        _object(id=TEXT, type={"const": "function_call"}, status=_STATUSES, call_id=TEXT, name=TEXT, arguments=TEXT),
    ]
}
_BLOCK = {
    "oneOf": [
        _object(type={"const": "text"}, text=TEXT),
        _object(type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
        _object(type={"const": "tool_use"}, id=TEXT, name=TEXT, input=OBJECT),
    ]
}
_ENDS = ["stop", "length"]


def _completion(kind: str, optional: Schema, ends: list[str], **said: Schema) -> Schema:
    """The schema of an answer of OpenAI's; each choice has what is `said`, and one of `ends` for its end."""
    choice = _object(
        _IDS | _PROMPT_LOGPROBS | _ROUTED, index=INTEGER, **said, finish_reason={"enum": ends}, stop_reason=_STOP_REASON
    )
    return _object(
        {"twinpool": _TIMELINE, "weights_version": TEXT, **optional},
        id=TEXT,
        object={"const": kind},
        created=INTEGER,
        model=TEXT,
        choices=array_of(choice),
        usage=_USAGE,
    )


SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT))),
    "MessagesError": _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT)),
    "Completion": _completion("text_completion", {}, _ENDS, text=TEXT, logprobs=or_null(_TEXT_LOGPROBS)),
    "ChatCompletion": _completion(
        "chat.completion",
        {"prompt_token_ids": TOKENS, **_PROMPT_LOGPROBS},
        [*_ENDS, "tool_calls"],
        message=_MESSAGE,
        logprobs=or_null(_CHAT_LOGPROBS),
    ),
    "Message": _object(
        {"twinpool": _TIMELINE},
        id=TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=TEXT,
        content=array_of(_BLOCK),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=or_null(TEXT),
        usage=_object(
            input_tokens=INTEGER,
            cache_creation_input_tokens=INTEGER,
            cache_read_input_tokens=INTEGER,
            output_tokens=INTEGER,
        ),
    ),
    "Response": _object(
        {"twinpool": _TIMELINE, "user": TEXT, "prompt_cache_key": TEXT, "safety_identifier": TEXT},
        id=TEXT,
        object={"const": "response"},
        created_at=INTEGER,
        completed_at=or_null(INTEGER),
        status={"enum": ["completed", "incomplete"]},
        error={"type": "null"},
        incomplete_details=or_null(_object(reason={"const": "max_output_tokens"})),
        model=TEXT,
        output=array_of(_ITEM),
        usage=_object(
            input_tokens=INTEGER,
            input_tokens_details=_object(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
            output_tokens=INTEGER,
            output_tokens_details=_object(reasoning_tokens=INTEGER),
            total_tokens=INTEGER,
        ),
        instructions=or_null(TEXT),
        max_output_tokens=or_null(INTEGER),
        metadata=OBJECT,
        parallel_tool_calls=BOOLEAN,
        reasoning=OBJECT,
        text=OBJECT,
        tool_choice={"anyOf": [TEXT, OBJECT]},
        tools=array_of(OBJECT),
        temperature=_NUMBER,
        top_p=_NUMBER,
        store={"const": False},
        background={"const": False},
        previous_response_id={"type": "null"},
        truncation={"const": "disabled"},
        service_tier=TEXT,
    ),
    "Embeddings": _object(
        {"twinpool": _TIMELINE},
        object={"const": "list"},
        data=array_of(
            _object(
                object={"const": "embedding"},
                index=INTEGER,
                embedding={"oneOf": [array_of(_NUMBER), {**TEXT, "contentEncoding": "base64"}]},
            )
        ),
        model=TEXT,
        usage=_PROMPT_USAGE,
    ),
    "Classes": _pooled(_object(index=INTEGER, label=TEXT, probs=array_of(_NUMBER), num_classes=INTEGER)),
    "Scores": _pooled(_object(index=INTEGER, object={"const": "score"}, score=_NUMBER)),
    "Ranking": _object(
        {"twinpool": _TIMELINE},
        id=TEXT,
        model=TEXT,
        results=array_of(_object({"document": _object(text=TEXT)}, index=INTEGER, relevance_score=_NUMBER)),
        usage=_PROMPT_USAGE,
    ),
    "Generated": _object(
        {"twinpool": _TIMELINE},
        request_id=TEXT,
        model=TEXT,
        created=INTEGER,
        choices=array_of(
            _object(
                _ROUTED,
                index=INTEGER,
                token_ids=TOKENS,
                logprobs=or_null(_object(content=_ID_LOGPROBS)),
                finish_reason={"enum": _ENDS},
                stop_reason=or_null(INTEGER),
            )
        ),
        usage=_USAGE,
        **_PROMPT_LOGPROBS,
    ),
    "ResponseTokens": _object(object={"const": "response.input_tokens"}, input_tokens=INTEGER),
    "MessageTokens": _object(input_tokens=INTEGER),
    "Tokens": _object({"token_strs": array_of(TEXT)}, count=INTEGER, max_model_len=INTEGER, tokens=TOKENS),
    "Text": _object(prompt=TEXT),
    "Model": MODEL_SCHEMA,
    "Models": _object(object={"const": "list"}, data=array_of(MODEL_SCHEMA)),
    "Health": _object(
        status={"enum": ["ok", "unhealthy", "draining"]},
        problems=array_of(TEXT),
        serving={"type": "object", "additionalProperties": INTEGER},
        in_flight=INTEGER,
        waiting=INTEGER,
    ),
    "Live": _object(status={"const": "alive"}),
    "Version": _object(version=TEXT),
    "Load": _object(server_load=INTEGER),
    "Workers": _object(workers=array_of(OBJECT)),
    "Records": _object(records=array_of(OBJECT)),
    "Check": _object(ok=BOOLEAN, workers=array_of(OBJECT)),
    **BATCH_SCHEMAS,
    "Operation": OBJECT,
}
"""Answers by name."""

_IGNORED_TOO: Schema = {
    "additionalProperties": {"description": "Ignored and named in the header X-Twinpool-Ignored, or refused by name."}
}


def _body(fields: Mapping[str, RequestField], *required: str) -> Schema:
    unread = {name: {"description": f"Ignored: {why}."} for name, why in IGNORED.items()}
    schemas = unread | {name: field.schema for name, field in fields.items()}
    properties = {name: schema if name in required else or_null(schema) for name, schema in schemas.items()}
    return object_of(" ".join(required), **properties) | _IGNORED_TOO


_OTHERS = [
    "max_tokens",
    "max_completion_tokens",
    "n",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
]
_PLAIN = {name: field for name, field in PLAIN_OF_CHATS.items() if name not in _OTHERS}
_SHAPED = {name: f for name, f in OF_TEXT.items() if name not in ("stream_options", "response_format", "model")}
"""With `_PLAIN`, the fields of chats that the other two APIs take as well."""
_MESSAGES = {**_SHAPED, **messages_request.FIELDS}
_LENGTH = {name: field for name, field in responses_request.FIELDS.items() if field.kind == "integer"}
_RESPONSES = {**_SHAPED, **{name: f for name, f in responses_request.FIELDS.items() if name not in _LENGTH}}

BODIES: dict[str, Schema] = {
    "/v1/completions": _body(COMPLETION, "prompt"),
    "/v1/chat/completions": _body(CHAT, "messages"),
    "/v1/messages": _body({**_PLAIN, "max_tokens": CHAT["max_tokens"], **_MESSAGES}, "max_tokens", "messages"),
    "/v1/messages/count_tokens": _body({**_PLAIN, **_MESSAGES}, "messages"),
    "/v1/responses": _body({**_PLAIN, **_LENGTH, **_RESPONSES}, "input"),
    "/v1/responses/input_tokens": _body({**_PLAIN, **_RESPONSES}, "input"),
    "/v1/embeddings": _body(EMBEDDINGS, "input"),
    "/inference/v1/generate": _body(GENERATE, "token_ids"),
    "/classify": _body(CLASSIFY, "input"),
    **dict.fromkeys(("/v1/score", "/score"), _body(SCORE)),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _body(RERANK, "query", "documents")),
    "/tokenize": _body(TOKENIZE),
    "/detokenize": _body(DETOKENIZE, "tokens"),
    "/cluster/apply": OBJECT,
    **SERVED_BODIES,
}
"""By path, the schema of its body."""

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
    507: "The disk, or the share of it that files may take, is full",
}
_EVERY = (408, 431, 500, 503)
"""Of every endpoint: of its connection, or of a fault."""
_KEYED = (401, 403)
_OF_BODY = (400, 404, 413, 415)
GENERATION = (*_EVERY, *_KEYED, *_OF_BODY, 409, 422, 429, 504)
EMBEDDING = (*_EVERY, *_KEYED, *_OF_BODY, 429, 504)
COUNTING = (*_EVERY, *_KEYED, *_OF_BODY, 429)
LISTING = (*_EVERY, *_KEYED, 404)
OPEN = _EVERY
OPERATION = (*_EVERY, 403, 404, 409)
"""The statuses of errors of each kind of endpoint."""


def _parameter(name: str, place: str, schema: Schema = TEXT, **said: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", **said, "schema": schema}


_HEADERS = [
    _parameter(
        SLO_HEADER,
        "header",
        {"type": "integer", "minimum": 1, "maximum": 10**9 - 1},
        description="Milliseconds to the first token beyond which the answer is of no use: then it is a 429.",
    ),
    _parameter(SESSION_HEADER, "header", description="Names a session, as the field user does; comes before it."),
    _parameter(
        KEY_HEADER,
        "header",
        {"type": "string", "pattern": f"^[!-~]{{1,{MAX_KEY_CHARS}}}$"},
        description="The name under which the answer is kept for a client that comes back for it.",
    ),
    _parameter(
        SEEN_HEADER,
        "header",
        description="The id of the last event that the client has of the answer with this key; the rest comes.",
    ),
]
"""Those of requests for text."""


class _Endpoint(NamedTuple):
    summary: str
    answer: str
    """The schema of what it answers where it is well."""
    errors: tuple[int, ...]
    methods: str = "get"
    flags: str = ""
    """The names of its parameters in the query."""
    ok: tuple[int, ...] = (200,)
    """The statuses of its answer."""


_CHECKED = (*OPERATION, 400)
"""Of operations that refuse a query or a body which means nothing."""
_SMALL = (*_CHECKED, 413)  # Of those that refuse a long body as well.


def _reads(summary: str, answer: str, errors: tuple[int, ...] = GENERATION) -> _Endpoint:
    return _Endpoint(summary, answer, errors, "post")


def _operates(summary: str, flags: str = "", errors: tuple[int, ...] = OPERATION) -> _Endpoint:
    return _Endpoint(f"{summary} (operators only)", "Operation", errors, "post", flags)


_SHAPE = "Answer a chat in the shape of"
_HEALTH = _Endpoint("200 while requests can be served and work advances, else 503", "Health", OPEN, ok=(200, 503))
_ENDPOINTS = {
    "/v1/completions": _reads("Complete prompts", "Completion"),
    "/v1/chat/completions": _reads("Answer a chat", "ChatCompletion"),
    "/v1/messages": _reads(f"{_SHAPE} Anthropic's Messages API", "Message"),
    "/v1/responses": _reads(f"{_SHAPE} OpenAI's Responses API", "Response"),
    "/v1/messages/count_tokens": _reads("Count the tokens of a body of /v1/messages", "MessageTokens", COUNTING),
    "/v1/responses/input_tokens": _reads("Count the tokens of a body of /v1/responses", "ResponseTokens", COUNTING),
    "/v1/embeddings": _reads("Embed texts", "Embeddings", EMBEDDING),
    "/inference/v1/generate": _reads("Token ids to token ids", "Generated"),
    "/classify": _reads("Tell the classes of texts", "Classes", EMBEDDING),
    **dict.fromkeys(("/v1/score", "/score"), _reads("Score pairs of texts", "Scores", EMBEDDING)),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"), _reads("Rank documents for a query", "Ranking", EMBEDDING)
    ),
    "/tokenize": _reads("Text or chat to token ids", "Tokens", COUNTING),
    "/detokenize": _reads("Token ids to text", "Text", COUNTING),
    "/v1/models": _Endpoint("The served model, under each of its names", "Models", LISTING),
    "/v1/models/{model}": _Endpoint("One model", "Model", LISTING),
    **{path: _Endpoint(*said) for path, said in BATCH_PATHS.items()},
    **{
        path: _operates(summary, errors=_SMALL)._replace(methods=methods, ok=ok)
        for path, (summary, methods, ok) in SERVED_PATHS.items()
    },
    "/v1/responses/{response}": _Endpoint("404: responses aren't stored", "Error", LISTING, "get delete", ok=()),
    "/health": _HEALTH,
    "/ping": _HEALTH._replace(methods="get post"),
    "/": _Endpoint("What is here, as a page for browsers and as JSON", "Operation", OPEN),
    "/live": _Endpoint("200 while the process runs", "Live", OPEN),
    "/version": _Endpoint("The server's version", "Version", OPEN),
    "/load": _Endpoint("Answers that have not ended, as server_load", "Load", OPEN),
    "/openapi.json": _Endpoint("This document", "Operation", OPEN),
    "/metrics": _Endpoint("Prometheus metrics", "Operation", OPEN),
    "/cluster/status": _operates("The workers")._replace(answer="Workers", methods="get"),
    "/cluster/requests/{request}": _operates("What became of a request, by its id", errors=_CHECKED)._replace(
        answer="Records", methods="get"
    ),
    "/cluster/dashboard": _operates("What the dashboard shows")._replace(methods="get"),
    "/cluster/check": _operates("Recount every book")._replace(answer="Check"),
    "/cluster/drain/{worker}": _operates("Drain a worker or node", "force now"),
    "/cluster/undrain/{worker}": _operates("Admit again, until it has left"),
    "/cluster/add": _operates("Start workers more", "role count node", _CHECKED),
    "/cluster/scale": _operates("Bring pools to so many workers", "prefill decode force", _CHECKED),
    "/cluster/apply": _operates("Change settings, named in JSON", "dry_run", _SMALL),
    "/cluster/restart/{worker}": _operates("Drain a worker and start it again", "force"),
    "/cluster/cordon/{node}": _operates("Place no worker on a node any more"),
    "/cluster/uncordon/{node}": _operates("Let workers be placed on a node again"),
    "/cluster/role/{worker}": _operates("Start a worker in the other pool", "role force"),
}
_NO_JSON = {
    "/metrics": {
        "description": "Prometheus metrics",
        "content": {kind: {"schema": TEXT} for kind in ("text/plain", "application/openmetrics-text")},
    },
    "/cluster/dashboard": {"description": "Events of the dashboard", "content": {"text/event-stream": {}}},
}
"""Answers that are no JSON."""


@cache
def openapi_document() -> dict[str, Any]:
    """Return the whole document, an OpenAPI 3.1 tree. It is cached: don't change it."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Twinpool", "version": package_version()},
        "paths": {
            path: {method: _operation(path, endpoint) for method in endpoint.methods.split()}
            for path, endpoint in _ENDPOINTS.items()
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, endpoint: _Endpoint) -> dict[str, Any]:
    said: dict[str, Any] = {"summary": endpoint.summary, "responses": _answers(path, endpoint)}
    _, _, rest = path.partition("{")
    named = [_parameter(rest.removesuffix("}"), "path")] if rest else []
    asked = [_parameter(flag, "query") for flag in endpoint.flags.split()]
    if parameters := [*named, *asked, *(_HEADERS if endpoint.errors is GENERATION else ())]:
        said["parameters"] = parameters
    if path in BODIES:
        kind = BODIES[path].get("contentMediaType", "application/json")
        said["requestBody"] = {"required": True, "content": {kind: {"schema": BODIES[path]}}}
    return said


def _answers(path: str, endpoint: _Endpoint) -> dict[str, Any]:
    """Return the answers of an endpoint by status: with its schema where it is well, with that of errors elsewhere."""
    error = _ref("MessagesError" if path.startswith("/v1/messages") else "Error")
    found: dict[str, Any] = {
        str(status): {"description": _ERRORS[status], "content": {"application/json": {"schema": error}}}
        for status in endpoint.errors
    }
    for busy in found.keys() & {"429", "503"}:
        found[busy]["headers"] = {"Retry-After": {"description": "Seconds", "schema": INTEGER}}
    content: Schema = {"application/json": {"schema": _ref(endpoint.answer)}}
    if endpoint.errors is GENERATION:
        content["text/event-stream"] = {}
    for status in endpoint.ok:
        found[str(status)] = _NO_JSON.get(path, {"description": "The answer", "content": content})
    return dict(sorted(found.items()))
