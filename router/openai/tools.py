"""The fields about tools: `tools`, `tool_choice` and `parallel_tool_calls`, and calls in a conversation."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.contracts.outside_data import MAX_NESTED, read_json
from twinpool.router.openai.request_fields import MAX_TOOLS, describe
from twinpool.router.openai.structured_output import names_engine, refuse_unreadable
from twinpool.router.text.chat_template import CallArguments

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatTool:
    """One tool, a function of the client's."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments, an object."""
    strict: bool
    """Whether its arguments must follow the schema where the model decides by itself to call it."""
    raw: dict[str, Any]
    """As the client gave it, for the chat template."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a chat, and which of them are to be called."""

    tools: tuple[ChatTool, ...]
    """Those that may be called: the one named, those allowed, or all."""
    forced: bool
    """Whether at least one must be called."""
    parallel: bool
    """Whether several may be."""
    shown: tuple[dict[str, Any], ...]
    """All tools, for the chat template."""
    named: bool = False
    """Whether the request names the tool that is to be called."""

    @property
    def constrained(self) -> bool:
        """Whether calls follow a grammar: one must be made or only one may be, not every tool may be called, or a tool
        is strict."""
        fewer = not self.parallel or len(self.tools) < len(self.shown)
        return self.forced or fewer or any(tool.strict for tool in self.tools)


def read_tools(body: Mapping[str, Any]) -> ToolUse | None:
    """Return the tools that a chat may use, None without any. Raises `RequestError` naming what is wrong."""
    given, choice = body.get("tools"), body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise RequestError(f"parallel_tool_calls must be true or false; got {describe(parallel)}", param=_PARALLEL)
    if given is not None and not isinstance(given, list):
        raise RequestError(f"tools must be an array; got {describe(given)}", param="tools")
    if not given:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS}; got {len(given)}", param="tools")
    refuse_unreadable(given, "tools")
    tools = tuple(_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(given))
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise RequestError(f"tools: {twice} is there twice", param="tools")
    if choice == "none":
        return None
    allowed, forced = _read_choice(choice, names)
    callable_ = tuple(tool for tool in tools if tool.name in allowed)
    named = isinstance(choice, dict) and choice["type"] == "function"
    shown = tuple(tool.raw for tool in tools)
    return ToolUse(callable_, forced, parallel is not False and not named, shown, named)


_PARALLEL = "parallel_tool_calls"


def _read_choice(choice: object, names: Sequence[str]) -> tuple[Collection[str], bool]:
    """Return the names of the tools that may be called, and whether one of them must be."""
    match choice:
        case None | "auto":
            return names, False
        case "required":
            return names, True
        case {"type": "function"}:
            return (_tool_named(choice, names),), True
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as few},
        }:
            return {_tool_named(tool, names) for tool in few}, mode == "required"
    raise RequestError(
        'tool_choice is "none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": '
        f'"allowed_tools", "allowed_tools": {{"mode": "auto" or "required", "tools": [...]}}}}; got {describe(choice)}',
        param="tool_choice",
    )


def _tool_named(reference: object, names: Sequence[str]) -> str:
    match reference:
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return name
        case {"type": "function", "function": {"name": str(name)}}:
            raise RequestError(f"tool_choice: there is no tool {describe(name)}", param="tool_choice")
    raise RequestError(
        f'tool_choice: a tool is named by {{"type": "function", "function": {{"name": ...}}}}; got '
        f"{describe(reference)}",
        param="tool_choice",
    )


def _read_tool(tool: object, where: str) -> ChatTool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(
            f'{where} must be {{"type": "function", "function": ...}}; got {describe(tool)}', param="tools"
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes and underscores; got "
            f"{describe(name)}",
            param="tools",
        )
    for key, kinds in (("description", str), ("strict", bool)):
        value = function.get(key)
        if value is not None and not isinstance(value, kinds):
            raise RequestError(f"{where}.function.{key}: got {describe(value)}", param="tools")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(f"{where}.function.parameters must be the JSON schema of an object", param="tools")
    if names_engine(parameters) is not None:
        raise RequestError(f"{where}.function.parameters: x-guidance is no keyword of JSON schema", param="tools")
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(part, dict) for part in properties.values()):
        raise RequestError(f"{where}.function.parameters.properties must be an object of schemas", param="tools")
    if properties:  # A parameter that a tool doesn't name can only be a mistake.
        parameters = {"additionalProperties": False, **parameters}
    return ChatTool(name, parameters, function.get("strict") is True, tool)


def read_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Return the earlier calls in a message as templates take them: with their arguments as an object."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be an array; got {describe(calls)}", param="messages")
    return [_read_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise RequestError(f"{where} must have a function with a name", param="messages")
    arguments, text = function.get("arguments") or "{}", ""
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = read_json(arguments)
        except ValueError as error:
            arguments, text = _whole_object(arguments, error), ""
            if arguments is None:
                raise RequestError(f"{where}.function.arguments is not valid JSON: {error}", param="messages") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be a JSON object", param="messages")
    return {**call, "type": "function", "function": {**function, "arguments": CallArguments(arguments, text)}}


def _whole_object(cut: str, error: ValueError) -> dict[str, Any] | None:
    """The object that a text begins, as the arguments of an answer that `max_tokens` or a stop string ended, with what
    is there of it; None where the text isn't only cut off. `error`: why it is no JSON."""
    if not isinstance(error, json.JSONDecodeError) or len(cut) > MAX_CUT:
        return None
    text = error.msg.startswith("Unterminated string") or _CUT_UNICODE.fullmatch(cut, error.pos) is not None
    if not text and not _CUT_VALUE.fullmatch(cut, error.pos):
        return None
    open_: list[str] = []
    ends: deque[tuple[int, str]] = deque(maxlen=_ENDS_TRIED)
    for found in _STRUCTURE.finditer(cut):
        mark = found[0]
        if mark in "{[":
            open_.append("}" if mark == "{" else "]")
            ends.append((found.end(), "".join(reversed(open_))))
        elif mark in "}]":
            open_.pop()
        elif mark == ",":
            ends.append((found.start(), "".join(reversed(open_))))
        if len(open_) > MAX_NESTED:
            return None
    whole = _CUT_ESCAPE.sub("", cut) + '"' if text else cut
    for tried in (whole + "".join(reversed(open_)), *(cut[:end] + closers for end, closers in reversed(ends))):
        with suppress(ValueError):
            found_object = read_json(tried)
            return found_object if isinstance(found_object, dict) else None
    return None


MAX_CUT = 1 << 18
"""Characters of arguments that are looked through for what is whole of them."""
_ENDS_TRIED = 4
"""A cut property or value goes back to the last comma or bracket; a few more than that one are tried."""
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{},]', re.DOTALL)
"""A string, so that what is in it isn't looked at, or a mark between values."""
_CUT_VALUE = re.compile(r"t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?|-|\.|[eE][+-]?|")
_CUT_UNICODE = re.compile("u[0-9a-fA-F]{0,4}")
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
"""An escape at the end of a text that isn't whole."""
