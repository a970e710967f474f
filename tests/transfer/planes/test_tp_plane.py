"""The plane of a worker of several ranks, by stand-ins of its own rank and of its followers: what each is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from twinpool.cache.device.device_port import DONE, LayerMarks
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import (
    CloseLink,
    DescribeMemory,
    LinkLost,
    OpenLink,
    PermitRoom,
    PostWrite,
    RevokeRoom,
    SeverLink,
    SeverPeer,
    WriteArrived,
)
from twinpool.transfer.planes.data_plane import LaunchedWrite, PageNumbers, PageWrite, RoomTarget, SentCounts, SlotWrite
from twinpool.transfer.planes.tp_plane import TPDataPlane

ROOM = RoomId("room-1")
TARGET = RoomTarget(ROOM, {"full": PageNumbers(2, (5, 7))}, 1, 77)
WRITE = PageWrite(TARGET, {"full": PageNumbers(2, (1, 2))}, 4)


class Answers:
    """Answers of followers, which come when a test says so, or who waits."""

    def __init__(self, said: list[Any]) -> None:
        self.said, self.done, self.waited = said, False, 0

    def wait(self) -> list[Any]:
        self.done = True
        self.waited += 1
        return self.said


class Followers:
    """Two followers: an order channel that notes what it is told, and in which order."""

    def __init__(self, log: list[object]) -> None:
        self.log = log
        self.answer: dict[type, list[Any]] = {OpenLink: ["", ""]}
        self.asked: list[Answers] = []
        self.notices: list[tuple[int, Any]] = []

    def ask(self, order: Any) -> Answers:
        self.log.append(order)
        self.asked.append(Answers(self.answer.get(type(order), [True, True])))
        return self.asked[-1]

    def send(self, order: Any) -> None:
        self.log.append(order)

    def heard(self) -> Iterator[tuple[int, Any]]:
        notices, self.notices = self.notices, []
        return iter(notices)


class Link:
    frame_bytes, layered, ranked, up = 100, True, False, True

    def __init__(self, log: list[object]) -> None:
        self.log, self.sent, self.was_cut = log, SentCounts(), False

    def cut(self) -> bool:
        cut, self.was_cut = self.was_cut, False
        return cut

    def sever(self) -> None:
        self.log.append("mine severed")

    def close(self) -> None:
        self.log.append("mine closed")


class Plane:
    """The leader's own rank."""

    kind, revocable, by_peer, dropped = "shm", False, True, 0

    def __init__(self, log: list[object]) -> None:
        self.log, self.refuses = log, False
        self.settled_by: list[tuple[int, Any]] = []

    def describe(self, peer: str = "") -> dict[str, Any]:
        return {"ranks": [{"rank": 0}]}

    def sever(self, peer: str) -> None:
        self.log.append(f"mine severs {peer}")

    def connect(self, descriptor: dict[str, Any]) -> Link:
        if self.refuses:
            raise LayoutMismatch("it holds another model")
        return Link(self.log)

    def permit(self, target: RoomTarget) -> None:
        self.log.append("mine permits")

    def revoke(self, room: RoomId) -> None:
        self.log.append("mine revokes")

    def settled(self, rank: int, notice: Any) -> None:
        self.settled_by.append((rank, notice))

    def poll(self) -> list[bytes]:
        return [b"a notice"]


@pytest.fixture
def log() -> list[object]:
    return []


@pytest.fixture
def followers(log: list[object]) -> Followers:
    return Followers(log)


@pytest.fixture
def mine(log: list[object]) -> Plane:
    return Plane(log)


@pytest.fixture
def plane(mine: Plane, followers: Followers) -> TPDataPlane:
    return TPDataPlane(cast(Any, mine), cast(Any, followers))


def test_every_rank_is_described_the_leader_first(plane: TPDataPlane, followers: Followers) -> None:
    followers.answer[DescribeMemory] = [{"ranks": [{"rank": 1}]}, {"ranks": [{"rank": 2}]}]
    assert plane.describe("a:1") == {"ranks": [{"rank": 0}, {"rank": 1}, {"rank": 2}]}
    assert followers.log == [DescribeMemory("a:1")]


def linked(plane: TPDataPlane) -> list[int]:
    """The numbers of the links that the plane keeps."""
    return list(plane._links)


