"""Ids are types, so that a page can't be passed for a slot."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

PageId = NewType("PageId", int)
"""Index of a page in one pool. Page 0 is the null page: zeros, never leased."""

SlotId = NewType("SlotId", int)
"""Index of a slot (metadata, recurrent state) in one pool."""

Epoch = NewType("Epoch", int)
"""How often a page or slot has been freed; a mapping with an older epoch is stale."""

LeaseId = NewType("LeaseId", int)
RequestId = NewType("RequestId", str)
RoomId = NewType("RoomId", str)
"""One hand-over of one request; minted by the router, never by a client."""

WorkerName = NewType("WorkerName", str)
Incarnation = NewType("Incarnation", int)
"""A worker's start number, granted by the controller, larger at every start."""

NULL_PAGE = PageId(0)


class Role(StrEnum):
    """The two phases."""

    PREFILL = "prefill"
    DECODE = "decode"
