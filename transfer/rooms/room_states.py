"""Rooms: the hand-over of one request, as two state tables; what it still has to hand over; rooms that are over.

    decode (receiver)                                     prefill (sender)

    open: wants pages for the whole answer                open: may compute, has nowhere to write
      | Grant(pages, epochs, slot)  --------------------->  |
    granted                                               granted
      | <------------- pages written, then Wrote(tags) -----|   once a chunk, while prefill goes on
      | <------------- slot written, then WroteSlot --------|
    complete: every page verified, slot copied out        sent
      | Received -------------------------------------------> ended

Rules, each kept by the tables below:

- A writer writes only into pages it was granted, and only in `granted`.
- Where the plane is not revocable, the receiver's pages stay in quarantine (`aborting`) until the writer has said that
  it will write no more (`WriterQuiesced`, `RoomFailed`, `NothingToDecode`) or its death is proven (`lost`). Never on a
  timeout alone.
- Every terminal event of one side reaches the other: `RoomFailed` and `NothingToDecode` go to decode, `AbortRoom` to
  prefill.
- Terminal states are final; each end drops and counts a late message for an ended room.

Each pool's share of a room is a run of page numbers, handed over from its first to its last. The room is done when all
shares are (hazard C1: pages that came without their windows and states are no hand-over), and a pool of which nothing
was wanted is in a state of its own, not "all of none" (hazard C2).

A last word is the message that ends a room. A room is used once, so both ends remember the rooms that have ended,
bounded. A last word may be lost with a connection: the peer that was told it is told again once the connection is back,
and a peer that asks about an ended room later gets the same word.

What rooms come to is told to workers as values, at the end of this file.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId, WorkerName
from twinpool.contracts.state_table import StateTable
from twinpool.transfer.planes.data_plane import PageNumbers
from twinpool.transfer.rooms.room_messages import HandoverMetadata


class SenderState(StrEnum):
    """The room as prefill sees it."""

    OPEN = "open"
    GRANTED = "granted"
    SENT = "sent"
    ENDED = "ended"


class SenderEvent(StrEnum):
    GRANT = "grant"
    """Decode's pages and slot are known."""
    WROTE = "wrote"
    """Pages were posted and the notice after them."""
    SENT = "sent"
    """The slot was posted and the notice after it: nothing is written after this."""
    RECEIVED = "received"
    """Decode has verified and copied everything."""
    FINISHED = "finished"
    """The request ended with its first token; decode was told."""
    FAILED = "failed"
    """Prefill gives the request up (error, cancel, deadline); decode was told."""
    ABORT = "abort"
    """Decode gives the request up; it was answered with `WriterQuiesced`."""
    LOST = "lost"
    """Decode is gone: another incarnation, a refusal or a dead process."""


SENDER = StateTable[SenderState, SenderEvent](
    "sender room",
    {
        SenderState.OPEN: {
            SenderEvent.GRANT: SenderState.GRANTED,
            SenderEvent.FINISHED: SenderState.ENDED,
            SenderEvent.FAILED: SenderState.ENDED,
            SenderEvent.ABORT: SenderState.ENDED,
            SenderEvent.LOST: SenderState.ENDED,
        },
        SenderState.GRANTED: {
            SenderEvent.WROTE: SenderState.GRANTED,
            SenderEvent.SENT: SenderState.SENT,
            SenderEvent.FINISHED: SenderState.ENDED,
            SenderEvent.FAILED: SenderState.ENDED,
            SenderEvent.ABORT: SenderState.ENDED,
            SenderEvent.LOST: SenderState.ENDED,
        },
        SenderState.SENT: {
            SenderEvent.RECEIVED: SenderState.ENDED,
            SenderEvent.FAILED: SenderState.ENDED,
            SenderEvent.ABORT: SenderState.ENDED,
            SenderEvent.LOST: SenderState.ENDED,
        },
    },
)


class ReceiverState(StrEnum):
    """The room as decode sees it."""

    OPEN = "open"
    GRANTED = "granted"
    ABORTING = "aborting"
    """Given up here, but the writer may still write: pages and slot are in quarantine."""
    COMPLETE = "complete"
    """Everything arrived and is verified; the request runs on its own lease."""
    ENDED = "ended"


class ReceiverEvent(StrEnum):
    GRANT = "grant"
    """Pages and a slot were leased and sent to prefill."""
    WROTE = "wrote"
    """Pages arrived and match their tags."""
    COMPLETE = "complete"
    """All pages arrived, and the slot."""
    DAMAGED = "damaged"
    """Bytes arrived that don't match their tag."""
    ABORT = "abort"
    """Given up here (cancel, deadline, silence); `AbortRoom` was sent."""
    REVOKED = "revoked"
    """Given up here, on a plane that lets nobody write into an ended room."""
    QUIESCED = "quiesced"
    """The writer says that it writes no more."""
    FAILED = "failed"
    """Prefill gave the request up, and writes no more."""
    FINISHED = "finished"
    """The request ended with its first token; prefill writes no more."""
    LOST = "lost"
    """The writer's death is proven."""


