"""The data plane of a worker of several ranks: each rank writes its own heads, the leader speaks for all.

At the writer every rank has links of its own to the ranks of the reader that it writes to. The leader orders the
followers to post their parts of a write, each after its own step (`transfer.planes.follower_links`), and posts its own;
the write is complete when all parts are, and only then the reader is sent its notice. At the reader the leader
describes the memory of every rank, and permits writes into all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
import zmq

from twinpool.cache.device.device_copies import CPU
from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.device.layer_marks import LayerMark
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_order_codec import OrderAnswers, OrderChannel
from twinpool.contracts.messages.rank_orders import (
    CloseLink,
    DescribeMemory,
    LayerSpan,
    LinkLost,
    OpenLink,
    PagePlaces,
    PermitRoom,
    PostWrite,
    RevokeRoom,
    SeverLink,
    SeverPeer,
)
from twinpool.transfer.planes.data_plane import (
    PageNumbers,
    PageWrite,
    RankDataPlane,
    RoomTarget,
    SentCounts,
    SlotWrite,
    WriteLink,
)


class TPDataPlane:
    """The leader's `DataPlane`: its own rank's `plane`, and those of its followers."""

    def __init__(self, plane: RankDataPlane, followers: OrderChannel) -> None:
        self.kind, self.revocable, self.by_peer = plane.kind, plane.revocable, plane.by_peer
        self._plane = plane
        self.followers = followers
        self._numbers = count(1)
        self._links: dict[int, _TPLink] = {}
        """Open links, by the number that followers know them by."""

    @property
    def dropped(self) -> int:
        return self._plane.dropped

    @dropped.setter
    def dropped(self, value: int) -> None:
        self._plane.dropped = value

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        return self._plane.allocate(name, nbytes, device)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._plane.register(pools, slots)

    def describe(self, peer: str = "") -> dict[str, Any]:
        others = self.followers.ask(DescribeMemory(peer)).wait()
        mine = self._plane.describe(peer)["ranks"]
        return {"ranks": [*mine, *(part for other in others for part in other["ranks"])]}

    def sever(self, peer: str) -> None:
        answers = self.followers.ask(SeverPeer(peer))
        self._plane.sever(peer)
        answers.wait()

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        number = next(self._numbers)
        answers = self.followers.ask(OpenLink(number, descriptor))
        try:
            link = self._plane.connect(descriptor)
        except LayoutMismatch:
            answers.wait()
            self.followers.send(CloseLink(number))
            raise
        refusals = [reason for reason in answers.wait() if reason]
        if refusals:
            link.close()
            self.followers.send(CloseLink(number))
            raise LayoutMismatch(refusals[0])
        self._links[number] = _TPLink(number, link, self)
        return self._links[number]

    def permit(self, target: RoomTarget) -> None:
        # Every rank must know of the grant before the writer does: a rank drops writes for rooms that it doesn't know.
        answers = self.followers.ask(PermitRoom(target.room, target.ticket, _places(target.runs)))
        self._plane.permit(target)
        answers.wait()

    def revoke(self, room: RoomId) -> None:
        self.followers.send(RevokeRoom(room))
        self._plane.revoke(room)

    def poll(self) -> list[bytes]:
        self.poll_followers()
        return self._plane.poll()

    def poll_followers(self) -> None:
        for rank, notice in self.followers.heard():
            if isinstance(notice, LinkLost):
                link = self._links.get(notice.link)
                if link is not None:
                    link.severed = True
            else:
                self._plane.settled(rank, notice)

    def forget(self, number: int) -> None:
        """Forget a link that is closed."""
        self._links.pop(number, None)

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return self._plane.waitable

    def close(self) -> None:
        self._plane.close()


class _TPLink:
    """The links of all ranks of this worker to one reader, as one."""

    ranked = True

    def __init__(self, number: int, mine: WriteLink, plane: TPDataPlane) -> None:
        self._number = number
        self._mine = mine
        self._plane = plane
        self.severed = False
        """Whether a follower has reported, since the last `cut`, that its part was cut."""
        self.frame_bytes, self.layered = mine.frame_bytes, mine.layered

    @property
    def sent(self) -> SentCounts:
        return self._mine.sent

    def admit(self, target: RoomTarget) -> None:
        """Check by the leader's own part: all ranks of a reader describe the same counts."""
        self._mine.admit(target)

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        if isinstance(write, SlotWrite):
            return DONE
        target, marks = write.target, [mark for mark in after if isinstance(mark, LayerMark)]
        assert len(marks) <= 1, "a write is of layers of one step"
        layers = tuple(LayerSpan(pool, some.start, some.stop) for pool, some in (write.layers or {}).items())
        step, group = (marks[0].marks.step, marks[0].group) if marks else (0, 0)
        order = PostWrite(
            self._number, target.room, target.ticket, write.number, _places(write.runs), _places(target.runs), layers,
            step, group,
        )  # fmt: skip
        return _Answered(self._plane.followers.ask(order))

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        return self._mine.post(write)

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._mine.notify(room, data, writes)

    def cut(self) -> bool:
        """Return whether the leader's own part was cut, or a follower's, as far as the plane has heard."""
        severed, self.severed = self.severed, False
        return self._mine.cut() or severed

    @property
    def up(self) -> bool:
        """Whether the leader's own part is up; a follower's part that is down shows in `cut`."""
        return self._mine.up

    def sever(self) -> None:
        self._plane.followers.send(SeverLink(self._number))
        self._mine.sever()

    def close(self) -> None:
        self._plane.forget(self._number)
        self._plane.followers.send(CloseLink(self._number))
        self._mine.close()


class _Answered:
    """A completion that is done when all followers have answered, and has failed where a follower's write has."""

    def __init__(self, answers: OrderAnswers) -> None:
        self._answers = answers

    @property
    def done(self) -> bool:
        return self._answers.done

    def wait(self) -> None:
        if not all(self._answers.wait()):
            raise RuntimeError("a follower rank's part of the write failed")

    def order(self) -> None:
        self.wait()


def _places(runs: Mapping[str, PageNumbers]) -> tuple[PagePlaces, ...]:
    return tuple(PagePlaces(pool, run.first, tuple(run.indices)) for pool, run in runs.items())
