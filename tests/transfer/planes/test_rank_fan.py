"""Hand-overs between workers of unequal numbers of ranks: every head arrives where it belongs, and damage is seen."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.pool_sets import NAMES
from tests.support.room_ends import PLANES, Ends, Prompt, ends, placed
from tests.support.stand_in_ranks import headed_sets
from tests.transfer.test_rooms_of_all_pools import some_held, write_in_chunks
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.memory.head_slices import RankCount, common, cuts
from twinpool.contracts.errors import ErrorKind, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import PostWrite
from twinpool.transfer.planes.data_plane import PageWrite, RoomTarget, SentCounts, SlotWrite, launch_write
from twinpool.transfer.planes.one_sided import OrderedNotices
from twinpool.transfer.planes.rank_fan import (
    MAX_RANKS,
    AllWrites,
    RankFan,
    describe_ranks,
    described_ranks,
    fan,
    packed_ranks,
    unpacked_ranks,
)
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived

SETS = headed_sets()
QUICK = [
    (name, *sizes, plane)
    for name, sizes, plane in itertools.product(("full", "all"), ((1, 2), (2, 1), (4, 2)), ("shm", "zmq", "staged"))
]
ALL = [
    pytest.param(name, writers, readers, plane, marks=[pytest.mark.soak])
    for name, writers, readers, plane in itertools.product(NAMES, (1, 2, 4), (1, 2, 4), PLANES)
    if (name, writers, readers, plane) not in QUICK
]


def hand_over(both: Ends, prompts: list[Prompt], held: Mapping[RoomId, Mapping[str, set[int]]]) -> None:
    """All of them at once, chunk by chunk; what was lacking must lie in place, head by head."""
    wanted = {p.room: both.receiver.missing(ExpectedPrompt(p.keys, p.positions), held[p.room]) for p in prompts}
    sent = Counter(both.sender.sent)
    for prompt in prompts:
        both.open(prompt, held[prompt.room], 1)
    write_in_chunks(both, prompts, both.random)
    for prompt in prompts:
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived), arrived
        placed(both, prompt, arrived.leases, wanted[prompt.room])
        whole = both.spec.whole
        sizes = {pool: len(numbers) * whole.unit_bytes(pool) for pool, numbers in wanted[prompt.room].items()}
        assert arrived.received == {pool: size for pool, size in sizes.items() if size}
        sent.update(arrived.received)
        arrived.release()
        assert both.released(prompt.room).received
    assert both.sender.sent == sent, "both ends count the bytes of all ranks"
    for prompt in prompts:
        for lease in prompt.leases.values():
            lease.release()


@pytest.mark.parametrize(("name", "writers", "readers", "plane"), [*QUICK, *ALL])
def test_every_head_arrives_at_every_rank_that_holds_it(name: str, writers: int, readers: int, plane: str) -> None:
    dice = random.Random(f"{name} {writers} {readers} {plane}")
    with ends(SETS[name], plane, seed=dice.randrange(1000), count=40, ranks=(writers, readers)) as both:
        for _ in range(2):
            prompts = [both.prompt(dice.randint(1, 50)) for _ in range(2)]
            hand_over(both, prompts, {p.room: some_held(both, p, dice) for p in prompts})
        both.quiet()


@pytest.mark.parametrize(("writers", "readers"), [*itertools.product((1, 2, 4), repeat=2)])
@pytest.mark.parametrize("name", NAMES)
def test_what_ranks_write_to_each_other_covers_every_head_once(name: str, writers: int, readers: int) -> None:
    whole = SETS[name]
    plan = cuts(whole, RankCount(writers), RankCount(readers))
    for pool in whole.pools:
        for at, buffer in enumerate(pool.buffers):
            for target in range(readers):
                theirs = whole.shard(target, readers).by_name[pool.name].buffers[at]
                come = [
                    head
                    for source in range(writers)
                    if buffer.name in plan.get((source, target), {}).get(pool.name, ())
                    for head in common(whole.shard(source, writers).by_name[pool.name].buffers[at], theirs)
                ]
                assert sorted(come) == list(range(theirs.first_head, theirs.first_head + theirs.shape[0]))


def test_the_number_of_ranks_and_stages_is_what_was_packed_and_nothing_else_is_read() -> None:
    counts = [RankCount(size, n) for size in range(1, MAX_RANKS + 1) for n in range(1, size + 1) if not size % n]
    packed = {packed_ranks(count): count for count in counts}
    assert [packed[n] for n in range(1, MAX_RANKS + 1)] == [RankCount(n) for n in range(1, MAX_RANKS + 1)]
    edges = (0, 1, 2, 6, MAX_RANKS - 1, MAX_RANKS, MAX_RANKS + 1, 255)
    for number in (256 * more + size for more in range(-1, MAX_RANKS + 1) for size in edges):
        if number in packed:
            assert unpacked_ranks(number) == packed[number]
        else:
            with pytest.raises(ValueError, match="ranks"):
                unpacked_ranks(number)


def test_a_reader_is_of_as_many_ranks_and_stages_as_it_describes_and_of_no_others() -> None:
    parts: list[dict[str, Any]] = [{"rank": number} for number in range(6)]
    for stages in (1, 2, 3, 6):
        assert described_ranks(describe_ranks(parts, stages)) == (parts, RankCount(6, stages))
    assert "ranks" not in describe_ranks(parts, 2), "a writer that knows no stages refuses the reader"
    wrong: list[dict[str, Any]] = [
        {}, {"ranks": []}, {"ranks": "abc"}, {"ranks": parts * 11}, {"staged": parts}, {"stages": 2, "ranks": parts},
        *({"stages": stages, "staged": parts} for stages in (0, -1, 4, 7, 12, 2.0, True, "2", None)),
    ]  # fmt: skip
    for descriptor in wrong:
        with pytest.raises(LayoutMismatch):
            described_ranks(descriptor)


def test_writers_with_the_same_heads_share_the_readers_among_them() -> None:
    plan = cuts(SETS["sparse"], RankCount(4), RankCount(4))
    assert sorted(plan) == [(rank, rank) for rank in range(4)]
    assert sorted(cuts(SETS["sparse"], RankCount(2), RankCount(4))) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert sorted(cuts(SETS["sparse"], RankCount(4), RankCount(1))) == [(0, 0)]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_a_byte_that_went_wrong_in_any_buffer_on_any_rank_is_caught_by_its_tag(
    plane: str, writers: int, readers: int
) -> None:
    with ends(SETS["all"], plane, count=40, ranks=(writers, readers)) as both:
        for rank, pools in enumerate(both.managers[0].pools):
            for pool, buffer in pools.layout.each():
                prompt = both.prompt(23)
                index = prompt.runs[pool.name].indices[-1]
                sent_by = {s for (s, _), cut in cuts(SETS["all"], RankCount(writers), RankCount(readers)).items()
                           if buffer.spec.name in cut.get(pool.name, ())}  # fmt: skip
                at = buffer.offset(buffer.spec.layers - 1, index)
                both.open(prompt)
                pools.region[at] ^= 1
                both.sender.write(prompt.room, prompt.all(), (DONE,))
                both.until(lambda: not both.sender_peers.writing, "the write to be over")
                pools.region[at] ^= 1
                if rank in sent_by:
                    broken = both.outcome(prompt.room)
                    assert isinstance(broken, HandoverFailed), (buffer.spec.name, rank)
                    assert broken.kind is ErrorKind.DAMAGED
                    assert broken.message.startswith(pool.name)
                else:
                    both.seal(prompt)
                    arrived = both.outcome(prompt.room)
                    assert isinstance(arrived, PromptArrived)
                    arrived.release()
                both.released(prompt.room)
                for lease in prompt.leases.values():
                    lease.release()
        both.quiet()


def test_a_write_is_told_of_only_when_every_rank_has_posted_its_part() -> None:
    with ends(SETS["full"], "shm", count=40, ranks=(2, 1)) as both:
        prompt = both.prompt(9)
        both.open(prompt)
        followers = both.managers[0].followers
        followers.slow = PostWrite
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        for lease in prompt.leases.values():
            lease.release()
        for _ in range(5):
            both.poll()
        (room,) = both.receiver_rooms.values()
        assert room.shares.left("full") == range(3), "nothing has been told of"
        assert both.source.allocators["full"].quarantined == 3, "a rank still writes from these pages"
        followers.catch_up()
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        both.released(prompt.room)
        both.quiet()


def test_a_notice_waits_for_the_writes_of_every_rank_and_keeps_those_behind_it() -> None:
    room = RoomId("room-1")
    held = OrderedNotices(2, lambda sources, rank: frozenset(range(sources)))
    held.open(room)
    held.settled(0, room, 0, 1)
    held.settled(0, room, 1, 1)
    assert held.add(room, b"wrote", 1, 2) == []
    assert held.add(room, b"behind it", 1, 2) == []
    held.settled(1, room, 0, 1)
    assert held.due() == []
    held.settled(1, room, 1, 1)
    assert held.due() == [b"wrote", b"behind it"]
    assert held.add(room, b"late", 9, 2) == []
    assert held.close(room) == [b"late"]
    assert held.add(room, b"later", 9, 2) == [b"later"]


def test_a9_after_a_write_that_was_lost_nothing_counts_as_arrived_and_only_an_end_passes() -> None:
    room = RoomId("room-1")
    held = OrderedNotices(1, lambda sources, rank: frozenset(range(sources)))
    held.open(room)
    held.settled(0, room, 0, 1)
    held.settled(0, room, 0, 3)
    assert held.add(room, b"wrote 1", 1, 1) == [b"wrote 1"]
    assert held.add(room, b"wrote 3", 3, 1) == []
    held.settled(0, room, 0, 4)
    assert held.due() == []
    assert held.add(room, b"failed", 0, 1) == [b"failed"]


def test_who_waits_for_all_parts_of_a_write_waits_for_those_behind_one_that_failed_too() -> None:
    """Seed 648 of the simulator: a write whose first part had failed with its reader kept its pages pinned for ever."""
    over: list[str] = []

    class Part:
        def __init__(self, name: str, *, fails: bool) -> None:
            self.name, self._fails = name, fails

        @property
        def done(self) -> bool:
            return self.name in over

        def wait(self) -> None:
            over.append(self.name)
            if self._fails:
                raise RuntimeError(f"{self.name} failed")

        order = wait

    both = AllWrites([Part("our part", fails=True), Part("a follower's", fails=False)])
    with pytest.raises(RuntimeError, match="our part failed"):
        both.wait()
    assert over == ["our part", "a follower's"]
    assert both.done


class Posting:
    """A link whose writes are over when they are waited for; `refuses` to post any."""

    layered = True

    def __init__(self, refuses: str = "") -> None:
        self.frame_bytes: int | None = None
        self.sent, self._refuses = SentCounts(), refuses
        self.done = True

    def post(self, write: PageWrite | SlotWrite) -> Posting:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self.done = False
        return self

    def wait(self) -> None:
        self.done = True
        raise RuntimeError("nothing that anybody waits for")

    order = wait


def test_a_write_to_several_ranks_is_as_small_as_the_smallest_frame_of_any() -> None:
    links = [Posting(), Posting(), Posting()]
    assert RankFan(None, links).frame_bytes is None  # type: ignore[arg-type]
    for link, size in zip(links[1:], (4096, 1024), strict=True):
        link.frame_bytes = size
    assert RankFan(links[0], links[1:]).frame_bytes == 1024  # type: ignore[arg-type]


PAGES = PageWrite(RoomTarget(RoomId("room-1"), {}, 0), {})


def test_a6_a_write_that_one_link_refuses_is_over_on_the_others_before_anybody_hears_of_it() -> None:
    first = Posting()
    with pytest.raises(RuntimeError, match="no thread is left"):
        RankFan(None, [first, Posting("no thread is left")]).post(PAGES)  # type: ignore[list-item]
    assert first.done, "a failed write gives its pages back, and this one still reads them"


def test_a6_a_write_that_the_leader_cannot_post_is_over_only_when_its_followers_parts_are() -> None:
    followers = Posting()
    followers.post(PAGES)

    def refused(write: PageWrite | SlotWrite) -> Completion:
        raise RuntimeError("no thread is left")

    write = launch_write(CpuDevice(), refused, PAGES, (), lane="", others=followers)
    assert not write.done, "they still read the pages, which go back when it is over"
    with pytest.raises(RuntimeError, match="no thread is left"):
        write.wait()
    assert followers.done
    assert write.done


def test_what_several_links_have_carried_is_the_sum_over_all_of_them_each_counted_once() -> None:
    links = [Posting(), Posting(), Posting()]
    for number, link in enumerate(links, 1):
        link.sent = SentCounts(number, 10 * number, 0.25 * number, 0.5 * number, 1)
    apart = RankFan(links[0], links[1:])  # type: ignore[arg-type]
    assert apart.sent == SentCounts(6, 60, 1.5, 3.0, 3)
    assert RankFan(links[0], links).sent == apart.sent  # type: ignore[arg-type]
    assert RankFan(None, []).sent == SentCounts()
    links[2].sent.nbytes += 7
    assert apart.sent.nbytes == 67, "as of now, and not as of when the links were opened"


@pytest.mark.parametrize("plane", ["shm", "zmq"])
@pytest.mark.parametrize(("writers", "readers", "links"), [(1, 2, 2), (2, 4, 2), (2, 1, 1)])
def test_a_worker_counts_what_its_leader_writes_to_all_ranks_of_a_reader(
    writers: int, readers: int, links: int, plane: str
) -> None:
    with ends(SETS["full"], plane, count=40, ranks=(writers, readers)) as both:
        prompt = both.prompt(20)
        both.open(prompt)
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        counts = both.sender.counters
        assert counts["link_writes:decode-0"] == links
        assert counts["link_bytes:decode-0"] * writers == sum(arrived.received.values())
        arrived.release()
        both.released(prompt.room)
        for lease in prompt.leases.values():
            lease.release()
        both.quiet()


class OneLink:
    """A link to one rank that notes what becomes of it."""

    frame_bytes, layered, ranked = None, True, False

    def __init__(self) -> None:
        self.up = True
        self.was_cut, self.closed, self.sent = False, 0, SentCounts()

    def cut(self) -> bool:
        cut, self.was_cut = self.was_cut, False
        return cut

    def close(self) -> None:
        self.closed += 1


def test_a_cut_of_any_link_is_told_and_told_once_however_many_are_cut_together() -> None:
    links = [OneLink() for _ in range(3)]
    fanned = RankFan(links[0], links)  # type: ignore[arg-type]
    for cut in ([1], [0, 1], [0, 1, 2], [2]):
        for number in cut:
            links[number].was_cut = True
        assert fanned.cut()
        assert not fanned.cut(), "each of them has been heard"


@pytest.mark.parametrize("down", [0, 1, 2])
def test_a_reader_is_up_only_while_each_of_its_ranks_is(down: int) -> None:
    links = [OneLink() for _ in range(3)]
    fanned = RankFan(links[0], links)  # type: ignore[arg-type]
    assert fanned.up
    links[down].up = False
    assert not fanned.up, "a write needs all of them"


@pytest.mark.parametrize("other", [0, 1, 3])
def test_ranks_of_a_reader_that_describe_different_counts_are_refused_whichever_differs(other: int) -> None:
    """The leader checks a grant by its own rank's counts: at a rank that has fewer, others would write past its end."""
    counts = [{"full": 64, "window": 64} for _ in range(4)]
    counts[other] = {"full": 64, "window": 8}
    with ends(SETS["full"], "shm") as both, pytest.raises(LayoutMismatch, match="different counts"):
        both.sender_plane.connect({"ranks": [{"counts": each} for each in counts]})


@pytest.mark.parametrize("refusing", [0, 1, 3])
def test_a_reader_of_which_one_rank_cannot_be_reached_is_left_with_no_link_open(refusing: int) -> None:
    whole, opened = SETS["full"].whole, list[OneLink]()

    def open_link(part: dict[str, int], spec: object, cut: object) -> OneLink:
        if part["rank"] == refusing:
            raise LayoutMismatch("it holds another model")
        opened.append(OneLink())
        return opened[-1]

    described = {"ranks": [{"rank": rank} for rank in range(4)]}
    with pytest.raises(LayoutMismatch, match="another model"):
        fan(whole, 0, 1, described, open_link)  # type: ignore[arg-type]
    assert [link.closed for link in opened] == [1] * refusing