@pytest.mark.parametrize("who", ["the leader", "a follower"])
def test_a_reader_that_one_rank_cannot_reach_is_refused_and_no_rank_keeps_a_link(
    plane: TPDataPlane, mine: Plane, followers: Followers, who: str
) -> None:
    mine.refuses = who == "the leader"
    followers.answer[OpenLink] = ["", "" if mine.refuses else "it holds another model"]
    for number in (1, 2):
        followers.log.clear()
        with pytest.raises(LayoutMismatch, match="another model"):
            plane.connect({"ranks": []})
        assert all(asked.waited for asked in followers.asked), "what a follower opens later would never be closed"
        closed: list[object] = [] if mine.refuses else ["mine closed"]
        assert followers.log == [OpenLink(number, {"ranks": []}), *closed, CloseLink(number)]
    assert linked(plane) == []
    mine.refuses, followers.answer[OpenLink] = False, ["", ""]
    link = plane.connect({"ranks": []})
    assert linked(plane) == [3]
    link.close()
    assert followers.log[-2:] == [CloseLink(3), "mine closed"]
    assert linked(plane) == []


def test_a_follower_that_lost_a_link_is_heard_of_for_that_link_and_once(
    plane: TPDataPlane, followers: Followers
) -> None:
    first, second = plane.connect({}), plane.connect({})
    followers.notices = [(1, LinkLost(2)), (2, LinkLost(9)), (1, WriteArrived("room", 0, 3))]
    assert plane.poll() == [b"a notice"]
    assert cast(Any, plane._plane).settled_by == [(1, WriteArrived("room", 0, 3))]
    assert (first.cut(), second.cut(), second.cut()) == (False, True, False)
    cast(Any, first)._mine.was_cut = True
    assert (first.cut(), first.cut()) == (True, False)
    followers.notices = [(1, LinkLost(1)), (2, LinkLost(1))]
    cast(Any, first)._mine.was_cut = True
    plane.poll()
    assert (first.cut(), first.cut()) == (True, False), "of both together it is told once"


def test_every_rank_severs_and_every_rank_knows_a_room_before_its_writer_does(
    plane: TPDataPlane, followers: Followers, log: list[object]
) -> None:
    link = plane.connect({})
    log.clear()
    link.sever()
    assert log == [SeverLink(1), "mine severed"]
    log.clear()
    plane.sever("a:1")
    assert log == [SeverPeer("a:1"), "mine severs a:1"]
    assert followers.asked[-1].waited == 1, "what a follower still takes in would land in pages of somebody else"
    log.clear()
    plane.permit(TARGET)
    assert [type(one) if not isinstance(one, str) else one for one in log] == [PermitRoom, "mine permits"]
    assert followers.asked[-1].waited == 1
    log.clear()
    plane.revoke(ROOM)
    assert log == [RevokeRoom(ROOM), "mine revokes"]


@pytest.mark.parametrize("ahead", [False, True])
def test_followers_are_ordered_their_parts_of_pages_with_the_mark_that_they_come_after(
    plane: TPDataPlane, log: list[object], ahead: bool
) -> None:
    link = plane.connect({})
    log.clear()
    marks = LayerMarks([{"full": 1}, {"full": 3}])
    marks.step = 6
    write = PageWrite(TARGET, WRITE.runs, 4, {"full": range(1, 3)}) if ahead else WRITE
    others = link.order_parts(write, [DONE, marks[1]] if ahead else [DONE])
    (order,) = log
    assert isinstance(order, PostWrite)
    assert (order.link, order.room, order.ticket) == (1, ROOM, 77)
    assert (order.step, order.group) == ((6, 1) if ahead else (0, 0))
    assert [(span.pool, span.first, span.stop) for span in order.layers] == ([("full", 1, 3)] if ahead else [])
    assert not others.done
    assert link.order_parts(SlotWrite(TARGET, b"x"), ()) is DONE, "metadata is the leader's alone"
    assert len(log) == 1


class Part:
    """A part of a write: over when a test says so, or who waits."""

    def __init__(self, error: str = "") -> None:
        self.done, self.waited, self._error = False, 0, error

    def wait(self) -> None:
        self.done = True
        self.waited += 1
        if self._error:
            raise RuntimeError(self._error)

    order = wait


@pytest.mark.parametrize("failing", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_a_write_is_over_when_every_part_of_it_is_whichever_failed(failing: Sequence[int]) -> None:
    """Its launch, what it posted, and the parts of other ranks: pages are given back then."""
    launched, posted, others = (Part(f"part {n} failed" if n in failing else "") for n in range(3))
    write = LaunchedWrite(launched, [posted], others)
    for over in ((launched, posted), (posted, others), (launched, others)):
        for part in (launched, posted, others):
            part.done = part in over
        assert not write.done
    for part in (launched, posted, others):
        part.done = True
    assert write.done
    if failing:
        with pytest.raises(RuntimeError, match=r"part \d failed"):
            write.wait()
    else:
        write.wait()
    assert [part.waited for part in (launched, others, posted)] == [1, 1, 1]
