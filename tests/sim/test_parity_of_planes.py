"""The simulator's data planes and the real ones do the same: one script for both, over loopback and over virtual time.

What a scene may see is what rooms see of a plane: notices, bytes of pages and slots, what was dropped, and whether a
link says that it was cut. Delays are nobody's business.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.fault_proxy import proxying
from tests.support.pool_sets import entry, filled
from tests.support.room_ends import SimWaiter
from tests.support.stand_in_ranks import headed_sets
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived
from twinpool.sim.fabric.plane_faults import WireDamage
from twinpool.sim.fabric.sim_network import SimNetwork
from twinpool.sim.fabric.sim_plane import SimPlane
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualTime
from twinpool.transfer.planes.data_plane import (
    SLOT_BYTES,
    PageNumbers,
    PageWrite,
    RankDataPlane,
    RoomTarget,
    SlotWrite,
    WriteLink,
)
from twinpool.transfer.planes.make_plane import make_plane

SPEC = headed_sets()["all"]
PAGES = 12
ROOM, OTHER = RoomId("room-1"), RoomId("room-2")
OVER_TCP = ("zmq", "staged")
ENOUGH_S = 60.0
"""A scene that isn't through by then hangs."""


@dataclass
class Side:
    """One worker: a plane and a pool set a rank."""

    planes: list[RankDataPlane]
    pools: list[PoolSet]
    slots: torch.Tensor | None

    @property
    def ranks(self) -> dict[str, Any]:
        return {"ranks": [part for plane in self.planes for part in plane.describe()["ranks"]]}


@dataclass
class Scene:
    """A writer and a reader."""

    revocable: bool
    writer: Side
    reader: Side
    links: list[WriteLink]
    """One for each rank of the writer."""
    cut: Callable[[], None]
    """Everything that is under way between the two is lost, and the connections with it."""
    pause: Callable[[], None]

    @property
    def link(self) -> WriteLink:
        return self.links[0]

    def permit(self, target: RoomTarget) -> None:
        for plane in self.reader.planes:
            plane.permit(target)

    def revoke(self, room: RoomId) -> None:
        for plane in self.reader.planes:
            plane.revoke(room)

    def post(self, write: PageWrite | SlotWrite) -> None:
        """As a leader does it: all ranks write their part, and then it is complete."""
        links = self.links[:1] if isinstance(write, SlotWrite) else self.links
        for posted in [link.post(write) for link in links]:
            posted.wait()

    def poll(self) -> list[bytes]:
        """What the reader's leader hears; the other ranks store first, and tell it of what they stored."""
        leader, *others = self.reader.planes
        for rank, plane in enumerate(others, 1):
            plane.poll()
            for settled in plane.take_settled():
                leader.settled(rank, WriteArrived(*settled))
        return leader.poll()

    def heard(self, count: int) -> list[bytes]:
        """The next so many notices, and none beyond them for a while."""
        found: list[bytes] = []
        self.until(lambda: len(found.__iadd__(self.poll())) >= count, f"{count} notices")
        return found + self.quiet()

    def quiet(self) -> list[bytes]:
        found = []
        for _ in range(5):
            self.pause()
            found += self.poll()
        return found

    def until(self, come: Callable[[], object], what: str) -> None:
        end = time.monotonic() + ENOUGH_S
        while not come():
            assert time.monotonic() < end, f"waited for {what}"
            self.pause()

    @property
    def dropped(self) -> int:
        return sum(plane.dropped for plane in self.reader.planes)

    def image(self) -> list[list[bytes]]:
        """All that the reader holds."""
        return [
            entry(pools, pool, index)
            for pools in self.reader.pools
            for pool, count in pools.layout.counts.items()
            for index in range(count)
        ]

    def same(self, source: PageWrite) -> bool:
        """Whether what a write names lies at the reader as it does at the writer; of ranks, on both sides alike."""
        mine, theirs = self.writer.pools[0], self.reader.pools[0]
        assert mine.spec == theirs.spec, "only of as many ranks on both sides"
        return all(
            entry(one, pool, here) == entry(other, pool, there)
            for one, other in zip(self.writer.pools, self.reader.pools, strict=True)
            for pool, run in source.runs.items()
            for here, there in zip(run.indices, source.target.at(pool, run.numbers), strict=True)
        )


def target(room: RoomId = ROOM, first: int = 0, slot: int = 1) -> RoomTarget:
    """Four full pages, two window pages and a state."""
    runs = {
        "full": PageNumbers(first, (5, 3, 8, 2)),
        "window": PageNumbers(first + 2, (4, 6)),
        "state": PageNumbers(first + 3, (7,)),
    }
    return RoomTarget(room, runs, slot)


def write(to: RoomTarget, number: int = 1) -> PageWrite:
    runs = {pool: PageNumbers(run.first, tuple(range(1, len(run) + 1))) for pool, run in to.runs.items()}
    return PageWrite(to, runs, number)


