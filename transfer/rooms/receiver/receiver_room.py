"""A room of the receiver, and the check whether what arrives for it is what was promised (hazard A9).

Digests of pages are an operation of the device, so that the loop that decodes doesn't wait for them. Its pages are
pinned until it has ended, whatever becomes of their room meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from twinpool.cache.device.device_port import (
    DEVICE,
    DONE,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    PageSpanUse,
    RemoteWrite,
    UncheckedRemoteWrite,
    attempt,
    failure,
)
from twinpool.cache.memory.kv_cache_spec import extents
from twinpool.cache.pool.page_allocator import InFlightPins, Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import RoomId
from twinpool.transfer.planes.data_plane import PageNumbers
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.receiver.receiver_peers import ReceiverPeer
from twinpool.transfer.rooms.room_messages import HandoverMetadata, copy_out
from twinpool.transfer.rooms.room_states import ExpectedPrompt, ReceiverState, RoomProgress


@dataclass(eq=False)
class PageCheck:
    """A check of the pages that `wrote` tells of."""

    wrote: m.PagesWritten
    completion: Completion = DONE
    digests: dict[str, Callable[[], list[int]]] = field(default_factory=dict)
    """By pool, what returns the digests of the pages that arrived; at once when the check is done."""

    @property
    def done(self) -> bool:
        return self.completion.done


@dataclass(eq=False)
class ReceiverRoom:
    """A room as the receiver has it: the places that it owns while it lasts, and what of them has arrived."""

    id: RoomId
    peer: ReceiverPeer
    expected: ExpectedPrompt
    heard: float
    """When a notice of the room was heard last, or the room was opened or granted, by the clock."""
    state: ReceiverState = ReceiverState.OPEN
    leases: Mapping[str, Lease] = field(default_factory=dict)
    slot: Lease | None = None
    runs: Mapping[str, PageNumbers] = field(default_factory=dict)
    """The granted places, of pools of which something is missing."""
    grant: m.PageGrant | None = None
    promised: bool = False
    """Whether the grant has left: its places then come back by the writer's word or death alone, unless the plane is
    revocable."""
    access: int = 0
    """Number of the writer's access by which it writes, once the grant has left."""
    remote: RemoteWrite = field(default_factory=UncheckedRemoteWrite)
    """The declaration to the device that the writer may write the granted places."""
    damaged: bool = False
    """Whether something arrived that isn't what was promised: the writer is told so whenever it is asked to stop."""
    asked: float = 0.0
    """When the writer was last asked to stop, by the clock."""
    shares: RoomProgress = field(default_factory=lambda: RoomProgress({}))
    """The numbers that have still to arrive."""
    digests: dict[str, dict[int, int]] = field(default_factory=dict)
    """Digests of the pages that arrived, by pool and page number."""
    notices: deque[m.PagesWritten | m.SlotWritten] = field(default_factory=deque)
    """Notices of writes that are not applied yet: what the first of them tells of is being checked."""
    checking: PageCheck | None = None
    """The check of what the first of `notices` tells of, once it was begun."""

    @property
    def ticket(self) -> int:
        return self.grant.ticket if self.grant is not None else 0

    @property
    def aborting(self) -> bool:
        return self.state is ReceiverState.ABORTING

    def abort(self, reason: str) -> m.AbortRoom:
        """Return the message that asks the writer to stop."""
        return m.AbortRoom(self.id, m.reason_of(reason), self.damaged, self.ticket)


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
