"""Writing of answers in the shape of OpenAI's Responses API: one object, or the events from which clients build it.

The output items (reasoning, messages, calls) are built part by part (`OutputItems`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twinpool.contracts.compact_json import compact_json, sse_event
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput, OutputDelta
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart, joined


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


class ResponsesWriter:
    """Implements `router.openai.response_stream.AnswerWriter`."""

    def __init__(self, request: GenerateRequest, answer_id: str, created: int, model: str) -> None:
        self._created = created
        self._choice: ChoiceOutput | None = None
        self._items = OutputItems(answer_id)
        self._number = -1
        """The number of the latest event."""
        sampling = request.sampling
        self._head: dict[str, Any] = {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **json.loads(request.repeated),
        }

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the answer's only choice; called once, before anything is written."""
        (self._choice,) = choices

    # ------------------------------------------------------------ streamed

    def chunk(self, piece: OutputDelta) -> bytes:
        """Return the events of a delta; empty where it adds nothing."""
        written: list[bytes] = [] if self._number >= 0 else self._opening()
        for part in piece.parts if piece.parts is not None else _plain(piece.text):
            written += self._written(self._items.add(part))
        if piece.finish is not None:
            written += self._written(self._items.finish(self._status))
        return b"".join(written)

    def closing(self, twinpool: object | None) -> bytes:
        """Return the end of a stream: the event with the whole response."""
        status = self._status
        return self._event(f"response.{status}", {"response": self._ended(twinpool)})

    def failed(self, failure: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        opening = b"" if self._number >= 0 else b"".join(self._opening())
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(failure.status, "server_error")
        error = {"code": code, "message": failure.message}
        response = self._response("failed", self._items.ended, error=error, usage=self.usage())
        return opening + self._event("response.failed", {"response": response})

    def _opening(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [self._event(kind, {"response": response}) for kind in ("response.created", "response.in_progress")]

    def _written(self, events: Iterable[ItemEvent]) -> list[bytes]:
        return [self._event(event.type, event.fields) for event in events]

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return sse_event(compact_json({"type": kind, "sequence_number": self._number, **fields}), kind)

    # ------------------------------------------------------------ whole

    def whole(self, twinpool: object | None) -> list[bytes]:
        """Return the body of an answer that isn't streamed."""
        choice = self._bound
        for part in joined(choice.parts if choice.parts is not None else _plain("".join(choice.text))):
            for _ in self._items.add(part):
                pass
        for _ in self._items.finish(self._status):
            pass
        return [compact_json(self._ended(twinpool)).encode()]

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        choice = self._bound
        prompt, answer = len(choice.request.prompt), len(choice.tokens)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + answer,
        }

    @property
    def _bound(self) -> ChoiceOutput:
        assert self._choice is not None, "bind comes first"
        return self._choice

    @property
    def _status(self) -> str:
        return "incomplete" if self._bound.finish == "length" else "completed"

    def _ended(self, twinpool: object | None) -> dict[str, Any]:
        choice, status = self._bound, self._status
        changes: dict[str, Any] = {"usage": self.usage()}
        if status == "incomplete":
            changes["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            changes["completed_at"] = self._created + int(choice.ended_at - choice.request.arrived)
        if twinpool is not None:
            changes["twinpool"] = twinpool
        return self._response(status, self._items.ended, **changes)

    def _response(self, status: str, output: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
        nothing = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **nothing, "status": status, "output": output, **changes}


def _plain(text: str) -> list[AnswerPart]:
    return [ContentPart(text)] if text else []
