"""Orders between ranks as bytes: an explicit tag for each, msgpack."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

import msgpack

from contracts.errors import WireError
from contracts.messages.rank_orders import (
    Bond,
    Check,
    Compute,
    Connect,
    Copy,
    Describe,
    Digest,
    Disconnect,
    End,
    Exists,
    Fetch,
    Form,
    Kept,
    Order,
    Permit,
    Piece,
    Places,
    Post,
    Put,
    Ready,
    Revoke,
    RowOrder,
    Tidings,
    Zero,
)

TAGS: dict[int, type[Any]] = {
    1: Zero,
    2: Copy,
    3: Digest,
    4: Check,
    5: Bond,
    8: Compute,
    16: Describe,
    17: Connect,
    18: Disconnect,
    19: Post,
    20: Permit,
    21: Revoke,
    24: Exists,
    25: Fetch,
    26: Put,
    32: Form,
    33: Ready,
    34: End,
}
_TAG_OF = {cls: tag for tag, cls in TAGS.items()}
_NAMES = {cls: tuple(f.name for f in fields(cls)) for cls in TAGS.values()}
_INNER: dict[tuple[type[Any], str], type[Any]] = {
    (Copy, "pieces"): Piece,
    (Compute, "rows"): RowOrder,
    (Post, "sources"): Places,
    (Post, "targets"): Places,
    (Permit, "places"): Places,
    (Fetch, "pages"): Kept,
    (Put, "pages"): Kept,
}


def encode(order: Order) -> bytes:
    packed: bytes = msgpack.packb([_TAG_OF[type(order)], *(getattr(order, n) for n in _NAMES[type(order)])])
    return packed


def decode(data: bytes | memoryview) -> Order:
    """Raises `WireError` for anything but an order of `TAGS`."""
    try:
        tag, *values = msgpack.unpackb(data, use_list=False)
        cls = TAGS[tag]
        names = _NAMES[cls]
        for at, name in enumerate(names):
            inner: Any = _INNER.get((cls, name))
            if inner is not None:
                values[at] = tuple(_made(inner, value) for value in values[at])
        order: Order = cls(**dict(zip(names, values, strict=True)))
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise WireError(f"no order: {error}") from None
    return order


def _made(inner: type[Any], value: tuple[Any, ...]) -> Any:
    if inner is RowOrder:
        start, tokens, tables = value
        return RowOrder(start, tokens, tuple(Places(*table) for table in tables))
    return inner(*value)


class Answers(Protocol):
    """What followers answer to one order."""

    @property
    def done(self) -> bool:
        """Whether all have answered."""

    def wait(self) -> list[Any]:
        """One answer a follower, by rank from 1 on. Raises `PeerDead` when one is gone, or silent for too long."""


class Followers(Protocol):
    """The leader's line to the other ranks. One thread."""

    @property
    def size(self) -> int:
        """Ranks in all, the leader included."""

    def tell(self, order: Order) -> None:
        """Have all followers carry out `order` after all that they were told before. Raises `PeerDead`."""

    def ask(self, order: Order) -> Answers:
        """The same for an order that is answered."""

    def heard(self) -> list[tuple[int, Tidings]]:
        """What followers told of their own accord since the last call, each with its rank. Never waits."""
