"""The data plane of a worker of several ranks: each rank writes its own heads, the leader speaks for all.

At the writer every rank has links of its own to the ranks of the reader that it writes to. The leader orders the
followers to post their parts of a write, each after its own step, and posts its own; the write is complete when all
parts are, and only then the reader is sent its notice. At the reader the leader describes the memory of every rank, and
permits writes into all of them.

A follower carries the leader's orders out (`FollowerLinks`). A write that was ordered waits there until the follower's
own step has come so far, and then goes down its link, beside the writes to other readers and beside whatever the
follower is ordered next. It is answered when it is over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import zmq

from twinpool.cache.device.device_copies import CPU
from twinpool.cache.device.device_port import DONE, Completion, LayerMark, failure
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_ranks import FollowerSteps
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId, request_in
from twinpool.contracts.messages.rank_order_codec import OrderAnswers, OrderChannel
from twinpool.contracts.messages.rank_orders import (
    CloseLink,
    DescribeMemory,
    FollowerNotice,
    LayerSpan,
    LinkLost,
    OpenLink,
    PagePlaces,
    PermitRoom,
    PostWrite,
    RevokeRoom,
    SeverLink,
    SeverPeer,
    WriteArrived,
)
from twinpool.transfer.planes.data_plane import (
    LaunchedWrite,
    PageNumbers,
    PageWrite,
    RankDataPlane,
    RoomTarget,
    SentCounts,
    SlotWrite,
    WriteLink,
    lanes_of,
    launch_write,
)
from twinpool.transfer.planes.rank_fan import describe_ranks


class TPDataPlane:
    """The leader's `DataPlane`: its own rank's `plane`, and those of its followers."""

    def __init__(self, plane: RankDataPlane, followers: OrderChannel) -> None:
        self.kind, self.revocable, self.by_peer = plane.kind, plane.revocable, plane.by_peer
        self._plane = plane
        self.followers = followers
        self._numbers = count(1)
        self._stages = 1
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
        self._stages = pools.spec.stages
        self._plane.register(pools, slots)

    def describe(self, peer: str = "") -> dict[str, Any]:
        others = self.followers.ask(DescribeMemory(peer)).wait()
        mine = self._plane.describe(peer)["ranks"]
        return describe_ranks([*mine, *(part for other in others for part in other["ranks"])], self._stages)

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
            elif isinstance(notice, WriteArrived):
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


log = logging.getLogger("twinpool.transfer")
LinkOrder = DescribeMemory | SeverPeer | OpenLink | CloseLink | SeverLink | PermitRoom | RevokeRoom


@dataclass(eq=False)
class _FollowerWrite:
    """A write that was ordered, and is not answered yet."""

    sequence: int
    order: PostWrite
    launched: LaunchedWrite | None = None
    """None while it is not known what it comes after, or where the device would wait for that."""
    given_up: bool = False
    """Whether it will not be launched any more."""


class FollowerLinks:
    """The links of one follower; used from the thread that carries out its orders."""

    def __init__(self, plane: RankDataPlane, steps: FollowerSteps) -> None:
        self._plane, self._steps = plane, steps
        self._links: dict[int, WriteLink] = {}
        self._writes: list[_FollowerWrite] = []
        """In the order in which they were ordered."""

    def carry_out(self, order: LinkOrder) -> dict[str, Any] | str | bool | None:
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
                self._give_up(order.link)
                link = self._links.pop(order.link, None)
                if link is not None:
                    link.close()
                    for lane in lanes_of(str(order.link)):
                        self._steps.device.end_lane(lane)
            case SeverLink():
                link = self._links.get(order.link)
                if link is not None:
                    link.sever()
                self._give_up(order.link)
            case PermitRoom():
                self._steps.last.wait()  # What was ordered for these places before is over: planes write beside it.
                self._plane.permit(RoomTarget(RoomId(order.room), _runs(order.places), 0, order.ticket))
                return True
            case RevokeRoom():
                self._plane.revoke(RoomId(order.room))
        return None

    def _give_up(self, link: int) -> None:
        """Launch no write of a link any more that is not launched yet."""
        for write in self._writes:
            write.given_up = write.given_up or (write.order.link == link and write.launched is None)

    def post(self, sequence: int, order: PostWrite) -> None:
        """Take in the order of a write; `answers` has its answer, under `sequence`, when the write is over."""
        write = _FollowerWrite(sequence, order)
        if not self._launch(write):
            facts = {"request_id": request_in(RoomId(order.room)), "room": order.room}
            log.debug("a write waits for step %d", order.step, extra=facts)
        self._writes.append(write)

    def answers(self) -> list[tuple[int, bool]]:
        """Return the answers of writes that are over by now, well or not; each once."""
        out: list[tuple[int, bool]] = []
        left: list[_FollowerWrite] = []
        for write in self._writes:
            if write.given_up:
                out.append((write.sequence, False))
                continue
            if not self._launch(write) or write.launched is None or not write.launched.done:
                left.append(write)
                continue
            error = failure(write.launched)
            if error is not None:
                facts = {"request_id": request_in(RoomId(write.order.room)), "room": write.order.room}
                log.warning("a write failed: %s", error, extra=facts)
            out.append((write.sequence, error is None))
        self._writes = left
        return out

    def settle(self) -> list[tuple[int, bool]]:
        """Wait for the writes that are under way; returns their answers."""
        for write in self._writes:
            if not write.given_up and self._launch(write) and write.launched is not None and not write.launched.done:
                failure_of(write.launched)
        return self.answers()

    def _launch(self, write: _FollowerWrite) -> bool:
        """Launch a write, if it is known what it comes after; returns whether it is launched."""
        if write.launched is not None:
            return True
        order = write.order
        after = self._steps.written(order.step, order.group)
        if after is None or (isinstance(after, LayerMark) and not (self._steps.beside or after.done)):
            return False
        target = RoomTarget(RoomId(order.room), _runs(order.targets), 0, order.ticket)
        layers = {span.pool: range(span.first, span.stop) for span in order.layers} or None
        page_write = PageWrite(target, _runs(order.sources), order.number, layers)
        link = self._links[order.link]
        write.launched = launch_write(self._steps.device, link.post, page_write, (after,), lane=str(order.link))
        return True

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


def failure_of(launched: LaunchedWrite) -> RuntimeError | None:
    """Wait for a write; returns why it failed."""
    try:
        launched.wait()
    except RuntimeError as error:
        return error
    return None


def _runs(places: Sequence[PagePlaces]) -> dict[str, PageNumbers]:
    return {place.pool: PageNumbers(place.first, place.indices) for place in places}
