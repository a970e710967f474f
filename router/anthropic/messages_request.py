"""A body of ``/v1/messages`` as the body of a chat that asks for the same.

Fields that Anthropic's API doesn't have are those of chats (`seed`, `min_p` and so on). `thinking` sets the template's
`enable_thinking`; how long a model thinks isn't bounded but by `max_tokens`. `cache_control` changes no answer:
prefixes are cached in any case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from twinpool.contracts.errors import RequestError
from twinpool.router.openai.request_fields import (
    BOOLEAN,
    EFFORT,
    FUNCTION,
    INTEGER,
    MAX_STOPS,
    MAX_TOOLS,
    MODEL,
    OBJECT,
    TEXT,
    WORD,
    RequestField,
    Schema,
    array_of,
    describe,
    ignored_field,
    object_of,
    one_of,
    shaped,
    text_or,
)
from twinpool.router.text.chat_template import PicturePart, TextParts

_OF_CHATS = ("n", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids")
"""Fields whose answers have no place in the shape of this API."""
REFUSED = {
    "mcp_servers": "tools of the server's are not supported",
    "container": "tools of the server's are not supported",
    "context_management": "nothing is compacted; shorten the messages",
    "compaction": "nothing is compacted; shorten the messages",
    "thread": "nothing is stored here: send the whole conversation",
    "diagnostics": "nothing is stored here, so there is no earlier message to compare with",
    "inference_geo": "who runs this server decides where",
}
"""Fields that would change the answer, or promise what can't be kept, unless what they say is nothing."""
IGNORED = {
    "metadata": "names the client",
    "user_profile_id": "names the client",
    "workspace_id": "names the client",
    "service_tier": "says where to run; the router decides",
    "speed": "says where to run; the router decides",
    "cache_control": "prefixes are cached in any case",
    "betas": "belongs into a header",
    "billing_policy": "nothing is billed",
    "fallback_credit_token": "nothing is billed",
    "fallbacks": "there is one model, and it declines nothing",
}
"""Fields that can't change the answer here, with the reason."""
OUTPUT = ("format", "effort", "task_budget")
"""The fields of `output_config` that are known."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(NamedTuple):
    """A body that was read."""

    chat: dict[str, Any]
    """The body of the chat."""
    ignored: tuple[str, ...]
    """The fields of Anthropic's API that have no effect."""


def read_messages_body(body: Mapping[str, Any]) -> MessagesBody:
    """Read a body. Raises `RequestError` naming what is wrong or isn't supported."""
    given = {name: value for name, value in body.items() if value is not None}
    max_tokens = given.get("max_tokens")
    if max_tokens is None:
        raise RequestError("max_tokens is missing", param="max_tokens")
    messages = _system(given.pop("system", None)) + _messages(given.pop("messages", None))
    chat: dict[str, Any] = {"messages": messages}
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        chat["continue_final_message"] = True
    for name, why in REFUSED.items():
        if given.pop(name, None):
            raise RequestError(f"{name}: {why}", param=name)
    # A mark of where to cache is in every request of some clients, and is kept: so much need not be told.
    ignored = [ignored_field(name) for name in IGNORED if given.pop(name, None) and name != "cache_control"]
    output = given.get("output_config")
    if isinstance(output, dict):
        ignored += [ignored_field(f"output_config.{name}") for name in output if name not in OUTPUT]
    for name, field in FIELDS.items():
        if field.read is not None and name in given:
            chat |= field.read(given.pop(name))
    for name in _OF_CHATS:
        if name in given:
            raise RequestError(f"{name} belongs to /v1/chat/completions", param=name)
    return MessagesBody({**given, **chat}, tuple(ignored))


def _system(system: object) -> list[dict[str, Any]]:
    if system is None or system in ("", []):
        return []
    return [{"role": "system", "content": _text_of(system, "system")}]


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be an array of at least one message", param="messages")
    return [turn for number, message in enumerate(messages) for turn in _turns(message, f"messages[{number}]")]


