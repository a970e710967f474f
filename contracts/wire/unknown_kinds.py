"""Skipping messages of kinds that this build doesn't know, since a newer build may send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from twinpool.contracts.errors import UnknownKind
from twinpool.contracts.ids import Role

MessageT = TypeVar("MessageT")
ValueT = TypeVar("ValueT")
_ROLES = {role.value: role for role in Role}


def known(read: Callable[[MessageT], ValueT], messages: Iterable[MessageT]) -> tuple[list[ValueT], int]:
    """The values that `read` makes of `messages`, in order, and the number of messages for which it raised
    `UnknownKind`."""
    values, others = list[ValueT](), 0
    for message in messages:
        try:
            values.append(read(message))
        except UnknownKind:
            others += 1
    return values, others


def role_from_proto(role: str) -> Role:
    """A role from the wire. Raises `UnknownKind` for a role that this build doesn't know."""
    found = _ROLES.get(role)
    if found is None:
        raise UnknownKind(f"unknown role {role!r}")
    return found
