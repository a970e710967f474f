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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import zmq

from cache.device import Completion
from cache.pools import PoolSet
from contracts.ids import RoomId


@dataclass(frozen=True, slots=True)
class Target:
    """What a room may write at the reader: pages in order, and a slot."""

    room: RoomId
    pages: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Write `pages` of mine, all buffers, to the target's pages `first ..`."""

    target: Target
    first: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Write `data` to the start of the target's slot."""

    target: Target
    data: bytes


class Link(Protocol):
    """A writer's way into one reader's memory."""

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        """Start a write. What it reads must stay unchanged until the completion is done."""

    def notify(self, data: bytes) -> None:
        """Tell the reader `data` after everything posted so far has arrived."""

    def close(self) -> None: ...


class Plane(Protocol):
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

    def describe(self) -> dict[str, Any]: ...

    def connect(self, descriptor: dict[str, Any]) -> Link:
        """Raises `LayoutMismatch` when the descriptor's memory can't be reached from here, saying why."""

    def permit(self, target: Target) -> None:
        """Writes for this room may arrive from now on."""

    def revoke(self, room: RoomId) -> None:
        """Writes for this room are refused from now on, where the plane is revocable."""

    def poll(self) -> list[bytes]:
        """Apply what has arrived; returns the notices, in order. Never blocks."""

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets that become readable when `poll` has something to do."""

    def close(self) -> None: ...


Wake = Callable[[], None]
