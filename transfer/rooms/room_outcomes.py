"""Outcomes of rooms, as values for the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId, WorkerName
from twinpool.transfer.planes.data_plane import PageNumbers
from twinpool.transfer.rooms.metadata_slots import HandoverMetadata


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """The room's pages can be written from now on."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class RoomReleased:
    """The room is over; the sender needs nothing of its request any more."""

    room: RoomId
    received: bool
    """Whether decode has received everything."""
    reason: str = ""
    damaged: bool = False
    """Whether pages or metadata arrived that did not match their tags: the fault may be in the pages that were sent."""


@dataclass(frozen=True, slots=True)
class SendablePages:
    """Finished pages `first ..` of a sequence in one pool: their indices, and their content tags."""

    first: int
    indices: tuple[int, ...]
    tags: tuple[ContentTag, ...]


@dataclass(frozen=True, slots=True)
class LayeredPages:
    """Pages that a step under way will have finished, by pool, and the generation of their request: how often it has
    started over."""

    runs: Mapping[str, PageNumbers]
    generation: int


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """The prompt that a room is to receive: the block hash of each of its pages, and the number of its positions."""

    keys: tuple[bytes, ...]
    positions: int


@dataclass(frozen=True, slots=True)
class PromptArrived:
    """Everything of the room arrived and is verified; the leases, by pool, are the caller's now."""

    room: RoomId
    leases: Mapping[str, Lease]
    metadata: HandoverMetadata
    received: Mapping[str, int]
    """Bytes that were handed over, by pool."""
    digests: Mapping[str, Mapping[int, int]]
    """Digests of the pages that were handed over, by pool and page number."""
    hidden_s: float = 0.0
    """Seconds of the transfer beside which the prompt was computed, as the writer says."""
    exposed_s: float = 0.0
    """Seconds from the end of its computation until everything was written, as the writer says, and then verified."""

    @property
    def bytes(self) -> int:
        return sum(self.received.values())

    def release(self) -> None:
        """Release all leases: nobody wants the prompt any more."""
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
