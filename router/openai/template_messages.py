"""A chat's messages as the template of a format takes them, where that isn't how OpenAI's API has them."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]


def messages_for(tool_format: str, messages: Sequence[Message], *, developer: bool = True) -> list[Message]:
    """Return the messages for the template of a model that writes calls in `tool_format`. Reasoning has both of the
    names that templates read; where they don't know a `developer`, it is the system."""
    found = [_with_reasoning(message) for message in messages]
    if not developer:
        found = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in found]
    change = _CHANGES.get(tool_format)
    return found if change is None else change(found)


def _with_reasoning(message: Message) -> Message:
    told = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if told is None else {"thinking": told, **message, "reasoning_content": told}


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients give reasoning back."""


def _harmony(messages: Sequence[Message]) -> list[Message]:
    """gpt-oss's template takes one call a message, which its result follows, and no content beside reasoning there."""
    found: list[Message] = []
    results: dict[object, deque[int]] = {}
    """By call id, the places of its results: clients may number the calls of each turn anew."""
    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            results.setdefault(message.get("tool_call_id"), deque()).append(at)
    placed: set[int] = set()
    for at, message in enumerate(messages):
        if at in placed:
            continue
        calls = message.get("tool_calls") or ()
        if not calls:
            found.append(message)
            continue
        said = "\n\n".join(filter(None, (message.get("reasoning_content"), message.get("content"))))
        bare = {name: value for name, value in message.items() if name not in _REASONING}
        for number, call in enumerate(calls):
            one = {**bare, "content": "", "tool_calls": [call]}
            found.append({**one, "thinking": said} if said and number == 0 else one)
            places = results.get(call.get("id"), deque()) if len(calls) > 1 else deque()
            while places and places[0] < at:
                places.popleft()
            if places:
                placed.add(places[0])
                found.append(messages[places.popleft()])
    return found


def _renamed_calls(messages: Sequence[Message], name: Callable[[str, str, int], str]) -> list[Message]:
    """Give each call another id, by its id, its tool's name and its number, and its result the same."""
    ids: dict[str, str] = {}
    numbers = itertools.count()
    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            changed = []
            for call in calls:
                given = str(call.get("id", ""))
                ids[given] = name(given, call["function"]["name"], next(numbers))
                changed.append({**call, "id": ids[given]})
            message = {**message, "tool_calls": changed}  # noqa: PLW2901
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}  # noqa: PLW2901
        found.append(message)
    return found


def _mistral(messages: Sequence[Message]) -> list[Message]:
    """Mistral's templates take ids of nine letters and digits alone."""
    return _renamed_calls(messages, lambda given, _name, _number: hashlib.sha256(given.encode()).hexdigest()[:9])


def _kimi(messages: Sequence[Message]) -> list[Message]:
    """Kimi's templates write a call's id in the place of its name."""
    return _renamed_calls(messages, lambda _given, name, number: f"functions.{name}:{number}")


_CHANGES: dict[str, Callable[[Sequence[Message]], list[Message]]] = {
    "harmony": _harmony,
    "mistral": _mistral,
    "mistral_json": _mistral,
    "kimi_k2": _kimi,
}
