"""Messages of kinds that this build doesn't know: left out and counted, as a newer build may send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from contracts.errors import UnknownKind
from contracts.ids import Role

MessageT = TypeVar("MessageT")
ValueT = TypeVar("ValueT")


def known(read: Callable[[MessageT], ValueT], messages: Iterable[MessageT]) -> tuple[list[ValueT], int]:
    """What `read` makes of those whose kind this build knows, and how many others there are."""
    values, others = list[ValueT](), 0
    for message in messages:
        try:
            values.append(read(message))
        except UnknownKind:
            others += 1
    return values, others


def role_from_proto(role: str) -> Role:
    """Raises `UnknownKind` for a role that this build doesn't know."""
    if role not in tuple(Role):
        raise UnknownKind(f"unknown role {role!r}")
    return Role(role)
