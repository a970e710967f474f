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


PAIR = (Role.PREFILL, Role.DECODE)
"""The roles of two pools: a request needs a worker of each, and its state goes from one to the other."""
