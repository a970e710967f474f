"""The document at `/openapi.json`, made from the same tables that requests are read with, so that the two agree."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from router.openai.parse_request import EFFORTS
from router.openai.request_fields import CHAT, COMPLETION, TOKENIZE, RequestField
from router.openai.structured_output import CHOICES_AT_MOST
from router.openai.tools import TOOLS_AT_MOST

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string"}
_STREAM_OPTIONS = {
    "type": "object",
    "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": _TEXT,
        "tool_call_id": _TEXT,
        "tool_calls": {"type": "array", "items": {"type": "object", "required": ["function"]}},
        "content": {
            "oneOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {"type": "object", "properties": {"type": {"enum": ["text"]}, "text": _TEXT}},
                },
            ]
        },
    },
}
_SCHEMA = {"oneOf": [{"type": "object"}, _TEXT], "description": "A JSON schema, or the text of one."}
_CHOICES = {"type": "array", "minItems": 1, "maxItems": CHOICES_AT_MOST, "items": {"type": "string", "minLength": 1}}
_REGEX = {"type": "string", "description": "A regular expression that the whole answer matches."}
_GRAMMAR = {"type": "string", "description": "A grammar, Lark's or GBNF."}
_STRUCTURED_OUTPUT: dict[str, Any] = {
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": _SCHEMA}},
        },
    },
    "structured_outputs": {
        "type": "object",
        "properties": {
            "json": _SCHEMA,
            "json_object": {"type": "boolean"},
            "regex": _REGEX,
            "choice": _CHOICES,
            "grammar": _GRAMMAR,
            "disable_any_whitespace": {"type": "boolean"},
        },
    },
    "guided_json": _SCHEMA,
    "guided_json_object": {"type": "boolean"},
    "guided_regex": _REGEX,
    "guided_choice": _CHOICES,
    "guided_grammar": _GRAMMAR,
    "json_schema": _SCHEMA,
    "regex": _REGEX,
    "ebnf": _GRAMMAR,
}
"""What an answer must follow; one of them a request."""
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
                "description": _TEXT,
                "parameters": {"type": "object", "description": "The JSON schema of the arguments, an object."},
                "strict": {"type": "boolean", "description": "Arguments follow the schema also with tool_choice auto."},
            },
        },
    },
}
_NAMED_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
_TOOLS: dict[str, Any] = {
    "tools": {"type": "array", "maxItems": TOOLS_AT_MOST, "items": _TOOL},
    "tool_choice": {"oneOf": [{"enum": ["none", "auto", "required"]}, _NAMED_TOOL]},
    "parallel_tool_calls": {"type": "boolean", "description": "Whether there may be several calls; default true."},
    "reasoning_effort": {"enum": list(EFFORTS), "description": "Given to the chat template."},
}
_COMMON: dict[str, Any] = {
    **_STRUCTURED_OUTPUT,
    "model": {"type": "string", "description": "The served model; may be left out."},
    "stop": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}]},
    "stop_token_ids": _TOKENS,
    "allowed_token_ids": _TOKENS,
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "stream_options": _STREAM_OPTIONS,
}
_PROMPT = {"oneOf": [_TEXT, _TOKENS, {"type": "array", "items": {"oneOf": [_TEXT, _TOKENS]}}]}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}

_OBJECTS = {"type": "array", "items": {"type": "object"}}
_ANTHROPIC: dict[str, Any] = {
    "model": _TEXT,
    "max_tokens": {"type": "integer", "minimum": 1},
    "messages": {**_OBJECTS, "minItems": 1},
    "system": {"oneOf": [_TEXT, _OBJECTS]},
    "stop_sequences": {"type": "array", "items": _TEXT, "maxItems": 16},
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer"},
    "tools": {**_OBJECTS, "maxItems": TOOLS_AT_MOST},
    "tool_choice": {"type": "object", "required": ["type"]},
    "thinking": {"type": "object", "required": ["type"]},
    "output_config": {"type": "object"},
    "metadata": {"type": "object"},
}
_POSTS: dict[str, tuple[str, Mapping[str, RequestField], dict[str, Any]]] = {
    "/v1/completions": ("Complete prompts", COMPLETION, {**_COMMON, "prompt": _PROMPT}),
    "/v1/chat/completions": (
        "Answer a chat",
        CHAT,
        {**_COMMON, **_TOOLS, "messages": _MESSAGES, "chat_template_kwargs": {"type": "object"}},
    ),
    "/v1/messages": ("Answer a chat in the shape of Anthropic's Messages API", {}, _ANTHROPIC),
    "/v1/messages/count_tokens": (
        "Count the tokens of such a chat",
        {},
        {name: schema for name, schema in _ANTHROPIC.items() if name != "max_tokens"},
    ),
    "/tokenize": ("Text or chat to token ids", TOKENIZE, {"model": _TEXT, "prompt": _TEXT, "messages": _MESSAGES}),
    "/detokenize": ("Token ids to text", {}, {"model": _TEXT, "tokens": _TOKENS}),
}
_GETS = {
    "/v1/models": "The served model, under each of its names",
    "/v1/models/{model}": "One model",
    "/health": "200 while requests can be served and work advances, else 503",
    "/ping": "As /health",
    "/live": "200 while the process runs",
    "/version": "The server's version",
    "/load": "Answers that have not ended, as server_load",
    "/metrics": "Prometheus metrics",
    "/cluster/status": "The workers (operators only)",
}
_OPERATIONS = {
    "/cluster/check": "Recount every book (operators only)",
    "/cluster/drain/{worker}": "Drain a worker or node; ?force=true for the last of its role (operators only)",
    "/cluster/undrain/{worker}": "Admit again, until it has left (operators only)",
    "/cluster/role/{worker}": "Drain a worker and start it in the pool of ?role= (operators only)",
}


@cache
def openapi_document() -> dict[str, Any]:
    """Return the whole document, an OpenAPI 3.1 tree. It is cached: don't change it."""
    paths: dict[str, Any] = {}
    for path, (summary, fields, others) in _POSTS.items():
        schema = {"type": "object", "properties": {**others, **{name: _schema(f) for name, f in fields.items()}}}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses()}}
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(), **_parameters(path)}}
    for path, summary in _OPERATIONS.items():
        paths[path] = {"post": {"summary": summary, "responses": _responses(), **_parameters(path)}}
    return {"openapi": "3.1.0", "info": {"title": "Twinpool", "version": version()}, "paths": paths}


def version() -> str:
    """Return the version of the installed package, ``0`` when run from a source tree."""
    try:
        return metadata.version("twinpool")
    except metadata.PackageNotFoundError:
        return "0"


def _schema(field: RequestField) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": field.kind, "description": field.doc}
    if field.low is not None:
        shape["exclusiveMinimum" if field.above else "minimum"] = field.low
    if field.high is not None:
        shape["maximum"] = field.high
    return shape


def _responses() -> dict[str, Any]:
    error = {"type": "object", "properties": {name: {} for name in ("message", "type", "param", "code")}}
    schema = {"type": "object", "properties": {"error": error}}
    return {
        "200": {"description": "The answer"},
        "default": {"description": "An error", "content": {"application/json": {"schema": schema}}},
    }


def _parameters(path: str) -> dict[str, Any]:
    _, _, rest = path.partition("{")
    if not rest:
        return {}
    return {"parameters": [{"name": rest.removesuffix("}"), "in": "path", "required": True, "schema": _TEXT}]}
