"""The arrival check: whether the pages and metadata that arrived for a room are the promised ones (hazard A9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache.memory.required_pages import extents
from cache.pool.pool_set import PoolSet
from contracts.errors import WireError
from transfer.rooms import room_messages as m
from transfer.rooms.metadata_slots import HandoverMetadata, copy_out
from transfer.rooms.receiver.receiver_rooms import ReceiverRoom


@dataclass(frozen=True, slots=True)
class Damage:
    """Something arrived that isn't what was promised."""

    pool: str
    """The pool, or "metadata"."""
    what: str


@dataclass(frozen=True, slots=True)
class Hole:
    """Pages are missing before the pages or metadata that arrived, as after a cut connection. No byte was damaged."""

    what: str


class ArrivalCheck:
    """Checks pages in the pools, and metadata in its slots."""

    def __init__(self, pools: PoolSet, slots: torch.Tensor, verify: bool) -> None:
        """`slots`: uint8 [slots, SLOT_BYTES]. `verify`: whether digests of pages are computed."""
        self._pools, self._slots, self._verify = pools, slots, verify

    def pages(self, room: ReceiverRoom, wrote: m.PagesWritten) -> Damage | Hole | None:
        """Check one write of several pools. None: it is right, and was entered into the room's shares and digests."""
        for part in wrote.parts:
            numbers = range(part.first, part.first + len(part.keys))
            if not room.shares.takes(part.pool, numbers) or len(part.keys) != len(part.digests):
                return Hole(f"{part.pool}: pages {part.first}.. came when these were due: {room.shares}")
            if part.keys != room.expected.keys[numbers.start : numbers.stop]:
                return Damage(part.pool, f"pages {numbers.start}..{numbers.stop - 1} are of another prompt")
            bad = self._mismatches(room, part) if self._verify else []
            if bad:
                return Damage(part.pool, f"pages {bad} don't match their tags")
            room.shares.advance(part.pool, numbers)
            room.digests.setdefault(part.pool, {}).update(zip(numbers, part.digests, strict=True))
        return None

    def metadata(self, room: ReceiverRoom) -> HandoverMetadata | Damage | Hole:
        """Return the room's metadata, copied out of its slot; a `Hole` while pages of any pool have still to arrive."""
        assert room.slot is not None
        if not room.shares.done:
            return Hole(f"metadata: it came before this had arrived: {room.shares}")
        try:
            return copy_out(self._slots, room.slot.indices[0], room.id, room.slot.epochs[0])
        except WireError as error:
            return Damage("metadata", str(error))

    def _mismatches(self, room: ReceiverRoom, part: m.PageTags) -> list[int]:
        """Return the numbers of pages that arrived with another digest than they were sealed with."""
        numbers = range(part.first, part.first + len(part.digests))
        firsts, ends = extents(self._pools.spec, part.pool, numbers, room.expected.positions)
        found = self._pools.digest(part.pool, room.runs[part.pool].at(numbers), firsts, ends)
        return [n for n, a, b in zip(numbers, found, part.digests, strict=True) if a != b]
