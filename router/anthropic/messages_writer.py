"""Writing of answers in the shape of Anthropic's Messages API: blocks of thinking, text and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.contracts.compact_json import compact_json, sse_event
from twinpool.contracts.outside_data import read_json
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput, OutputDelta
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart, joined


class MessagesWriter:
    """The writer of one HTTP answer, with the interface of `router.openai.response_writer.ResponseWriter`."""

    def __init__(self, answer_id: str, model: str) -> None:
        self._answer_id, self._id, self._model = answer_id, f"msg_{answer_id}", model
        self._choice: ChoiceOutput | None = None
        self._block = -1
        """The number of the latest block."""
        self._open = ""
        """The type of the block that is open."""

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the answer's only choice; called once, before anything is written."""
        (self._choice,) = choices

    # ------------------------------------------------------------ streamed

    def chunk(self, piece: OutputDelta) -> bytes:
        """Return the events of a delta; empty where it adds nothing."""
        events: list[bytes] = []
        if piece.first:
            message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
            events.append(_event("message_start", message=message))
        for part in piece.parts if piece.parts is not None else _plain(piece.text):
            self._tell(part, events)
        if piece.finish is not None:
            self._close(events)
            reason, stop = self._ending()
            delta = {"stop_reason": reason, "stop_sequence": stop}
            events.append(_event("message_delta", delta=delta, usage=self.usage()))
        return b"".join(events)

    def closing(self, twinpool: object | None) -> bytes:
        """Return the end of a stream."""
        return _event("message_stop", **({} if twinpool is None else {"twinpool": twinpool}))

    @staticmethod
    def failed(failure: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        return sse_event(error_body(failure), "error")

    def _tell(self, part: AnswerPart, events: list[bytes]) -> None:
        match part:
            case ContentPart(text):
                self._begin("text", {"text": ""}, events)
                delta = {"type": "text_delta", "text": text}
            case ReasoningPart(text):
                self._begin("thinking", {"thinking": "", "signature": ""}, events)
                delta = {"type": "thinking_delta", "thinking": text}
            case CallPart(name):
                self._close(events)
                call_id = _call_id(self._answer_id, self._block + 1)
                self._begin("tool_use", {"id": call_id, "name": name, "input": {}}, events)
                return
            case ArgumentsPart(text):
                delta = {"type": "input_json_delta", "partial_json": text}
        events.append(_event("content_block_delta", index=self._block, delta=delta))

    def _begin(self, kind: str, block: dict[str, Any], events: list[bytes]) -> None:
        if self._open == kind:
            return
        self._close(events)
        self._block, self._open = self._block + 1, kind
        events.append(_event("content_block_start", index=self._block, content_block={"type": kind, **block}))

    def _close(self, events: list[bytes]) -> None:
        if self._open:
            events.append(_event("content_block_stop", index=self._block))
            self._open = ""

    # ------------------------------------------------------------ whole

    def whole(self, twinpool: object | None) -> list[bytes]:
        """Return the body of an answer that isn't streamed."""
        choice = self._bound
        reason, stop = self._ending()
        parts = choice.parts if choice.parts is not None else _plain("".join(choice.text))
        content = _blocks(parts, self._answer_id)
        message = {**self._head(), "content": content, "stop_reason": reason, "stop_sequence": stop}
        if twinpool is not None:
            message["twinpool"] = twinpool
        return [compact_json(message).encode()]

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far; `input_tokens` leaves out what the cache had."""
        choice = self._bound
        cached = choice.cached_tokens
        return {
            "input_tokens": len(choice.request.prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(choice.tokens),
        }

    @property
    def _bound(self) -> ChoiceOutput:
        assert self._choice is not None, "bind comes first"
        return self._choice

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "usage": self.usage()}

    def _ending(self) -> tuple[str, str | None]:
        """Return why the answer ended, and by which stop sequence."""
        choice = self._bound
        if choice.finish == "length":
            return "max_tokens", None
        if isinstance(choice.stop, str):
            return "stop_sequence", choice.stop
        return "tool_use" if choice.calls else "end_turn", None


def error_body(failure: ApiError) -> bytes:
    """Return the body of an error response."""
    kind = _KINDS.get(failure.status, "api_error")
    return compact_json({"type": "error", "error": {"type": kind, "message": failure.message}}).encode()


_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error",
    422: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def _plain(text: str) -> list[AnswerPart]:
    return [ContentPart(text)] if text else []


def _blocks(parts: Sequence[AnswerPart], answer_id: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for part in joined(parts):
        kind = blocks[-1]["type"] if blocks else ""
        match part:
            case ContentPart(text):
                if kind != "text":
                    blocks.append({"type": "text", "text": ""})
                blocks[-1]["text"] += text
            case ReasoningPart(text):
                if kind != "thinking":
                    blocks.append({"type": "thinking", "thinking": "", "signature": ""})
                blocks[-1]["thinking"] += text
            case CallPart(name):
                blocks.append({"type": "tool_use", "id": _call_id(answer_id, len(blocks)), "name": name, "input": {}})
            case ArgumentsPart(text):
                blocks[-1]["input"] = _object(text)
    return blocks


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where `max_tokens` cut them."""
    try:
        found = read_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(kind: str, **content: object) -> bytes:
    return sse_event(compact_json({"type": kind, **content}), kind)


def _call_id(answer_id: str, block: int) -> str:
    """The id of the call in a block: no other answer's or block's."""
    return f"toolu_{answer_id}_{block}"
