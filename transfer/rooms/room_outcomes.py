"""What rooms come to, as values for the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache.memory.page_digest import ContentTag
from cache.pool.page_allocator import Lease
from contracts.errors import ErrorKind
from contracts.ids import RoomId, WorkerName
from transfer.rooms.metadata_slots import HandoverMetadata


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """The room's pages can be written from now on."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class RoomReleased:
    """The room is over; nothing of its request is needed for it any more."""

    room: RoomId
    received: bool
    """Whether decode has everything."""
    reason: str = ""
    damaged: bool = False
    """What arrived did not match its tags: the fault may be in the pages that were sent."""


@dataclass(frozen=True, slots=True)
class SendablePages:
    """Pages `first ..` of a sequence in one pool, finished: where they are, and their tags."""

    first: int
    indices: tuple[int, ...]
    tags: tuple[ContentTag, ...]


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """What a room is to receive: the block hash of each prompt page, and how many positions there are."""

    keys: tuple[bytes, ...]
    positions: int


@dataclass(frozen=True, slots=True)
class PromptArrived:
    """Everything is here and verified; the leases, by pool, are the caller's now."""

    room: RoomId
    leases: Mapping[str, Lease]
    metadata: HandoverMetadata
    received: Mapping[str, int]
    """Bytes by pool."""
    digests: Mapping[str, Mapping[int, int]]
    """Of what was handed over, by pool and number."""

    @property
    def bytes(self) -> int:
        return sum(self.received.values())

    def release(self) -> None:
        """Nobody wants it any more."""
        for lease in self.leases.values():
            lease.release()


@dataclass(frozen=True, slots=True)
class HandoverFailed:
    """The hand-over failed; the caller has nothing to release."""

    room: RoomId
    kind: ErrorKind
    message: str
    blame: WorkerName | None


@dataclass(frozen=True, slots=True)
class PromptAnswered:
    """Prefill's first token ended the request; there is nothing to decode."""

    room: RoomId
