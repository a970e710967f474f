"""A chat's message in OpenAI's shape, of the parts that were found in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart


class ChatMessage:
    """One message, told whole or in deltas. The ids of its calls follow from its own."""

    def __init__(self, message_id: str) -> None:
        """`message_id`: no other message's."""
        self._id, self._calls = message_id, 0

    def add(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the delta that tells `parts`, the next ones."""
        shape: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case ContentPart(text):
                    shape["content"] = shape.get("content", "") + text
                case ReasoningPart(text):
                    shape["reasoning_content"] = shape.get("reasoning_content", "") + text
                case CallPart(name):
                    function = {"name": name, "arguments": ""}
                    head = {"index": self._calls, "id": f"call_{self._id}_{self._calls}"}
                    calls.append({**head, "type": "function", "function": function})
                    self._calls += 1
                case ArgumentsPart(text):
                    if not calls:
                        calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        if calls:
            shape["tool_calls"] = calls
        return shape

    def whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the message of all parts."""
        shape = self.add(parts)
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in shape.get("tool_calls", ())
        ]
        message: dict[str, Any] = {"content": shape.get("content", None if calls else "")}
        if "reasoning_content" in shape:
            message["reasoning_content"] = shape["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        return message
