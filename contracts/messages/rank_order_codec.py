"""Rank orders as bytes (msgpack, an explicit tag for each order), and the channel that carries them.

Only the types in `TAGS` can come out of bytes; anything else raises `WireError`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

import msgpack

from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.rank_orders import (
    AwaitReady,
    BeginStep,
    BindArenas,
    CheckPages,
    CloseLink,
    CopyPages,
    DescribeMemory,
    DigestPages,
    EndRank,
    FetchPages,
    FindPages,
    FollowerNotice,
    FormGroup,
    LayerCount,
    LayerSpan,
    LeaveRole,
    MarkStep,
    OpenLink,
    Order,
    PagePlaces,
    PageSpan,
    PermitRoom,
    PostWrite,
    PutPages,
    RevokeRoom,
    RowOrder,
    RunStep,
    ServeExperts,
    SeverLink,
    SeverPeer,
    StoredPage,
    TableEntries,
    TablePlace,
    ZeroPages,
)

TAGS: dict[int, type[Any]] = {
    1: ZeroPages,
    2: CopyPages,
    3: DigestPages,
    4: CheckPages,
    5: BindArenas,
    8: RunStep,
    9: MarkStep,
    16: DescribeMemory,
    17: OpenLink,
    18: CloseLink,
    19: PostWrite,
    20: PermitRoom,
    21: RevokeRoom,
    24: FindPages,
    25: FetchPages,
    26: PutPages,
    32: FormGroup,
    33: AwaitReady,
    34: EndRank,
    35: SeverPeer,
    36: SeverLink,
    37: LeaveRole,
    38: BeginStep,
    39: ServeExperts,
}
_TAG_OF = {cls: tag for tag, cls in TAGS.items()}
_NAMES = {cls: tuple(f.name for f in fields(cls)) for cls in TAGS.values()}
_INNER: dict[tuple[type[Any], str], type[Any]] = {
    (CopyPages, "pieces"): PageSpan,
    (RunStep, "rows"): RowOrder,
    (RunStep, "entries"): TableEntries,
    (PostWrite, "sources"): PagePlaces,
    (PostWrite, "targets"): PagePlaces,
    (PostWrite, "layers"): LayerSpan,
    (MarkStep, "groups"): LayerCount,
    (PermitRoom, "places"): PagePlaces,
    (FetchPages, "pages"): StoredPage,
    (PutPages, "pages"): StoredPage,
}


def encode(order: Order) -> bytes:
    packed: bytes = msgpack.packb([_TAG_OF[type(order)], *(getattr(order, n) for n in _NAMES[type(order)])])
    return packed


def decode(data: bytes | memoryview) -> Order:
    """Read an order. Raises `WireError` for anything but an order of `TAGS`."""
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
    if inner is LayerCount:
        return tuple(LayerCount(*count) for count in value)
    if inner is RowOrder:
        start, tokens, tables = value
        return RowOrder(start, tokens, tuple(TablePlace(*table) for table in tables))
    return inner(*value)


class OrderAnswers(Protocol):
    """The answers of all followers to one order."""

    @property
    def done(self) -> bool:
        """Whether all followers have answered. Never waits."""

    def wait(self) -> list[Any]:
        """Wait for the answers; returns one for each follower, by rank from 1 on.

        Raises `PeerDead` when a follower is gone, or silent for too long.
        """


class OrderChannel(Protocol):
    """The leader's line to the followers. Used from one thread."""

    @property
    def size(self) -> int:
        """Ranks in all, the leader included."""

    def send(self, order: Order) -> None:
        """Have all followers carry out `order` after all earlier orders; waits for no answer. Raises `PeerDead`."""

    def ask(self, order: Order) -> OrderAnswers:
        """Send an order that is answered. Raises `PeerDead`, as `send` does."""

    def heard(self) -> list[tuple[int, FollowerNotice]]:
        """The followers' notices since the last call, each with the follower's rank. Never waits."""
