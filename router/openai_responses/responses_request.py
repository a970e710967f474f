"""A body of ``/v1/responses`` as the body of a chat that asks for the same, and what of it the answer repeats.

Nothing is stored: fields that ask for what was stored are refused, and `store` is ignored, as in chats: the answer says
that it isn't. Tools are the client's own. Fields that the
Responses API doesn't have (`seed`, `min_p` and so on) are those of chats. A tool's `strict` is false if it isn't given.

Its `input` becomes the messages of a chat. What an assistant does in one turn is several items (reasoning, a message,
calls), and one message of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from twinpool.contracts.errors import RequestError
from twinpool.router.openai.request_fields import (
    ALLOWED_MODE,
    BOOLEAN,
    CHOICE_WORDS,
    EFFORT,
    FORMATS,
    FUNCTION,
    MAX_IGNORED,
    MAX_TOKENS,
    MAX_TOOLS,
    MODEL,
    OBJECT,
    PARALLEL,
    TEXT,
    WORD,
    RequestField,
    Schema,
    array_of,
    check_value,
    describe,
    ignored_field,
    object_of,
    one_of,
    shaped,
    text_or,
)
from twinpool.router.text.chat_template import PicturePart, TextParts

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
"""The types of items that are taken."""


def read_input(value: object) -> list[dict[str, Any]]:
    """Return the messages. Raises `RequestError` naming the item that is wrong or isn't supported."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string or an array of at least one item", param="input")
    turns = _Turns()
    for number, item in enumerate(value):
        turns.add(item, f"input[{number}]")
    return turns.messages


class _Turns:
    """The messages so far; the last of them is open to further items while it is the assistant's."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """By call id, the name of its tool."""

    def add(self, item: object, where: str) -> None:
        """Take the next item."""
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object; got {describe(item)}", param="input")
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._output(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "item_reference":
                raise RequestError(f"{where}: nothing is stored here: send the item itself", param="input")
            case kind:
                known = ", ".join(ITEMS)
                raise RequestError(f"{where}: the types of items are {known}; got {describe(kind)}", param="input")

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(f"{where}.role is {', '.join(_ROLES)}; got {describe(role)}", param="input")
        text = _item_text(item.get("content"), f"{where}.content")
        turn = self._assistant(said=True) if role == "assistant" else self._new(role)
        turn["content"] = text

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id, name, arguments = (_string(item, key, where) for key in ("call_id", "name", "arguments"))
        if call_id in self._names:
            raise RequestError(f"{where}.call_id: {describe(call_id)} is there twice", param="input")
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _output(self, item: dict[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._names:
            raise RequestError(
                f"{where}.call_id: there is no function_call {describe(call_id)} before it; responses aren't stored, "
                "so send the items of the whole conversation",
                param="input",
            )
        turn = self._new("tool")
        turn |= {
            "content": _item_text(item.get("output"), f"{where}.output"),
            "tool_call_id": call_id,
            "name": self._names[call_id],
        }

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        texts = _reasons(item, "content", "reasoning_text", where) or _reasons(item, "summary", "summary_text", where)
        if not texts and item.get("encrypted_content"):
            raise RequestError(f"{where}.encrypted_content was written by another server: leave it out", param="input")
        self._assistant(reasoned=True)["reasoning_content"] = "\n".join(texts)

    def _new(self, role: str) -> dict[str, Any]:
        self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _assistant(self, *, said: bool = False, reasoned: bool = False) -> dict[str, Any]:
        """Return the assistant's message that the next item belongs to: what is `said` comes before calls, and what is
        `reasoned` before both."""
        last = self.messages[-1] if self.messages else {}
        closed = (said or reasoned) and (last.get("content") or "tool_calls" in last)
        if last.get("role") != "assistant" or closed or (reasoned and "reasoning_content" in last):
            return self._new("assistant")
        return last


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or (not value and key != "arguments"):
        raise RequestError(f"{where}.{key} must be a string; got {describe(value)}", param="input")
    return value


def _item_text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or parts of type input_text", param="input")
    return TextParts([_part(part, f"{where}[{number}]") for number, part in enumerate(content)])


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)} | {
            "type": "refusal",
            "refusal": str(text),
        }:
            return text
        case {"type": "input_image", "image_url": str(url)}:
            return PicturePart(url, where)
        case {"type": "input_image"}:
            raise RequestError(f"{where}: files aren't stored here: give image_url with the data", param="input")
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(kind, str) and kind not in _TEXTS:
        raise RequestError(f"{where}: text and images are taken; {describe(kind)} is not supported", param="input")
    raise RequestError(f"{where} must be a part of type input_text with a text", param="input")


def _reasons(item: dict[str, Any], key: str, kind: str, where: str) -> list[str]:
    """Return the texts of reasoning under `key`."""
    parts = item.get(key) or []
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == kind else None
        for part in (parts if isinstance(parts, list) else [None])
    ]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where}.{key} must be an array of parts of type {kind}", param="input")
    return [str(text) for text in texts]


MAX_METADATA = 16
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
_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of chats' fields, and of those that they come from here."""
_OF_CHATS = {name: f"use {ours}" for name, ours in _PARAMS.items()} | dict.fromkeys(
    ("n", "logprobs", "prompt_logprobs", "return_token_ids"), "it belongs to /v1/chat/completions"
)

