"""The output items of a response (reasoning, messages, calls), built part by part, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart


class ItemEvent(NamedTuple):
    """An event about an item, without its sequence number."""

    type: str
    fields: dict[str, Any]


@dataclass(slots=True)
class _OpenItem:
    """The item that parts are added to."""

    kind: str
    head: dict[str, Any]
    """Its fields besides status and text."""
    place: dict[str, Any]
    """The fields by which events say where a delta belongs."""
    texts: list[str] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return self.kind == "function_call"

    @property
    def told_by(self) -> str:
        """What the events of its text begin with."""
        return f"response.{_TEXTS[self.kind]}"

    @property
    def more(self) -> dict[str, Any]:
        """What else the events of its text have."""
        return {"logprobs": []} if self.kind == "message" else {}

    def part(self, text: str) -> dict[str, Any]:
        """Return the content part with a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shape(self, status: str) -> dict[str, Any]:
        """Return the item as it is told."""
        text = "".join(self.texts)
        if self.is_call:
            return {**self.head, "status": status, "arguments": text}
        # An item in progress is told before its content part is.
        return {**self.head, "status": status, "content": [] if status == "in_progress" else [self.part(text)]}


_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The items of one answer; ids follow from the answer's."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self.ended: list[dict[str, Any]] = []
        """The items that are complete, or broke off at the answer's end."""
        self._open: _OpenItem | None = None

    def add(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Take the next part; yields the events."""
        match part:
            case ContentPart(text):
                yield from self._begin("message", {"role": "assistant"})
            case ReasoningPart(text):
                yield from self._begin("reasoning", {"summary": []})
            case CallPart(name):
                yield from self.end("completed")
                call_id = f"call_{self._id}_{len(self.ended)}"
                yield from self._begin("function_call", {"call_id": call_id, "name": name})
                return
            case ArgumentsPart(text):
                pass
        assert self._open is not None, "arguments follow a call"
        if text:
            self._open.texts.append(text)
            yield ItemEvent(f"{self._open.told_by}.delta", {**self._open.place, "delta": text, **self._open.more})

    def end(self, status: str) -> Iterator[ItemEvent]:
        """End the item that is open, if one is."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.texts)
        if item.is_call:
            yield ItemEvent(f"{item.told_by}.done", {**item.place, "arguments": text})
        else:
            yield ItemEvent(f"{item.told_by}.done", {**item.place, "text": text, **item.more})
            yield ItemEvent("response.content_part.done", {**item.place, "part": item.part(text)})
        shape = item.shape(status)
        yield ItemEvent("response.output_item.done", {"output_index": len(self.ended), "item": shape})
        self.ended.append(shape)

    def finish(self, status: str) -> Iterator[ItemEvent]:
        """End the answer: one that is complete without a message or a call gets a message without text."""
        yield from self.end(status)
        if status == "completed" and all(item["type"] == "reasoning" for item in self.ended):
            yield from self.add(ContentPart(""))
            yield from self.end(status)

    def _begin(self, kind: str, head: dict[str, Any]) -> Iterator[ItemEvent]:
        if self._open is not None and self._open.kind == kind:
            return
        yield from self.end("completed")
        index = len(self.ended)
        item_id = f"{_IDS[kind]}_{self._id}_{index}"
        place: dict[str, Any] = {"item_id": item_id, "output_index": index}
        if kind != "function_call":
            place["content_index"] = 0
        item = self._open = _OpenItem(kind, {"id": item_id, "type": kind, **head}, place)
        yield ItemEvent("response.output_item.added", {"output_index": index, "item": item.shape("in_progress")})
        if not item.is_call:
            yield ItemEvent("response.content_part.added", {**place, "part": item.part("")})
