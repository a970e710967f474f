"""A follower's plane and its links: carries out the leader's orders about them.

A write that was ordered waits here until the follower's own step has come so far, and then goes down its link, beside
the writes to other readers and beside whatever the follower is ordered next. It is answered when it is over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.cache.device.device_port import failure
from twinpool.cache.device.layer_marks import LayerMark
from twinpool.cache.pool.follower_steps import FollowerSteps
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId, request_in
from twinpool.contracts.messages.rank_orders import (
    CloseLink,
    DescribeMemory,
    FollowerNotice,
    LinkLost,
    OpenLink,
    PagePlaces,
    PermitRoom,
    PostWrite,
    RevokeRoom,
    SeverLink,
    SeverPeer,
)
from twinpool.transfer.planes.data_plane import PageNumbers, PageWrite, RankDataPlane, RoomTarget, WriteLink
from twinpool.transfer.planes.launched_write import LaunchedWrite, lanes_of, launch_write

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
