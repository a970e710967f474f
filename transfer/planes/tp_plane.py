"""The data plane of a worker of several ranks: each rank writes its own heads, the leader speaks for all.

At the writer every rank has links of its own to the ranks of the reader that it writes to. The leader posts a write and
orders the followers to post their parts; the write is complete when all parts are, and only then the reader is sent its
notice. At the reader the leader describes the memory of every rank, and permits writes into all of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import zmq

from cache.device.device_copies import CPU
from cache.device.device_port import Completion
from cache.pool.pool_set import PoolSet
from contracts.errors import LayoutMismatch
from contracts.ids import RoomId
from contracts.messages.rank_order_codec import OrderAnswers, OrderChannel
from contracts.messages.rank_orders import (
    CloseLink,
    DescribeMemory,
    FollowerNotice,
    LinkLost,
    OpenLink,
    PagePlaces,
    PermitRoom,
    PostWrite,
    RevokeRoom,
    SeverPeer,
)
from transfer.planes.data_plane import PageNumbers, PageWrite, RankDataPlane, RoomTarget, SlotWrite, WriteLink
from transfer.planes.rank_fan import AllWrites

log = logging.getLogger("twinpool.transfer")


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

    layered = False
    """The leader doesn't know how far its followers' steps are."""

    def __init__(self, number: int, mine: WriteLink, plane: TPDataPlane) -> None:
        self._number = number
        self._mine = mine
        self._plane = plane
        self.severed = False
        """Whether a follower has reported, since the last `cut`, that its part was cut."""
        self.frame_bytes, self.sent = mine.frame_bytes, mine.sent

    def admit(self, target: RoomTarget) -> None:
        """Check by the leader's own part: all ranks of a reader describe the same counts."""
        self._mine.admit(target)

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            return self._mine.post(write)
        sources, targets = _places(write.runs), _places(write.target.runs)
        order = PostWrite(self._number, write.target.room, write.target.ticket, write.number, sources, targets)
        others = _Answered(self._plane.followers.ask(order))
        try:
            mine = self._mine.post(write)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                others.wait()  # The followers still read the pages, which go back when this is heard of.
            raise
        return AllWrites([mine, others])

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
        """End the writes of the leader's own part; those of followers end when their connections do."""
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


class FollowerLinks:
    """A follower's plane and its links: carries out the leader's orders about them."""

    def __init__(self, plane: RankDataPlane, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` waits until earlier orders have been carried out on the device, too: the leader knows of its own
        device alone, and data planes copy beside it."""
        self._plane, self._settle = plane, settle
        self._links: dict[int, WriteLink] = {}

    def carry_out(
        self, order: DescribeMemory | SeverPeer | OpenLink | CloseLink | PostWrite | PermitRoom | RevokeRoom
    ) -> dict[str, Any] | str | bool | None:
        """Carry an order out, and return its answer; None for an order without one."""
        match order:
            case DescribeMemory():
                return self._plane.describe(order.peer)
            case SeverPeer():
                self._plane.sever(order.peer)
                return True
            case OpenLink():
                try:
                    self._links[order.link] = self._plane.connect(order.descriptor)
                except LayoutMismatch as error:
                    return str(error)
                return ""
            case CloseLink():
                link = self._links.pop(order.link, None)
                if link is not None:
                    link.close()
            case PostWrite():
                target = RoomTarget(RoomId(order.room), _runs(order.targets), 0, order.ticket)
                self._settle()
                try:
                    self._links[order.link].post(PageWrite(target, _runs(order.sources), order.number)).wait()
                except RuntimeError as error:
                    log.warning("a write of room %s failed: %s", order.room, error)
                    return False
                return True
            case PermitRoom():
                self._settle()
                self._plane.permit(RoomTarget(RoomId(order.room), _runs(order.places), 0, order.ticket))
                return True
            case RevokeRoom():
                self._plane.revoke(RoomId(order.room))
        return None

    def poll(self) -> list[FollowerNotice]:
        """Store what has arrived. Returns reports for the leader: writes taken in, and links that were cut."""
        self._plane.poll()
        severed = [LinkLost(number) for number, link in self._links.items() if link.cut()]
        return [*self._plane.take_settled(), *severed]

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._plane.close()


def _places(runs: Mapping[str, PageNumbers]) -> tuple[PagePlaces, ...]:
    return tuple(PagePlaces(pool, run.first, tuple(run.indices)) for pool, run in runs.items())


def _runs(places: Sequence[PagePlaces]) -> dict[str, PageNumbers]:
    return {place.pool: PageNumbers(place.first, place.indices) for place in places}