NESTED = {
    "text": ("format", "verbosity"),
    "reasoning": ("effort", "summary", "generate_summary", "mode", "context"),
    "stream_options": ("include_obfuscation",),
}
"""The fields within fields that are known."""
_NAME = RequestField("string", "Repeated in the answer.")
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
    for name, field in FIELDS.items():
        if field.read is not None and name in given:
            chat |= field.read(given.pop(name))
    return ResponsesBody({**given, **chat}, repeated, tuple(ignored[:MAX_IGNORED]))


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
        "reasoning": {"effort": None, "summary": None, **_fields_of(given.get("reasoning"))},
        "text": {"format": {"type": "text"}, **_fields_of(given.get("text"))},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_repeated_tool(tool) for tool in tools] if isinstance(tools, list) else [],
        **{name: check_value(name, given[name], _NAME) for name in NAMES if name in given},
        **{name: given[name] for name in ("temperature", "top_p") if name in given},
    }


def _fields_of(value: object) -> dict[str, Any]:
    """What an object says; empty where it is none."""
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else {}


def _repeated_tool(tool: object) -> object:
    unsaid = {"description": None, "parameters": None, "strict": False}
    return {**unsaid, **_fields_of(tool)} if isinstance(tool, dict) else tool


def _metadata(metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if (
        not isinstance(metadata, dict)
        or len(metadata) > MAX_METADATA
        or not all(isinstance(text, str) and len(text) <= 512 and len(key) <= 64 for key, text in metadata.items())
    ):
        raise RequestError(
            f"metadata has at most {MAX_METADATA} keys of up to 64 characters, with strings of up to 512",
            param="metadata",
        )
    return metadata


def _instructions(text: object) -> list[dict[str, Any]]:
    if text is not None and not isinstance(text, str):
        raise RequestError(f"instructions must be a string; got {describe(text)}", param="instructions")
    return [{"role": "system", "content": text}] if text else []


def _max_output_tokens(count: object) -> dict[str, Any]:
    return {"max_completion_tokens": check_value("max_output_tokens", count, FIELDS["max_output_tokens"])}


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


_IMAGE = object_of("type image_url", type={"const": "input_image"}, image_url=TEXT, detail=TEXT)
_PARTS = (object_of("type text", type=one_of(*_TEXTS), text=TEXT), _IMAGE)
_CONTENT: Schema = {"oneOf": [TEXT, array_of({"oneOf": list(_PARTS)})]}
_TYPE_FUNCTION: Schema = {"type": {"const": "function"}}
_ITEMS = (
    object_of("role content", type={"const": "message"}, role=one_of(*_ROLES), content=_CONTENT),
    object_of(
        "type call_id name arguments",
        type={"const": "function_call"},
        id=TEXT,
        call_id=WORD,
        name=WORD,
        arguments={**TEXT, "description": "The JSON text of an object."},
        status=TEXT,
    ),
    object_of(
        "type call_id output", type={"const": "function_call_output"}, call_id=WORD, output=text_or("input_text")
    ),
    object_of(
        "type",
        type={"const": "reasoning"},
        id=TEXT,
        summary=array_of(object_of("type text", type={"const": "summary_text"}, text=TEXT)),
        content=array_of(object_of("type text", type={"const": "reasoning_text"}, text=TEXT)),
    ),
)
_FORMAT = object_of("type", type=FORMATS, name=TEXT, description=TEXT, strict=BOOLEAN, schema=OBJECT)
_NAMED = object_of("type name", **_TYPE_FUNCTION, name=TEXT)
_ALLOWED = object_of(
    "type mode tools", type={"const": "allowed_tools"}, mode=ALLOWED_MODE, tools=array_of(_NAMED, minItems=1)
)
FIELDS: dict[str, RequestField] = {
    "max_output_tokens": RequestField(
        "integer", "Tokens to generate at most, those of reasoning included.", 1, MAX_TOKENS, read=_max_output_tokens
    ),
    "model": MODEL,
    "input": shaped({"oneOf": [TEXT, array_of({"oneOf": list(_ITEMS)}, minItems=1)]}),
    "instructions": shaped(TEXT),
    "tools": shaped(array_of(object_of("type name", **_TYPE_FUNCTION, **FUNCTION), maxItems=MAX_TOOLS), _tools),
    "tool_choice": shaped({"oneOf": [CHOICE_WORDS, _NAMED, _ALLOWED]}, _tool_choice),
    "parallel_tool_calls": PARALLEL,
    "text": shaped(object_of(format=_FORMAT, verbosity={"const": "medium"}), _text),
    "reasoning": shaped(object_of(effort=EFFORT, summary=TEXT, generate_summary=TEXT), _reasoning),
    "metadata": shaped(
        {
            **OBJECT,
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {**TEXT, "maxLength": 512},
        }
    ),
    "include": shaped(array_of({"const": REASONING_INCLUDE}), _include),
    **dict.fromkeys(NAMES, _NAME),
    **dict.fromkeys(("store", "background"), shaped({"const": False})),
    "truncation": shaped({"const": "disabled"}, _truncation),
    "stream_options": shaped(object_of(include_obfuscation=BOOLEAN), _stream_options),
}
"""Fields of the Responses API that chats don't have, or have in another shape."""