@contextmanager
def simulated(kind: str, ranks: tuple[int, int]) -> Iterator[Scene]:
    agenda, rng = VirtualTime(), random.Random(3)
    # Where pages lie is no matter to the simulator: plane staged is plane zmq there.
    kind = "zmq" if kind in OVER_TCP else kind
    network, planes, damage = SimNetwork(agenda, rng, 0.005, 3.0), dict[str, SimPlane](), WireDamage()
    sides, pids = list[Side](), iter(range(1, 100))
    for name, size in zip(("prefill-0", "decode-0"), ranks, strict=True):
        mine: list[RankDataPlane] = []
        for rank in range(size):
            process = SimProcess(agenda, f"{name}#1", "node-0", next(pids))
            mine.append(SimPlane(kind, network, process, planes, rng, damage, lambda: None, rank, size))
        sides.append(_side(mine, len(sides)))
    waiter = SimWaiter(agenda)
    with _scene(
        kind, sides, lambda: network.reset("prefill-0", "decode-0"), lambda: waiter.wait(0.05)
    ) as scene:  # fmt: skip
        yield scene


@contextmanager
def real(kind: str, ranks: tuple[int, int]) -> Iterator[Scene]:
    with proxying() as proxy:
        config = config_from_dict({"transfer": {"plane": kind}, "faults": {"proxy": proxy.door}})
        sides: list[Side] = []
        for size in ranks:
            mine = [make_plane(config, "127.0.0.1", None, lambda: None, rank, size) for rank in range(size)]
            sides.append(_side(mine, len(sides)))

        def cut() -> None:
            # What is under way is lost with the connections; they come back by themselves.
            for relay in proxy.find("data"):
                proxy.cut(relay)
                proxy.mend(relay)

        with _scene(kind, sides, cut, lambda: time.sleep(0.01)) as scene:
            yield scene


def _side(planes: list[RankDataPlane], side: int) -> Side:
    pools = []
    for rank, plane in enumerate(planes):
        layout = PoolSetLayout(SPEC.shard(rank, len(planes)), SPEC.even(PAGES + side))
        pools.append(filled(PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes)), 10 * side))
    slots = planes[0].allocate("slots", 3 * SLOT_BYTES).view(3, SLOT_BYTES) if side else None
    for plane, pool_set in zip(planes, pools, strict=True):
        plane.register(pool_set, slots if plane is planes[0] else None)
    return Side(planes, pools, slots)


@contextmanager
def _scene(kind: str, sides: list[Side], cut: Callable[[], Any], pause: Callable[[], None]) -> Iterator[Scene]:
    writer, reader = sides
    links = [plane.connect(reader.ranks) for plane in writer.planes]
    try:
        yield Scene(kind in OVER_TCP, writer, reader, links, cut, pause)
    finally:
        for link in links:
            link.close()
        for side in sides:
            for plane in side.planes:
                plane.close()


MADE = {"simulated": simulated, "real": real}


