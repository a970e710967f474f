"""Ids are types, so that a room can't be passed for a request."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

Epoch = NewType("Epoch", int)
"""How often a page or slot has been freed; a mapping with an older epoch is stale."""

LeaseId = NewType("LeaseId", int)
RequestId = NewType("RequestId", str)
RoomId = NewType("RoomId", str)
"""One hand-over of one request; minted by the router, never by a client."""

WorkerName = NewType("WorkerName", str)
Incarnation = NewType("Incarnation", int)
"""A worker's start number, granted by the controller, larger at every start."""


class Role(StrEnum):
    """The two phases."""

    PREFILL = "prefill"
    DECODE = "decode"
