"""A body of ``/v1/responses`` as the body of a chat that asks for the same, and what of it the answer repeats.

Nothing is stored: fields that ask for what was stored are refused, and `store` is ignored, as in chats: the answer says
that it isn't. Tools are the client's own. Fields that the
Responses API doesn't have (`seed`, `min_p` and so on) are those of chats. A tool's `strict` is false if it isn't given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from twinpool.contracts.errors import RequestError
from twinpool.router.openai.request_fields import (
    IGNORED_AT_MOST,
    MAX_TOKENS,
    RequestField,
    check_value,
    describe,
    ignored_field,
)
from twinpool.router.openai_responses.input_items import read_input

MAX_OUTPUT_TOKENS = RequestField("integer", 1, MAX_TOKENS, "Tokens to generate at most, those of reasoning included.")
METADATA_AT_MOST = 16
REASONING_INCLUDE = "reasoning.encrypted_content"
_STORED = "responses aren't stored here: send the whole conversation as input"
REFUSED = {
    "previous_response_id": _STORED,
    "conversation": _STORED,
    "background": "responses aren't stored here: stream instead",
    "prompt": "prompts aren't stored here: send instructions and input",
    "context_management": "nothing is compacted; shorten the input",
    "max_tool_calls": "it bounds tools of the server's, of which there are none",
    "moderation": "nothing is moderated",
    "access_programs": "there are none",
    "image": "only text is answered",
    "personality": "the model has none to choose from; say it in instructions",
    "top_logprobs": "log-probabilities come with /v1/chat/completions",
}
"""Fields that are refused, unless what they say is nothing (null, false, 0 or empty)."""
_OF_CHATS = {
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    **dict.fromkeys(("n", "logprobs", "return_token_ids"), "it belongs to /v1/chat/completions"),
}
_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""Names of chats' fields, and of those that they come from here."""


NESTED = {
    "text": ("format", "verbosity"),
    "reasoning": ("effort", "summary", "generate_summary", "mode", "context"),
    "stream_options": ("include_obfuscation",),
}
"""The fields within fields that are known."""
_NAME = RequestField("string")
NAMES = ("prompt_cache_key", "safety_identifier", "user")
"""Names of the client's, which are repeated and change nothing."""


class ResponsesBody(NamedTuple):
    """A body that was read."""

    chat: dict[str, Any]
    """The body of the chat."""
    repeated: dict[str, Any]
    """The fields that the answer repeats."""
    ignored: tuple[str, ...]
    """Fields within others that have no effect."""


def read_responses(body: Mapping[str, Any]) -> ResponsesBody:
    """Read a body. Raises `RequestError` naming what is wrong or isn't supported."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, why in REFUSED.items():
        if given.pop(name, None):
            raise RequestError(f"{name}: {why}", param=name)
    for name, why in _OF_CHATS.items():
        if name in given:
            raise RequestError(f"{name}: {why}", param=name)
    repeated = _repeated(given)
    ignored = [
        ignored_field(f"{name}.{key}", [f"{name}.{each}" for each in known])
        for name, known in NESTED.items()
        if isinstance(given.get(name), dict)
        for key in given[name]
        if key not in known
    ]
    chat: dict[str, Any] = {
        "messages": _instructions(given.pop("instructions", None)) + read_input(given.pop("input", None))
    }
    for name, read in READERS.items():
        if name in given:
            chat |= read(given.pop(name))
    return ResponsesBody({**given, **chat}, repeated, tuple(ignored[:IGNORED_AT_MOST]))


def renamed(error: RequestError) -> RequestError:
    """Return an error about a chat's field as one about the field of a response that it came from."""
    name = _PARAMS.get(error.param or "")
    if name is None:
        return error
    text = str(error).replace("response_format.json_schema", "response_format").replace(str(error.param), name)
    return RequestError(text, param=name.partition(".")[0])


def _repeated(given: Mapping[str, Any]) -> dict[str, Any]:
    tools = given.get("tools")
    return {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": _metadata(given.get("metadata")),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None, **_fields_of(given, "reasoning")},
        "text": {"format": {"type": "text"}, **_fields_of(given, "text")},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_repeated_tool(tool) for tool in tools] if isinstance(tools, list) else [],
        **{name: check_value(name, given[name], _NAME) for name in NAMES if name in given},
        **{name: given[name] for name in ("temperature", "top_p") if name in given},
    }


