"""The base of messages that are their own wire format, and the types of the numbers that they carry.

A `Message` is encoded as a msgpack array of its kind (in a union) and its fields in order, by `msgspec`, with no code
in between. Positions are part of the protocol: a field may be appended, with the default that older builds mean by
saying nothing. Readers of older builds skip it, and to readers of newer builds a field that is missing has its default.
Fields are never moved, taken out or given another type (`tests/wire/test_stream_format.py`).

What a field's type forbids is refused where it is decoded, with the field's path. Nothing is checked where a message is
made.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

UNSIGNED = Meta(ge=0)
Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Uint64 = Annotated[int, UNSIGNED]  # msgpack has no larger integers
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Neither NaN nor infinite."""
POSITIONS = Meta(max_length=2**24)
"""The most values of a sequence that has one for each position. Bounds are checked before there is memory for a
length."""
SOME = Meta(max_length=2**16)
"""The most values of anything else."""
SKIP_UNKNOWN = object()
"""Marks a tuple of messages whose entries of kinds that only a newer build knows (of a union, or a value of an enum)
are left out where they are read (`contracts.wire.message_codec`): ``Annotated[tuple[X, ...], SOME, SKIP_UNKNOWN]``."""
NAME_CHARS = 253
"""The most characters of the name of a worker, a node or a router, as of a host's."""
NAME_LENGTH = Meta(max_length=NAME_CHARS)
Name = Annotated[str, NAME_LENGTH]
TokenIds = Annotated[tuple[Uint32, ...], POSITIONS]
"""Token ids of one sequence."""


class Message(Struct, frozen=True, array_like=True):
    """A frozen value; those of one union have a `tag`, the kind's name on the wire, which is never used again for
    another."""


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON for people has it: with the names of its fields, those of messages in it included."""
    return {field.name: _named(getattr(message, field.name)) for field in structs.fields(message)}


def _named(value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    if isinstance(value, tuple):
        return [_named(one) for one in value]
    return value
