"""The request bodies in `/openapi.json`, made from the tables that requests are read with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinpool.router.openai.parse_request import EFFORTS, MAX_BIASES, MAX_STOPS
from twinpool.router.openai.request_fields import CHAT, COMPLETION, IGNORED, TOKENIZE, RequestField
from twinpool.router.openai.structured_output import MAX_CHOICES
from twinpool.router.openai.tools import MAX_TOOLS
from twinpool.router.openai_responses.responses_request import (
    MAX_METADATA,
    MAX_OUTPUT_TOKENS,
    NAMES,
    REASONING_INCLUDE,
)

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
_WORD: Schema = {"type": "string", "minLength": 1}
TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_OBJECT: Schema = {"type": "object"}
_BOOLEAN: Schema = {"type": "boolean"}
_SCHEMA: Schema = {"oneOf": [_OBJECT, TEXT], "description": "A JSON schema, or the text of one."}
_FUNCTION: Schema = {
    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
    "description": TEXT,
    "strict": {"type": "boolean", "description": "Arguments follow the schema also with tool_choice auto."},
    "parameters": {**_OBJECT, "description": "The JSON schema of the arguments, an object."},
}


def _object(required: tuple[str, ...], **properties: Any) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _text_or(*kinds: str) -> Schema:
    """A text, or parts with one."""
    part = _object(("type", "text"), type={"enum": list(kinds)}, text=TEXT)
    return {"oneOf": [TEXT, _array(part)]}


# ---------------------------------------------------------------- structured output

_CHOICES = _array(_WORD, minItems=1, maxItems=MAX_CHOICES)
_REGEX: Schema = {"type": "string", "description": "A regular expression that the whole answer matches."}
_GRAMMAR: Schema = {"type": "string", "description": "A grammar, Lark's or GBNF."}
_SPACES: Schema = {"enum": [r"\s?", r"[ \n\t]*"], "description": "A regular expression of whitespace, as these are."}
_STRUCTURED_OUTPUT: Schema = {
    "response_format": _object(
        ("type",),
        type={"enum": ["text", "json_object", "json_schema"]},
        json_schema=_object(("schema",), schema=_SCHEMA, name=TEXT, strict=_BOOLEAN),
    ),
    "structured_outputs": _object(
        (),
        json=_SCHEMA,
        json_object=_BOOLEAN,
        regex=_REGEX,
        choice=_CHOICES,
        grammar=_GRAMMAR,
        disable_any_whitespace=_BOOLEAN,
        whitespace_pattern=_SPACES,
    ),
    "guided_json": _SCHEMA,
    "guided_json_object": _BOOLEAN,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICES,
    "guided_grammar": _GRAMMAR,
    "json_schema": _SCHEMA,
    "regex": _REGEX,
    "ebnf": _GRAMMAR,
    "guided_whitespace_pattern": _SPACES,
}
"""What an answer must follow; one of them a request."""

# ---------------------------------------------------------------- OpenAI's completions and chats

_MODEL: Schema = {"type": "string", "description": "The served model; may be left out."}
_COMMON: Schema = {
    **_STRUCTURED_OUTPUT,
    "model": _MODEL,
    "stop": {"oneOf": [_WORD, _array(_WORD, maxItems=MAX_STOPS)]},
    "stop_token_ids": TOKENS,
    "allowed_token_ids": {**TOKENS, "minItems": 1},
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_BIASES,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stream_options": _object(
        (), include_usage=_BOOLEAN, continuous_usage_stats=_BOOLEAN, include_obfuscation=_BOOLEAN
    ),
}
_CALL = _object(
    ("function",), id=TEXT, type={"const": "function"}, function=_object(("name",), name=_WORD, arguments=TEXT)
)
_MESSAGE = _object(
    ("role",),
    role=_WORD,
    content=_text_or("text"),
    name=TEXT,
    reasoning_content=TEXT,
    tool_calls=_array(_CALL),
    tool_call_id=TEXT,
)
_CALLS_ALONE: Schema = {"properties": {"role": {"const": "assistant"}}}
_MESSAGES = _array({**_MESSAGE, "anyOf": [{"required": ["content"]}, _CALLS_ALONE]}, minItems=1)
_TEMPLATE_ARGS: Schema = {**_OBJECT, "description": "Given to the chat template."}
_TOOL = _object(("type", "function"), type={"const": "function"}, function=_object(("name",), **_FUNCTION))
_TOOL_LIST = _array(_TOOL, maxItems=MAX_TOOLS)
_NAMED_TOOL = _object(("type", "function"), type={"const": "function"}, function=_object(("name",), name=TEXT))
_ALLOWED_MODE: Schema = {"enum": ["auto", "required"]}
_ALLOWED_TOOLS = _object(
    ("type", "allowed_tools"),
    type={"const": "allowed_tools"},
    allowed_tools=_object(("mode", "tools"), mode=_ALLOWED_MODE, tools=_array(_NAMED_TOOL, minItems=1)),
)
_PARALLEL: Schema = {"type": "boolean", "description": "Whether there may be several calls; default true."}
_EFFORT: Schema = {"enum": list(EFFORTS), "description": "Given to the chat template."}
_CHOICE_WORDS: Schema = {"enum": ["none", "auto", "required"]}
_PROMPT: Schema = {"oneOf": [TEXT, TOKENS, _array({"oneOf": [TEXT, TOKENS]}, minItems=1)]}
_OF_CHATS: Schema = {
    **_COMMON,
    "messages": _MESSAGES,
    "chat_template_kwargs": _TEMPLATE_ARGS,
    "tools": _TOOL_LIST,
    "tool_choice": {"oneOf": [_CHOICE_WORDS, _NAMED_TOOL, _ALLOWED_TOOLS]},
    "parallel_tool_calls": _PARALLEL,
    "reasoning_effort": _EFFORT,
}

# ---------------------------------------------------------------- Anthropic's Messages API

_BLOCK = {
    "oneOf": [
        _object(("type", "text"), type={"const": "text"}, text=TEXT),
        _object(("type", "thinking"), type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
        _object(("type", "id", "name", "input"), type={"const": "tool_use"}, id=TEXT, name=TEXT, input=_OBJECT),
        _object(("type", "tool_use_id"), type={"const": "tool_result"}, tool_use_id=TEXT, content=_text_or("text")),
    ]
}
_ANTHROPIC: Schema = {
    "model": _MODEL,
    "messages": _array(
        _object(("role", "content"), role={"enum": ["user", "assistant"]}, content={"oneOf": [TEXT, _array(_BLOCK)]}),
        minItems=1,
    ),
    "system": _text_or("text"),
    "stop_sequences": _array(_WORD, maxItems=MAX_STOPS),
    "tools": _array(_object(("name", "input_schema"), **{**_FUNCTION, "input_schema": _OBJECT}), maxItems=MAX_TOOLS),
    "tool_choice": _object(
        ("type",),
        type={"enum": ["auto", "any", "tool", "none"]},
        name=TEXT,
        disable_parallel_tool_use=_BOOLEAN,
    ),
    "thinking": _object(
        ("type",), type={"enum": ["enabled", "adaptive", "disabled"]}, budget_tokens={"type": "integer"}
    ),
    "output_config": _object(
        (), effort=_EFFORT, format=_object(("type", "schema"), type={"const": "json_schema"}, schema=_OBJECT)
    ),
    "metadata": _OBJECT,
    "service_tier": TEXT,
}
_LENGTHS = ("max_tokens", "max_completion_tokens")
_ONE_ANSWER: Mapping[str, RequestField] = {
    name: field
    for name, field in CHAT.items()
    if name not in (*_LENGTHS, "n", "logprobs", "top_logprobs", "return_token_ids")
}
"""Fields of chats that the other two APIs take as well."""

# ---------------------------------------------------------------- OpenAI's Responses API

_ITEM = {
    "oneOf": [
        _object(
            ("role", "content"),
            type={"const": "message"},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_text_or("input_text", "output_text", "text"),
        ),
        _object(
            ("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            id=TEXT,
            call_id=_WORD,
            name=_WORD,
            arguments={"type": "string", "description": "The JSON text of an object."},
            status=TEXT,
        ),
        _object(
            ("type", "call_id", "output"),
            type={"const": "function_call_output"},
            call_id=_WORD,
            output=_text_or("input_text"),
        ),
        _object(
            ("type",),
            type={"const": "reasoning"},
            id=TEXT,
            summary=_array(_object(("type", "text"), type={"const": "summary_text"}, text=TEXT)),
            content=_array(_object(("type", "text"), type={"const": "reasoning_text"}, text=TEXT)),
        ),
    ]
}
_FORMAT = _object(
    ("type",),
    type={"enum": ["text", "json_object", "json_schema"]},
    name=TEXT,
    description=TEXT,
    strict=_BOOLEAN,
    schema=_OBJECT,
)
_NAMED_FUNCTION = _object(("type", "name"), type={"const": "function"}, name=TEXT)
_ALLOWED_FUNCTIONS = _object(
    ("type", "mode", "tools"),
    type={"const": "allowed_tools"},
    mode=_ALLOWED_MODE,
    tools=_array(_NAMED_FUNCTION, minItems=1),
)
_RESPONSES: Schema = {
    "model": _MODEL,
    "input": {"oneOf": [TEXT, _array(_ITEM, minItems=1)]},
    "instructions": TEXT,
    "tools": _array(_object(("type", "name"), type={"const": "function"}, **_FUNCTION), maxItems=MAX_TOOLS),
    "tool_choice": {"oneOf": [_CHOICE_WORDS, _NAMED_FUNCTION, _ALLOWED_FUNCTIONS]},
    "parallel_tool_calls": _PARALLEL,
    "text": _object((), format=_FORMAT, verbosity={"const": "medium"}),
    "reasoning": _object((), effort=_EFFORT, summary=TEXT, generate_summary=TEXT),
    "metadata": {
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
    "include": _array({"const": REASONING_INCLUDE}),
    **{name: {"type": "string", "description": "Repeated in the answer."} for name in NAMES},
    "store": {"const": False},
    "background": {"const": False},
    "truncation": {"const": "disabled"},
    "stream_options": _object((), include_obfuscation=_BOOLEAN),
}
_OTHERS_OF_CHATS = {
    name: schema for name, schema in _COMMON.items() if name not in ("stream_options", "response_format", "model")
}

BODIES: dict[str, Schema] = {}
"""By path, the schema of its body."""


def field_schema(field: RequestField) -> Schema:
    """Return the schema of one plain value."""
    shape: Schema = {"type": field.kind, "description": field.doc}
    if field.low is not None:
        shape["exclusiveMinimum" if field.above else "minimum"] = field.low
    if field.high is not None:
        shape["maximum"] = field.high
    return shape


_IGNORED_TOO: Schema = {
    "additionalProperties": {"description": "Ignored and named in the header X-Twinpool-Ignored, or refused by name."}
}


def _body(
    fields: Mapping[str, RequestField], others: Schema, required: tuple[str, ...], ignored: bool = True
) -> Schema:
    unread = {name: {"description": f"Ignored: {why}."} for name, why in IGNORED.items()} if ignored else {}
    plain = {name: field_schema(field) for name, field in fields.items()}
    fields_of = {**unread, **plain, **others}
    properties = {name: schema if name in required else _or_null(schema) for name, schema in fields_of.items()}
    return _object(required, **properties) | _IGNORED_TOO


def _or_null(schema: Schema) -> Schema:
    """Null means that a field isn't given."""
    return schema if not schema.keys() - {"description"} else {"anyOf": [schema, {"type": "null"}]}