def _fields_of(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name)
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else {}


def _repeated_tool(tool: object) -> object:
    return (
        {"description": None, "parameters": None, "strict": False, **_given(tool)} if isinstance(tool, dict) else tool
    )


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in value.items() if part is not None}


def _metadata(metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if (
        not isinstance(metadata, dict)
        or len(metadata) > METADATA_AT_MOST
        or not all(isinstance(text, str) and len(text) <= 512 and len(key) <= 64 for key, text in metadata.items())
    ):
        raise RequestError(
            f"metadata has at most {METADATA_AT_MOST} keys of up to 64 characters, with strings of up to 512",
            param="metadata",
        )
    return metadata


def _instructions(text: object) -> list[dict[str, Any]]:
    if text is not None and not isinstance(text, str):
        raise RequestError(f"instructions must be a string; got {describe(text)}", param="instructions")
    return [{"role": "system", "content": text}] if text else []


def _max_output_tokens(count: object) -> dict[str, Any]:
    return {"max_completion_tokens": check_value("max_output_tokens", count, MAX_OUTPUT_TOKENS)}


def _tools(tools: object) -> dict[str, Any]:
    if not isinstance(tools, list):
        raise RequestError(f"tools must be an array; got {describe(tools)}", param="tools")
    return {"tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]}


def _tool(tool: object, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind != "function":
        raise RequestError(
            f"{where}: only tools of type function are supported, which the client calls; got {describe(kind)}",
            param="tools",
        )
    named = {key: tool[key] for key in ("description", "strict", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": tool.get("name"), **named}}


def _tool_choice(choice: object) -> dict[str, Any]:
    match choice:
        case "auto" | "none" | "required":
            return {"tool_choice": choice}
        case {"type": "function"}:
            return {"tool_choice": _tool_named(choice)}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            allowed = {"mode": mode, "tools": [_tool_named(tool) for tool in tools]}
            return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    raise RequestError(
        'tool_choice is "none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", '
        f'"mode": "auto" or "required", "tools": [...]}}; got {describe(choice)}',
        param="tool_choice",
    )


def _tool_named(reference: object) -> dict[str, Any]:
    match reference:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise RequestError(
        f'tool_choice: a tool is named by {{"type": "function", "name": ...}}; got {describe(reference)}',
        param="tool_choice",
    )


def _text(config: object) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise RequestError("text has format and verbosity", param="text")
    if config.get("verbosity") not in (None, "medium"):
        raise RequestError(
            "text.verbosity is not passed on; give it in chat_template_kwargs if the checkpoint's template reads it",
            param="text",
        )
    match config.get("format"):
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema"} as asked:
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}}}
        case asked:
            raise RequestError(
                f"text.format.type is text, json_object or json_schema; got {describe(asked)}", param="text"
            )


def _reasoning(config: object) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise RequestError("reasoning has effort and summary", param="reasoning")
    for name, neutral in (("mode", "standard"), ("context", "auto")):
        if config.get(name) not in (None, neutral):
            raise RequestError(f"reasoning.{name} is {neutral}: leave it out", param="reasoning")
    return {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}


def _include(wanted: object) -> dict[str, Any]:
    # Reasoning is told in the clear, so there is nothing to encrypt; other names are of what is logged or stored.
    other = next((name for name in wanted if name != REASONING_INCLUDE), None) if isinstance(wanted, list) else wanted
    if other is not None:
        raise RequestError(f"include: {describe(other)} is not supported", param="include")
    return {}


def _stream_options(options: object) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise RequestError("stream_options has include_obfuscation; the usage is always told", param="stream_options")
    return {}


def _truncation(how: object) -> dict[str, Any]:
    if how != "disabled":
        raise RequestError("truncation: the input is not truncated; shorten it", param="truncation")
    return {}


READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "max_output_tokens": _max_output_tokens,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "text": _text,
    "reasoning": _reasoning,
    "include": _include,
    "stream_options": _stream_options,
    "truncation": _truncation,
}
