"""A chat whose last message is left open, so that the answer goes on with it, as transformers renders it.

A template writes a message's content somewhere in the middle of what it makes of it. So the message gets a mark at its
end, and the prompt ends where the mark came to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.contracts.errors import RequestError

_MARK = "\ue010the answer goes on here\ue011"
"""Private-use characters, so that it is nobody's text; a space behind it shows whether the template trims messages."""


def check_open(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RequestError` where an answer can't go on with the last message."""
    last = messages[-1]
    if last.get("tool_calls") or not last["content"].strip():
        raise RequestError("continue_final_message needs a last message with text and no calls", param="messages")


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with a mark at the end of the last one. Raises `RequestError` as `check_open` does."""
    check_open(messages)
    *earlier, last = messages
    return [*earlier, {**last, "content": f"{last['content']}{_MARK} "}]


def cut_at_mark(text: str) -> str:
    """Return a rendered chat up to its mark; without spaces before it where the template trims messages.

    Raises `RequestError` where the template doesn't show the last message's end.
    """
    before, found, after = text.rpartition(_MARK)
    if not found:
        raise RequestError(
            "the chat template doesn't show the last message, so nothing can go on with it", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()