BODIES |= {
    "/v1/completions": _body(COMPLETION, {**_COMMON, "prompt": _PROMPT}, ("prompt",)),
    "/v1/chat/completions": _body(CHAT, _OF_CHATS, ("messages",)),
    "/v1/messages": _body(
        {**_ONE_ANSWER, "max_tokens": CHAT["max_tokens"]},
        {**_OTHERS_OF_CHATS, **_ANTHROPIC},
        ("max_tokens", "messages"),
    ),
    "/v1/messages/count_tokens": _body(_ONE_ANSWER, {**_OTHERS_OF_CHATS, **_ANTHROPIC}, ("messages",)),
    "/v1/responses": _body(
        {**_ONE_ANSWER, "max_output_tokens": MAX_OUTPUT_TOKENS}, {**_OTHERS_OF_CHATS, **_RESPONSES}, ("input",)
    ),
    "/v1/responses/input_tokens": _body(_ONE_ANSWER, {**_OTHERS_OF_CHATS, **_RESPONSES}, ("input",)),
    "/tokenize": _body(
        TOKENIZE,
        {
            "model": _MODEL,
            "prompt": TEXT,
            "messages": _MESSAGES,
            "chat_template_kwargs": _TEMPLATE_ARGS,
            "tools": _TOOL_LIST,
        },
        (),
    ),
    "/detokenize": _body({}, {"model": _MODEL, "tokens": TOKENS}, ("tokens",)),
}