@pytest.fixture(params=["shm", "zmq", "nixl", "staged"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(MADE))
def made(request: pytest.FixtureRequest) -> Callable[[str, tuple[int, int]], Any]:
    return MADE[request.param]


@pytest.fixture
def scene(made: Callable[[str, tuple[int, int]], Any], kind: str) -> Iterator[Scene]:
    with made(kind, (1, 1)) as scene:
        yield scene


def test_a_notice_comes_once_and_after_what_was_written_before_it(scene: Scene) -> None:
    one = write(target())
    scene.permit(one.target)
    scene.post(one)
    scene.link.notify(ROOM, b"wrote", 1)
    scene.until(lambda: scene.poll() == [b"wrote"], "the notice")
    assert scene.same(one)
    assert scene.quiet() == []
    assert scene.dropped == 0
    assert not scene.link.cut()


def test_nothing_but_what_was_named_is_written(scene: Scene) -> None:
    one = write(target())
    scene.permit(one.target)
    (pools,) = scene.reader.pools
    before = {(p, i): entry(pools, p, i) for p, n in pools.layout.counts.items() for i in range(n)}
    scene.post(one)
    scene.link.notify(ROOM, b"wrote", 1)
    assert scene.heard(1) == [b"wrote"]
    named = {(pool, index) for pool, run in one.target.runs.items() for index in run.indices}
    changed = {(p, i) for p, n in pools.layout.counts.items() for i in range(n) if entry(pools, p, i) != before[p, i]}
    assert changed == named


def test_notices_of_a_link_come_in_the_order_they_were_given_in_whatever_their_rooms(scene: Scene) -> None:
    for room in (ROOM, OTHER):
        scene.permit(target(room))
    given = []
    for number in range(1, 21):
        room = (ROOM, OTHER)[number % 2]
        scene.post(write(target(room), (number + 1) // 2))
        scene.link.notify(room, b"%d" % number, (number + 1) // 2)
        given.append(b"%d" % number)
    assert scene.heard(20) == given


def test_metadata_arrive_in_their_slot_and_nowhere_else(scene: Scene) -> None:
    to = target(slot=2)
    scene.permit(to)
    slots = scene.reader.slots
    assert slots is not None
    scene.post(SlotWrite(to, b"metadata"))
    scene.link.notify(ROOM, b"wrote slot")
    assert scene.heard(1) == [b"wrote slot"]
    assert bytes(slots[2, :8].numpy()) == b"metadata"
    assert not slots[:2].any()
    assert not slots[2, 8:].any()


def test_what_was_sent_to_a_room_that_has_ended_is_dropped_where_access_is_revocable_and_lands_where_not(
    scene: Scene,
) -> None:
    """The difference between the planes that quarantine is for."""
    one = write(target())
    scene.permit(one.target)
    scene.revoke(ROOM)
    before = scene.image()
    scene.post(one)
    scene.link.notify(ROOM, b"late")
    assert scene.heard(1) == [b"late"], "whose message it is is the rooms' business"
    assert scene.same(one) is not scene.revocable
    assert (scene.image() == before) is scene.revocable
    assert scene.dropped == int(scene.revocable)


def test_what_was_not_granted_is_written_nowhere(scene: Scene) -> None:
    granted = target()
    scene.permit(granted)
    beyond = RoomTarget(ROOM, {**granted.runs, "full": PageNumbers(0, (5, 3, 8, 2, 9))}, 1)
    before = scene.image()
    runs = {"full": PageNumbers(3, (1, 2))}
    if scene.revocable:
        # The reader looks places up in what it granted itself, whatever the writer believes.
        scene.post(PageWrite(beyond, runs))
        scene.link.notify(ROOM, b"wrote", 1)
        scene.quiet()
        assert scene.dropped == 1
    else:
        with pytest.raises(IndexError):
            scene.post(PageWrite(granted, runs))
    assert scene.image() == before


def test_metadata_that_are_too_long_for_their_slot_are_written_nowhere(
    made: Callable[[str, tuple[int, int]], Any],
) -> None:
    """Over TCP alone: who stores into a reader's memory packs metadata itself, and that has the limit."""
    with made("zmq", (1, 1)) as scene:
        to = target()
        scene.permit(to)
        scene.post(SlotWrite(to, b"x" * (SLOT_BYTES + 1)))
        scene.link.notify(ROOM, b"after")
        assert scene.heard(1) == [b"after"]
        assert scene.dropped == 1
        assert not scene.reader.slots.any()


def test_a_cut_is_told_once_and_what_comes_after_it_arrives(scene: Scene) -> None:
    to = target()
    scene.permit(to)
    scene.post(write(to))
    scene.link.notify(ROOM, b"before", 1)
    assert scene.heard(1) == [b"before"]
    assert not scene.link.cut()
    scene.cut()
    scene.until(scene.link.cut, "the cut to be told")
    assert not scene.link.cut()
    after: list[bytes] = []

    def told_again() -> bool:
        # What is told while the connection is still on its way back may be lost with it, as the rooms know.
        scene.link.notify(ROOM, b"after")
        scene.pause()
        after.extend(scene.poll())
        return bool(after)

    scene.until(told_again, "a notice over the connection that came back")
    assert set(after) == {b"after"}


def test_nobody_connects_to_a_reader_that_cannot_be_reached(
    made: Callable[[str, tuple[int, int]], Any], kind: str
) -> None:
    with made(kind, (1, 1)) as scene:
        (part,) = scene.reader.ranks["ranks"]
        elsewhere = {key: "elsewhere" if key in ("node", "namespace") else value for key, value in part.items()}
        if kind == "shm":
            with pytest.raises(LayoutMismatch, match="shm"):
                scene.writer.planes[0].connect({"ranks": [elsewhere]})
        with pytest.raises(LayoutMismatch, match="ranks"):
            scene.writer.planes[0].connect({"ranks": []})


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_a_notice_waits_for_the_parts_of_all_ranks(
    made: Callable[[str, tuple[int, int]], Any], kind: str, ranks: tuple[int, int]
) -> None:
    with made(kind, ranks) as scene:
        one = write(target())
        scene.permit(one.target)
        if kind in OVER_TCP and ranks[0] > 1:
            # One rank is late: until its part is there nothing is told.
            for link in scene.links[:-1]:
                link.post(one).wait()
            scene.link.notify(ROOM, b"wrote", 1)
            assert scene.quiet() == []
            scene.links[-1].post(one).wait()
        else:
            scene.post(one)
            scene.link.notify(ROOM, b"wrote", 1)
        assert scene.heard(1) == [b"wrote"]
        if ranks[0] == ranks[1]:
            assert scene.same(one)
        # An end of the room waits for nothing.
        scene.link.notify(ROOM, b"ended")
        assert scene.heard(1) == [b"ended"]


def test_what_a_notice_waited_for_in_a_room_that_ends_is_told_after_all(
    made: Callable[[str, tuple[int, int]], Any],
) -> None:
    with made("zmq", (2, 1)) as scene:
        one = write(target())
        scene.permit(one.target)
        scene.links[0].post(one).wait()
        scene.link.notify(ROOM, b"wrote", 1)
        assert scene.quiet() == []
        scene.revoke(ROOM)
        assert scene.heard(1) == [b"wrote"], "late, and counted as such by the rooms"