RECEIVER = StateTable[ReceiverState, ReceiverEvent](
    "receiver room",
    {
        ReceiverState.OPEN: {
            ReceiverEvent.GRANT: ReceiverState.GRANTED,
            ReceiverEvent.ABORT: ReceiverState.ENDED,
            ReceiverEvent.REVOKED: ReceiverState.ENDED,
            ReceiverEvent.FAILED: ReceiverState.ENDED,
            ReceiverEvent.FINISHED: ReceiverState.ENDED,
            ReceiverEvent.LOST: ReceiverState.ENDED,
        },
        ReceiverState.GRANTED: {
            ReceiverEvent.WROTE: ReceiverState.GRANTED,
            ReceiverEvent.COMPLETE: ReceiverState.COMPLETE,
            ReceiverEvent.DAMAGED: ReceiverState.ABORTING,
            ReceiverEvent.ABORT: ReceiverState.ABORTING,
            ReceiverEvent.REVOKED: ReceiverState.ENDED,
            ReceiverEvent.FAILED: ReceiverState.ENDED,
            ReceiverEvent.FINISHED: ReceiverState.ENDED,
            ReceiverEvent.LOST: ReceiverState.ENDED,
        },
        ReceiverState.ABORTING: {
            ReceiverEvent.QUIESCED: ReceiverState.ENDED,
            ReceiverEvent.FAILED: ReceiverState.ENDED,
            ReceiverEvent.FINISHED: ReceiverState.ENDED,
            ReceiverEvent.LOST: ReceiverState.ENDED,
        },
    },
)


# ---------------------------------------------------------------- what is left, and what is over


class PoolProgress(StrEnum):
    """How far the share of one pool is."""

    NOTHING = "nothing"
    """Nothing of the pool was wanted."""
    COMING = "coming"
    DONE = "done"


class RoomProgress:
    """The numbers that are wanted of each pool, and how many of them have been handed over.

    Both ends keep one: the writer of the pages that it has still to write, the reader of those still to arrive.
    """

    def __init__(self, wanted: Mapping[str, range]) -> None:
        self._wanted = dict(wanted)
        self._next = {pool: numbers.start for pool, numbers in wanted.items()}

    def share(self, pool: str) -> PoolProgress:
        if not self._wanted.get(pool):
            return PoolProgress.NOTHING
        return PoolProgress.COMING if self.left(pool) else PoolProgress.DONE

    def left(self, pool: str) -> range:
        """Return the numbers of `pool` that are wanted and not handed over yet; empty where nothing is wanted."""
        wanted = self._wanted.get(pool, range(0))
        return range(self._next.get(pool, 0), wanted.stop)

    def takes(self, pool: str, numbers: range) -> bool:
        """Return whether `numbers` are the next ones of `pool`: not empty, without a gap, and wanted."""
        left = self.left(pool)
        return bool(numbers) and numbers.start == left.start and numbers.stop <= left.stop

    def advance(self, pool: str, numbers: range) -> None:
        """Record that `numbers` are handed over. `takes` must hold for them."""
        assert self.takes(pool, numbers), f"{pool} {numbers}: {self.left(pool)} is left"
        self._next[pool] = numbers.stop

    @property
    def done(self) -> bool:
        """Whether no pool has anything left."""
        return all(self.share(pool) is not PoolProgress.COMING for pool in self._wanted)

    def __str__(self) -> str:
        """The numbers that are left, in words for logs and errors."""
        left = {pool: self.left(pool) for pool in self._wanted if self.share(pool) is PoolProgress.COMING}
        return ", ".join(f"{pool} {r.start}..{r.stop - 1}" for pool, r in left.items()) or "nothing"


class _OfPeer(Protocol):
    @property
    def peer(self) -> object: ...


WordT = TypeVar("WordT")
RoomT = TypeVar("RoomT", bound=_OfPeer)
OutcomeT = TypeVar("OutcomeT")
_REMEMBERED = 65536
"""Ended rooms that are remembered; the oldest are forgotten first."""
_TOLD = 256
"""Last words to one peer that are kept to be sent again: the newest."""


class EndedRooms(Generic[WordT]):
    """Ended rooms of one end, oldest first. `WordT`: the type of that end's last word about a room."""

    def __init__(self) -> None:
        self._words: OrderedDict[RoomId, WordT | None] = OrderedDict()
        self._told: dict[Hashable, deque[RoomId]] = {}

    def __contains__(self, room: RoomId) -> bool:
        return room in self._words

    def remember(self, room: RoomId, word: WordT | None = None) -> None:
        """Record that `room` has ended. `word`: the last word about it; None where nothing needs to be sent again."""
        self._words[room] = word
        while len(self._words) > _REMEMBERED:
            self._words.popitem(last=False)

    def last_word(self, room: RoomId) -> WordT | None:
        """Return the last word about `room`; None where it has none, or the room isn't remembered."""
        return self._words.get(room)

    def told(self, peer: Hashable, room: RoomId) -> None:
        """Record that `peer` is told the last word about `room`."""
        self._told.setdefault(peer, deque(maxlen=_TOLD)).append(room)

    def resend_to(self, peer: Hashable) -> list[WordT]:
        """Return the last words that `peer` was told, in order, of rooms that are still remembered."""
        words = [self._words.get(room) for room in self._told.get(peer, ())]
        return [word for word in words if word is not None]

    def forget(self, peer: Hashable) -> None:
        """Forget what `peer` was told: nothing is sent to it again. The rooms stay remembered."""
        self._told.pop(peer, None)


class RoomTable(Mapping[RoomId, RoomT], Generic[RoomT, OutcomeT, WordT]):
    """The rooms of one end that have not ended, by id, with those that have, and the outcomes for the worker."""

    def __init__(self) -> None:
        self._rooms: dict[RoomId, RoomT] = {}
        self._outcomes: list[OutcomeT] = []
        self.ended = EndedRooms[WordT]()

    def __getitem__(self, room: RoomId) -> RoomT:
        return self._rooms[room]

    def __iter__(self) -> Iterator[RoomId]:
        return iter(self._rooms)

    def __len__(self) -> int:
        return len(self._rooms)

    def of(self, peer: object) -> list[RoomT]:
        """Return the rooms with `peer`."""
        return [room for room in self._rooms.values() if room.peer is peer]

    def take_outcomes(self) -> list[OutcomeT]:
        """Return the outcomes of rooms since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


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
