"""The `input` of a response as the messages of a chat.

What an assistant does in one turn is several items (reasoning, a message, calls), and one message of a chat.
"""

from __future__ import annotations

from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.router.openai.request_fields import describe
from twinpool.router.text.chat_template import TextParts

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
        text = _text(item.get("content"), f"{where}.content")
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
            "content": _text(item.get("output"), f"{where}.output"),
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


def _text(content: object, where: str) -> str:
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
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(kind, str) and kind not in _TEXTS:
        raise RequestError(f"{where}: only text is answered; {describe(kind)} is not supported", param="input")
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
