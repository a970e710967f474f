"""The arrival check: whether the pages and metadata that arrived for a room are the promised ones (hazard A9).

Digests of pages are an operation of the device, so that the loop that decodes doesn't wait for them. Its pages are
pinned until it has ended, whatever becomes of their room meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinpool.cache.device.device_port import (
    DEVICE,
    Device,
    DeviceOp,
    DeviceStream,
    PageSpanUse,
    attempt,
    failure,
)
from twinpool.cache.memory.required_pages import extents
from twinpool.cache.pool.in_flight import InFlightPins
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.errors import WireError
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.metadata_slots import HandoverMetadata, copy_out
from twinpool.transfer.rooms.receiver.page_check import PageCheck
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverRoom


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

    def __init__(self, pools: PoolSet, device: Device, slots: torch.Tensor, verify: bool) -> None:
        """`slots`: uint8 [slots, SLOT_BYTES]. `verify`: whether digests of pages are computed."""
        self._pools, self._device, self._slots, self._verify = pools, device, slots, verify
        self._pins = InFlightPins()

    def begin(self, room: ReceiverRoom, wrote: m.PagesWritten) -> PageCheck | Damage | Hole:
        """Begin to check one write of several pools. Writes of a room are checked one after the other."""
        for part in wrote.parts:
            numbers = range(part.first, part.first + len(part.keys))
            if not room.shares.takes(part.pool, numbers) or len(part.keys) != len(part.digests):
                return Hole(f"{part.pool}: pages {part.first}.. came when these were due: {room.shares}")
            if part.keys != room.expected.keys[numbers.start : numbers.stop]:
                return Damage(part.pool, f"pages {numbers.start}..{numbers.stop - 1} are of another prompt")
        if len({part.pool for part in wrote.parts}) != len(wrote.parts):
            return Hole("one write tells of a pool twice")
        check = PageCheck(wrote)
        places = {part.pool: room.runs[part.pool].at(_numbers(part)) for part in wrote.parts}
        used = tuple(PageSpanUse(DEVICE, pool, indices) for pool, indices in places.items())
        room.remote.arrived(used)
        if self._verify:
            positions = room.expected.positions

            def run() -> None:
                for part in wrote.parts:
                    firsts, ends = extents(self._pools.spec, part.pool, _numbers(part), positions)
                    check.digests[part.pool] = self._pools.digesting(part.pool, places[part.pool], firsts, ends)

            pins = [
                self._pools.allocators[pool].pin(indices, f"check of {room.id}") for pool, indices in places.items()
            ]
            check.completion = attempt(self._device, DeviceOp("check arrival", DeviceStream.LOAD, reads=used), run)
            self._pins.hold(check.completion, *pins)
            self._pins.sweep()
        return check

    def end(self, room: ReceiverRoom, check: PageCheck) -> Damage | Hole | None:
        """Return what is wrong with pages whose check is done. None: they are right, and were entered into the room's
        shares and digests."""
        self._pins.sweep()
        error = failure(check.completion)
        if error is not None:
            return Hole(f"what arrived could not be looked at: {error}")
        for part in check.wrote.parts:
            if part.pool in check.digests and (bad := _mismatches(part, check.digests[part.pool]())):
                return Damage(part.pool, f"pages {bad} don't match their tags")
        for part in check.wrote.parts:
            room.shares.advance(part.pool, _numbers(part))
            room.digests.setdefault(part.pool, {}).update(zip(_numbers(part), part.digests, strict=True))
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

    def sweep(self) -> int:
        """Let go of pages whose checks have ended; returns how many checks have not."""
        self._pins.sweep()
        return len(self._pins)

    def close(self) -> None:
        """Wait for the checks under way, and let go of their pages."""
        self._pins.settle()


def _mismatches(part: m.PageTags, found: Sequence[int]) -> list[int]:
    """Return the numbers of pages with another digest than they were sealed with."""
    return [n for n, a, b in zip(_numbers(part), found, part.digests, strict=True) if a != b]


def _numbers(part: m.PageTags) -> range:
    return range(part.first, part.first + len(part.digests))
