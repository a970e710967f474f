"""The calls of all services, and every message that is within their requests and answers."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgpack
import msgspec

from tests.wire.instances import all_of, fields_of, is_struct, messages_of_union, plain
from twinpool.cluster.controller.controller_actions import SUPERVISE
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages import calls
from twinpool.contracts.messages.calls import Method
from twinpool.contracts.messages.stream_frames import StreamOpening

METHODS: list[Method[Any, Any]] = [*(one for one in vars(calls).values() if isinstance(one, Method)), SUPERVISE]


def members(of: Any) -> list[type[Message]]:
    """The messages of a union, or the one message."""
    return messages_of_union(of) or [of]


def messages_of(of: Any) -> list[Any]:
    """Instances of a request or an answer, as `all_of` makes them, that are within the bounds of their fields."""
    found = [message for cls in members(of) for message in all_of(cls)]
    return [
        msgspec.structs.replace(one, router="r") if getattr(one, "router", "a router") == "" else one for one in found
    ]


def within(kind: Any) -> set[type[Message]]:
    """The messages in a type, those in their fields included."""
    kind = plain(kind)
    if is_struct(kind):
        return {kind}.union(*(within(of) for of, _ in fields_of(kind).values()))
    return set().union(*(within(one) for one in typing.get_args(kind) if one is not types.NoneType))


MESSAGES = sorted(
    within(StreamOpening).union(*(within(of) for one in METHODS for of in (one.request, one.answer))),
    key=lambda cls: cls.__name__,
)


def raw(message: Message) -> list[Any]:
    """A message as it travels, before it is packed."""
    values: list[Any] = msgpack.unpackb(msgspec.msgpack.encode(message))
    return values