def _turns(message: object, where: str) -> list[dict[str, Any]]:
    """The turns of one message: results of tools are turns of their own, before what else a user says."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ("user", "assistant"):
        raise RequestError(f"{where}.role is user or assistant; got {describe(role)}", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or an array of blocks", param="messages")
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for number, block in enumerate(content):
        at = f"{where}.content[{number}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image"} if role == "user" and (picture := _picture(block, at)) is not None:
                texts.append(picture)
            case {"type": "tool_result", "tool_use_id": str(call_id)} if role == "user":
                told = block.get("content")
                text = _text_of(told, f"{at}.content", pictures=True) if told else ""
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)} if (
                role == "assistant"
            ):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thoughts.append(text)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                raise RequestError(f"{at}: a block of type {describe(kind)} is not supported here", param="messages")
    turn: dict[str, Any] = {"role": role, "content": TextParts(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return results if results and not texts else [*results, turn]


def _picture(block: object, where: str) -> PicturePart | None:
    """The picture of a block; None where it has none."""
    match block:
        case {"type": "image", "source": {"type": "base64", "media_type": str(media), "data": str(data)}}:
            return PicturePart(f"data:{media};base64,{data}", where)
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return PicturePart(url, where)
    return None


def _text_of(content: object, where: str, *, pictures: bool = False) -> str:
    """The text of a string or of blocks, among which `pictures` may be."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for number, block in enumerate(content if isinstance(content, list) else [None]):
        picture = _picture(block, f"{where}[{number}]") if pictures else None
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else picture
        if not isinstance(text, str):
            kinds = "text or image" if pictures else "text"
            raise RequestError(f"{where} must be a string or blocks of type {kinds}", param=where.partition("[")[0])
        parts.append(text)
    return TextParts(parts)


def _stops(stops: object) -> dict[str, Any]:
    return {"stop": stops} if stops else {}


def _tools(tools: object) -> dict[str, Any]:
    if not isinstance(tools, list):
        raise RequestError(f"tools must be an array; got {describe(tools)}", param="tools")
    return {"tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]}


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        raise RequestError(f"{where}: only tools of the client's own are supported", param="tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in ("tool", *_CHOICES):
        raise RequestError(f"tool_choice.type is auto, any, tool or none; got {describe(kind)}", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    asked: dict[str, Any] = {"tool_choice": named if kind == "tool" else _CHOICES[str(kind)]}
    if choice.get("disable_parallel_tool_use") is not None:
        asked["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return asked


def _thinking(thinking: object) -> dict[str, Any]:
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(f"thinking.type is enabled, adaptive or disabled; got {describe(kind)}", param="thinking")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}


def _output(config: object) -> dict[str, Any]:
    asked = config.get("format") if isinstance(config, dict) else None
    if not isinstance(config, dict):
        raise RequestError("output_config has format and effort", param="output_config")
    if config.get("task_budget"):
        raise RequestError("output_config.task_budget isn't kept: use max_tokens", param="output_config")
    chat: dict[str, Any] = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    if asked is None:
        return chat
    if not isinstance(asked, dict) or asked.get("type") != "json_schema":
        raise RequestError("output_config.format.type is json_schema", param="output_config")
    return {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}}}


_IMAGE = object_of("type", type=one_of("base64", "url"), media_type=TEXT, data=TEXT, url=TEXT)
_BLOCKS = (
    object_of("type text", type={"const": "text"}, text=TEXT),
    object_of("type source", type={"const": "image"}, source=_IMAGE),
    object_of("type thinking", type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
    object_of("type id name input", type={"const": "tool_use"}, id=TEXT, name=TEXT, input=OBJECT),
    object_of("type tool_use_id", type={"const": "tool_result"}, tool_use_id=TEXT, content=text_or("text")),
)
_CONTENT: Schema = {"oneOf": [TEXT, array_of({"oneOf": list(_BLOCKS)})]}
_CHOICE = object_of("type", type=one_of("auto", "any", "tool", "none"), name=TEXT, disable_parallel_tool_use=BOOLEAN)
_THINKING = object_of("type", type=one_of("enabled", "adaptive", "disabled"), budget_tokens=INTEGER)
_FORMAT = object_of("type schema", type={"const": "json_schema"}, schema=OBJECT)
_TOOL = object_of("name input_schema", **FUNCTION, input_schema=OBJECT)
FIELDS: dict[str, RequestField] = {
    "model": MODEL,
    "messages": shaped(
        array_of(object_of("role content", role=one_of("user", "assistant"), content=_CONTENT), minItems=1)
    ),
    "system": shaped(text_or("text")),
    "stop_sequences": shaped(array_of(WORD, maxItems=MAX_STOPS), _stops),
    "tools": shaped(array_of(_TOOL, maxItems=MAX_TOOLS), _tools),
    "tool_choice": shaped(_CHOICE, _tool_choice),
    "thinking": shaped(_THINKING, _thinking),
    "output_config": shaped(object_of(effort=EFFORT, format=_FORMAT), _output),
    "metadata": shaped(OBJECT),
    "service_tier": shaped(TEXT),
}
"""Fields of Anthropic's API that chats don't have, or have in another shape."""
