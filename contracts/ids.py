"""Ids, each of a type of its own, so that a room's id can't be passed for a request's; and the roles."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

Epoch = NewType("Epoch", int)
"""How often a page or slot has been freed; a block table with an older epoch is stale."""

LeaseId = NewType("LeaseId", int)
RequestId = NewType("RequestId", str)
RoomId = NewType("RoomId", str)
"""The id of one hand-over of one request; minted by the router, never by a client."""


def room_of(request: RequestId, minted: str) -> RoomId:
    """The id of a room of a request. It names the request, so that what is logged about the room is found by that."""
    return RoomId(f"{request}/{minted}")


def request_in(room: RoomId) -> RequestId:
    """The request that a room's id names; empty for a room of none."""
    return RequestId(room.rpartition("/")[0])


WorkerName = NewType("WorkerName", str)
Incarnation = NewType("Incarnation", int)
"""A worker's start number, granted by the controller, larger at every start."""
NO_INCARNATION = Incarnation(0)
"""The number that no incarnation has: the first is 1."""


class Role(StrEnum):
    """The role of a worker: which phase of requests it computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    """Both phases, over one KV cache: the request never leaves the worker."""


def dp_rank(name: WorkerName, size: int) -> tuple[int, int]:
    """Which group of `size` data-parallel ranks a worker is of, by the number in its name, and which of its ranks it
    is. Raises `ValueError` for a name without a number."""
    return divmod(int(name.rpartition("-")[2]), size)


PAIR = (Role.PREFILL, Role.DECODE)
"""The roles of two pools: a request needs a worker of each, and its state goes from one to the other."""
