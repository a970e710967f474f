"""The data plane: five verbs, one-sided, RDMA in shape.

    register   memory that peers may write into            Plane.register
    describe   it to a peer, as plain values               Plane.describe
    post       writes into a peer's memory                 Link.post
    notify     the peer, ordered after the posted writes   Link.notify
    poll       for notices that arrived                    Plane.poll

A plane says whether it is `revocable`: whether `revoke` really ends a writer's access. Where it isn't, pages that
were granted to a writer stay out of use until the writer has said it is done, or is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import zmq

from cache.device.device_port import Completion
from cache.memory.page_moves import PageMove
from cache.pool.pool_set import PoolSet
from contracts.errors import LayoutMismatch
from contracts.ids import RoomId
from contracts.messages.rank_orders import WriteArrived

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """Pages `first ..` of a sequence in one pool, and the pages or slots that hold them."""

    first: int
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.indices))

    def at(self, numbers: range) -> tuple[int, ...]:
        """The indices of these numbers. Raises `IndexError` where it has some of them not."""
        if numbers.start < self.first or numbers.stop > self.first + len(self.indices):
            raise IndexError(f"pages {numbers.start}..{numbers.stop - 1} aren't among {self.numbers}")
        return self.indices[numbers.start - self.first : numbers.stop - self.first]


@dataclass(frozen=True, slots=True)
class RoomTarget:
    """What a room may write at the reader: places by pool, and a slot."""

    room: RoomId
    runs: Mapping[str, PageNumbers]
    slot: int
    ticket: int = 0
    """The grant's: what arrives with another one is nobody's."""

    def at(self, pool: str, numbers: range) -> tuple[int, ...]:
        """The reader's pages for these numbers. Raises `IndexError` for what was not granted."""
        return self.runs.get(pool, _NO_RUN).at(numbers)


_NO_RUN = PageNumbers(0, ())


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Write these pages and slots of mine, all buffers, to the target's of the same numbers: one write, all pools."""

    target: RoomTarget
    runs: Mapping[str, PageNumbers]
    number: int = 1
    """Which write of its room this is, from 1."""

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        return {pool: run.indices for pool, run in self.runs.items()}

    @property
    def move(self) -> PageMove:
        """From mine to the reader's. Raises `IndexError` for what was not granted."""
        return PageMove.of(self.sources, {pool: self.target.at(pool, run.numbers) for pool, run in self.runs.items()})


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Write `data` to the start of the target's slot."""

    target: RoomTarget
    data: bytes


class WriteLink(Protocol):
    """A writer's way into one reader's memory."""

    frame_bytes: int | None
    """What one write may have of each pool; None: everything."""

    def admit(self, target: RoomTarget) -> None:
        """Raises `WireError` for places that the reader's memory, as it was described, doesn't have."""

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        """Start a write. What it reads must stay unchanged until the completion is done."""

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        """Tell the reader `data` of a room, after everything posted here so far has arrived, and the first `writes`
        writes of the room from all other ranks."""

    def cut(self) -> bool:
        """Whether its connection was cut since the last call: writes and notices may be lost."""

    @property
    def up(self) -> bool:
        """Whether there is a connection now, as far as `cut` has seen; always, where none is needed."""

    def close(self) -> None: ...


class DataPlane(Protocol):
    """One worker's end of the data plane; every worker has one."""

    kind: str
    revocable: bool
    dropped: int
    """Writes and notices that arrived for no room."""

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        """Zeroed memory, uint8 [nbytes], that this plane can register."""

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        """Let peers write into the pool set and the metadata slots, uint8 [slots, SLOT_BYTES]. A worker that only
        writes has no slots; its pool set is what it writes from."""

    def describe(self) -> dict[str, Any]:
        """What `connect` of a peer's plane needs, as plain values: a part for each rank, under ``ranks``."""

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        """Raises `LayoutMismatch` when the descriptor's memory can't be reached from here, saying why, and for anything
        that is no descriptor: it is what a peer says, and nothing about it is certain."""

    def permit(self, target: RoomTarget) -> None:
        """Writes for this room may arrive from now on."""

    def revoke(self, room: RoomId) -> None:
        """Writes for this room are refused from now on, where the plane is revocable."""

    def poll_followers(self) -> None:
        """Take in what other ranks of this worker told: `poll` does so, too, but who only writes doesn't call it."""

    def poll(self) -> list[bytes]:
        """Apply what has arrived; returns the notices, in order. Never blocks, and takes in so much at a time that
        nobody who sends without end keeps its caller."""

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets that become readable when `poll` has something to do."""

    def close(self) -> None: ...


class RankDataPlane(DataPlane, Protocol):
    """One rank's end of the data plane of a worker of several."""

    def settled(self, rank: int, settled: WriteArrived) -> None:
        """A rank of this worker has taken in a write."""

    def take_settled(self) -> list[WriteArrived]:
        """What this rank has taken in since the last call, for its leader; the leader's own is with the leader."""


WakeCallback = Callable[[], None]


def said(descriptor: object, name: str, kind: type[T]) -> T:
    """Field `name` of a part of a peer's descriptor. Raises `LayoutMismatch` where it isn't there, or not a `kind`."""
    value = descriptor.get(name) if isinstance(descriptor, dict) else None
    if type(value) is not kind:
        raise LayoutMismatch(f"the descriptor's {name} must be of type {kind.__name__}, got {value!r:.80}")
    return value


SLOT_BYTES = 32 << 10
"""Room for the hidden state of the widest models: 12,288 bfloat16 or 7,168 float32 and what goes with it."""
