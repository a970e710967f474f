"""Hand-overs of every kind of pool set, over every plane: what arrives, what is skipped, what ends a room."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from tests.support.pool_sets import NAMES, entry, pool_sets
from tests.support.room_ends import PLANES, Ends, LateDevice, Prompt, ends, image, placed
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, DONE, DeviceOp, DeviceStream, spans
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import (
    ExpectedPrompt,
    HandoverFailed,
    PoolProgress,
    PromptArrived,
    RoomProgress,
    SendablePages,
)

Place = tuple[str, int]
"""A pool, and an index in it."""
SETS = pool_sets()
POOLS = [(plane, pool) for plane in PLANES for pool in ("full", "window", "state")]


def some_held(both: Ends, prompt: Prompt, dice: random.Random) -> dict[str, set[int]]:
    """What decode may hold: a prefix of the full pool, any pages of the others, or nothing of a pool."""
    held = {}
    for pool, numbers in due(both.spec, prompt.positions).items():
        if dice.random() < 0.6:
            whole = dice.randrange(len(numbers) + 1)
            held[pool] = set(numbers[:whole]) if pool == "full" else {n for n in numbers if dice.random() < 0.5}
    return held


def write_in_chunks(both: Ends, prompts: list[Prompt], dice: random.Random) -> None:
    """As a prefill does: some pages of some pools at a time, what was not asked for included."""
    ready = {(p.room, pool): run.first for p in prompts for pool, run in p.runs.items()}
    while any(ready[p.room, pool] < run.numbers.stop for p in prompts for pool, run in p.runs.items()):
        prompt = dice.choice(prompts)
        parts = {}
        for pool, run in prompt.runs.items():
            start = ready[prompt.room, pool]
            stop = ready[prompt.room, pool] = min(run.numbers.stop, start + dice.randrange(4))
            parts[pool] = prompt.part(pool, range(start, stop))
        both.sender.write(prompt.room, parts, (DONE,))


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_a12_what_decode_lacks_of_each_pool_arrives_byte_for_byte_and_nothing_else(name: str, plane: str) -> None:
    dice = random.Random(f"{name} {plane}")
    with ends(SETS[name], plane, seed=dice.randrange(1000), count=40) as both:
        for _ in range(5):
            prompts = [both.prompt(dice.randint(1, 60)) for _ in range(2)]
            before, sent = image(both.target), both.sender.sent.copy()
            granted, wanted, total = {}, {}, dict.fromkeys(both.spec.by_name, 0)
            for prompt in prompts:
                held = some_held(both, prompt, dice)
                lacks = both.receiver.missing(ExpectedPrompt(prompt.keys, prompt.positions), held)
                granted[prompt.room], wanted[prompt.room] = both.open(prompt, held, dice.randrange(3)), lacks
                assert {p: list(n) for p, n in both.sender.wanted(prompt.room).items()} == {
                    p: list(n) for p, n in lacks.items()
                }
            write_in_chunks(both, prompts, dice)
            untouched = set(before)
            for prompt in prompts:
                assert not any(both.sender.wanted(prompt.room).values())
                both.seal(prompt)
                arrived, lacks = both.outcome(prompt.room), wanted[prompt.room]
                assert isinstance(arrived, PromptArrived)
                assert arrived.metadata.computed_tokens == prompt.positions
                assert arrived.leases == granted[prompt.room]
                placed(both, prompt, arrived.leases, lacks)
                sizes = {p: len(n) * both.spec.unit_bytes(p) for p, n in lacks.items()}
                assert arrived.received == {p: n for p, n in sizes.items() if n}
                assert arrived.digests == {
                    p: {i: prompt.part(p, range(i, i + 1)).tags[0].digest for i in n} for p, n in lacks.items() if n
                }
                untouched -= {(p, i) for p, n in lacks.items() for i in arrived.leases[p].indices[: len(n)]}
                total = {p: n + sizes[p] for p, n in total.items()}
                arrived.release()
                assert both.released(prompt.room).received
            now = image(both.target)
            assert all(before[place] == now[place] for place in untouched)
            assert +(both.sender.sent - sent) == {p: n for p, n in total.items() if n}
            for prompt in prompts:
                for lease in prompt.leases.values():
                    lease.release()
        both.quiet()


def test_a12_a_longer_full_prefix_than_any_anchor_is_not_sent_again_and_the_state_is_sent_whole() -> None:
    """Decode holds six of seven pages but no state: it could compute from nothing, and lacks one page, not seven."""
    with ends(SETS["all"], "local") as both:
        prompt = both.prompt(27)
        leases = both.open(prompt, {"full": range(6), "window": {5}})
        assert both.sender.wanted(prompt.room) == {"full": range(6, 7), "window": range(4, 7), "state": range(6, 7)}
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        assert {p: n // both.spec.unit_bytes(p) for p, n in arrived.received.items()} == {
            "full": 1,
            "window": 3,
            "state": 1,
        }
        assert arrived.bytes == both.sender.sent_bytes
        placed(both, prompt, leases, {"full": range(6, 7), "window": range(4, 7), "state": range(6, 7)})
        arrived.release()
        both.quiet()


# ------------------------------------------------------------ done, and nothing to do


def test_c1_pages_without_their_state_are_no_hand_over() -> None:
    with ends(SETS["all"], "local") as both:
        prompt = both.prompt(27)
        both.open(prompt)
        both.sender.write(prompt.room, {pool: prompt.part(pool) for pool in ("full", "window")}, (DONE,))
        with pytest.raises(WireError, match=r"can't be sealed: state 6\.\.6 not written"):
            both.seal(prompt)
        both.poll()
        assert both.outcomes == []
        peer = both.sender_rooms[prompt.room].peer
        assert peer is not None
        peer.link.notify(
            prompt.room, m.encode_notice(m.SlotWritten(prompt.room, both.sender_rooms[prompt.room].ticket))
        )
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert broken.kind is ErrorKind.ROOM
        assert "before this had arrived: state 6..6" in broken.message
        assert both.receiver.damage == {}, "nothing was damaged: something is missing"
        both.quiet()


def test_c1_a_room_is_done_when_all_its_pools_are() -> None:
    dice = random.Random(3)
    for _ in range(200):
        wanted = {p: range(s := dice.randrange(5), s + dice.randrange(5)) for p in ("full", "window", "state")}
        shares, todo = RoomProgress(wanted), [p for p, numbers in wanted.items() for _ in numbers]
        dice.shuffle(todo)
        for pool in todo:
            assert not shares.done
            assert shares.share(pool) is PoolProgress.COMING
            at = shares.left(pool).start
            assert not shares.takes(pool, range(at + 1, at + 2))
            assert not shares.takes(pool, range(at, wanted[pool].stop + 1))
            assert not shares.takes(pool, range(at, at))
            shares.advance(pool, range(at, at + 1))
        assert shares.done


def test_c2_a_pool_of_which_nothing_is_wanted_is_in_a_state_of_its_own() -> None:
    shares = RoomProgress({"full": range(2), "window": range(7, 7)})
    assert [shares.share(p) for p in ("full", "window", "state")] == [
        PoolProgress.COMING,
        PoolProgress.NOTHING,
        PoolProgress.NOTHING,
    ]
    assert not shares.takes("window", range(7, 8))
    assert not shares.takes("state", range(1))
    shares.advance("full", range(2))
    assert (shares.share("full"), shares.share("window")) == (PoolProgress.DONE, PoolProgress.NOTHING)
    assert RoomProgress({}).done


@pytest.mark.parametrize("plane", PLANES)
def test_c2_a_room_with_nothing_to_send_is_complete_by_its_metadata_and_not_before(plane: str) -> None:
    with ends(SETS["all"], plane) as both:
        prompt = both.prompt(27)
        both.open(prompt, due(both.spec, 27), extra=2)
        assert not any(both.sender.wanted(prompt.room).values())
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.poll()
        assert both.sender.sent_bytes == 0
        assert both.outcomes == []
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        assert (arrived.received, arrived.bytes) == ({}, 0)
        assert [len(arrived.leases[p]) for p in ("full", "window", "state")] == [2, 2, 2]
        arrived.release()
        both.quiet()


# ------------------------------------------------------------ one write, all pools


def test_b6_a_write_pins_and_names_every_pool_and_its_state_arrives_although_the_writer_let_go() -> None:
    device = LateDevice()
    with ends(SETS["all"], "local", device=device) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        kept = {place: data for place, data in image(both.source).items()}
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        assert {s.pool: tuple(s.pages) for s in device.ops[-1].reads} == {
            pool: run.indices for pool, run in prompt.runs.items()
        }
        for pool, lease in prompt.leases.items():
            lease.release()
            allocator = both.source.allocators[pool]
            assert allocator.quarantined == len(prompt.runs[pool])
            others = allocator.lease(allocator.free, "the next one")
            both.source.zero({pool: others.indices})
        both.seal(prompt)
        device.run_all()
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        for pool, run in prompt.runs.items():
            for ours, there in zip(run.indices, leases[pool].indices, strict=True):
                assert kept[pool, ours] == image(both.target)[pool, there]
        assert all(a.quarantined == 0 for a in both.source.allocators.values())
        arrived.release()
        both.quiet()


def test_a_writer_that_leaves_something_out_is_stopped_at_once() -> None:
    with ends(SETS["all"], "local") as both:
        prompt = both.prompt(27)
        both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, (DONE,))
        with pytest.raises(AssertionError, match=r"range\(2, 7\) is left"):
            both.sender.write(prompt.room, {"full": prompt.part("full", range(3, 5))}, (DONE,))
        assert both.sender.wanted(prompt.room)["full"] == range(2, 7)
        both.sender.fail(prompt.room, ErrorKind.WORKER, "a bug")
        assert isinstance(both.outcome(prompt.room), HandoverFailed)
        both.quiet()


@pytest.mark.parametrize("plane", PLANES)
def test_a7_nothing_is_sent_or_told_before_the_step_that_computes_it_is_complete(plane: str) -> None:
    device = LateDevice()
    with ends(SETS["all"], plane, device=device) as both:
        prompt = both.prompt(27)
        leases, finished = both.open(prompt), image(both.source)

        def forward() -> None:
            for pool, run in prompt.runs.items():
                for index in run.indices:
                    restore(both, pool, index, finished[pool, index])

        both.source.zero({pool: run.indices for pool, run in prompt.runs.items()})
        step = device.submit(DeviceOp("forward", DeviceStream.COMPUTE), forward)
        before = image(both.target)
        both.sender.write(prompt.room, prompt.all(), (step,))
        both.seal(prompt)
        for _ in range(3):
            both.poll()
            both.waiter.wait(0.002)
        assert image(both.target) == before
        assert both.outcomes == []
        device.run_all()
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        placed(both, prompt, leases, due(both.spec, 27))
        arrived.release()
        both.quiet()


@pytest.mark.slow
def test_a7_under_any_order_that_the_device_may_take_what_was_computed_arrives() -> None:
    """Steps compute chunks, sends follow their steps, pages are freed and used again at once: no seed mixes them up."""
    for seed in range(6):
        device = AdversarialDevice(seed)
        with ends(SETS["all"], "local", seed=seed, count=14, device=device) as both:
            for _ in range(3):
                prompt = both.prompt(both.random.randint(1, 40))
                leases, finished = both.open(prompt), image(both.source)
                both.source.zero({pool: run.indices for pool, run in prompt.runs.items()})
                compute_and_send(both, device, prompt, finished)
                both.seal(prompt)
                arrived = both.outcome(prompt.room)
                assert isinstance(arrived, PromptArrived)
                for pool, run in prompt.runs.items():
                    for ours, there in zip(run.indices, leases[pool].indices, strict=True):
                        assert finished[pool, ours] == entry(both.target, pool, there), (seed, pool)
                arrived.release()
                for lease in prompt.leases.values():
                    lease.release()
            device.settle()
            both.quiet()


def compute_and_send(
    both: Ends, device: AdversarialDevice, prompt: Prompt, finished: Mapping[Place, list[bytes]]
) -> None:
    """One step a chunk of two pages, in every pool; each is sent as soon as it is launched."""
    for first in range(0, -(-prompt.positions // both.spec.page_tokens), 2):
        parts = {}
        for pool, run in prompt.runs.items():
            numbers = range(max(first, run.first), min(first + 2, run.numbers.stop))
            parts[pool] = prompt.part(pool, numbers) if numbers else prompt.part(pool, range(run.first, run.first))

        def forward(parts: Mapping[str, SendablePages] = parts) -> None:
            for pool, part in parts.items():
                for index in part.indices:
                    restore(both, pool, index, finished[pool, index])

        writes = spans(DEVICE, {pool: part.indices for pool, part in parts.items()})
        step = device.submit(DeviceOp("forward", DeviceStream.COMPUTE, writes=writes), forward)
        both.sender.write(prompt.room, parts, (step,))


def restore(both: Ends, pool: str, index: int, data: list[bytes]) -> None:
    """The inverse of `entry`, at the writer."""
    pieces = iter(data)
    for buffer in both.source.layout.buffers[pool]:
        for layer in range(buffer.spec.layers):
            start = buffer.offset(layer, index)
            piece = next(pieces)
            both.source.region[start : start + len(piece)].numpy()[:] = list(piece)


# ------------------------------------------------------------ damage, mix-ups, ends


@pytest.mark.parametrize(("plane", "pool"), POOLS)
def test_a9_a_flipped_byte_in_any_pool_is_found_counted_and_breaks_the_room(plane: str, pool: str) -> None:
    number = 1 + [p.name for p in SETS["all"].pools].index(pool)
    with ends(SETS["all"], plane, faults={"corrupt_page": number}) as both:
        prompt = both.prompt(27)
        both.open(prompt)
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert broken.kind is ErrorKind.DAMAGED
        assert broken.message.startswith(f"{pool}: pages [")
        assert both.receiver.damage == {pool: 1}
        assert both.released(prompt.room).damaged
        both.quiet()


@pytest.mark.parametrize("pool", ["full", "window", "state"])
def test_state_of_another_prompt_is_refused_in_any_pool(pool: str) -> None:
    with ends(SETS["all"], "local") as both:
        prompt, other = both.prompt(27), both.prompt(27)
        both.open(prompt)
        both.sender.write(prompt.room, {**prompt.all(), pool: other.part(pool)}, (DONE,))
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert broken.message.startswith(f"{pool}: pages")
        assert "are of another prompt" in broken.message
        both.quiet()


@pytest.mark.parametrize("part", ["pages that were not granted", "pages out of order", "a pool that there isn't"])
def test_a_notice_of_anything_but_what_comes_next_breaks_the_room(part: str) -> None:
    sealed = {
        "pages that were not granted": m.PageTags("full", 0, (b"k" * 16,), (1,)),
        "pages out of order": m.PageTags("full", 4, (b"k" * 16,), (1,)),
        "a pool that there isn't": m.PageTags("latent", 0, (b"k" * 16,), (1,)),
    }[part]
    with ends(SETS["all"], "local") as both:
        prompt = both.prompt(27)
        both.open(prompt, {"full": range(3)})
        peer = both.sender_rooms[prompt.room].peer
        assert peer is not None
        peer.link.notify(
            prompt.room, m.encode_notice(m.PagesWritten(prompt.room, both.sender_rooms[prompt.room].ticket, (sealed,)))
        )
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert "came when these were due: full 3..6, window 4..6, state 6..6" in broken.message
        both.quiet()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_a5_given_up_in_mid_write_every_pools_pages_come_back_when_nobody_can_write_to_them(
    name: str, plane: str
) -> None:
    with ends(SETS[name], plane) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        early = {"full": prompt.part("full", range(3))}
        late = {**prompt.all(), "full": prompt.part("full", range(3, 7))}
        both.sender.write(prompt.room, early, (DONE,))
        both.receiver.abort(prompt.room, "cancelled")
        before, indices = image(both.target), {pool: lease.indices for pool, lease in leases.items()}
        if both.receiver_plane.revocable:
            assert both.receiver.rooms == 0
            assert all(a.free == a.total for a in both.target.allocators.values())
        else:
            assert both.receiver.poll() == []
            assert {p: both.receiver.holds(p) for p in leases} == {p: len(lease) for p, lease in leases.items()}
            assert all(lease.live for lease in leases.values())
        # The writer hasn't heard of it, and writes on: into quarantine, or nowhere.
        both.sender.write(prompt.room, late, (DONE,))
        both.until(lambda: not both.receiver.rooms and not both.sender.rooms, "the end of the room")
        both.until(lambda: both.receiver_plane.dropped or not both.receiver_plane.revocable, "the late write")
        changed = {place for place, data in image(both.target).items() if data != before[place]}
        promised = {(pool, i) for pool, chosen in indices.items() for i in chosen}
        assert changed <= (set() if both.receiver_plane.revocable else promised)
        assert not any(isinstance(o, PromptArrived) for o in both.outcomes)
        assert both.released(prompt.room).reason == "decode gave it up: cancelled"
        both.quiet()


def test_a_lease_that_is_too_short_for_what_is_missing_is_refused_and_nothing_is_taken() -> None:
    with ends(SETS["all"], "local") as both:
        prompt = both.prompt(27)
        peer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
        with pytest.raises(ValueError, match="27 positions have 7 pages, not 6 keys"):
            both.receiver.open(prompt.room, peer, ExpectedPrompt(prompt.keys[:-1], 27))
        both.receiver.open(prompt.room, peer, ExpectedPrompt(prompt.keys, 27))
        lease = both.target.allocators["full"].lease(6, "short")
        with pytest.raises(ValueError, match="a lease of 7 in pool full"):
            both.receiver.grant(prompt.room, {"full": lease})
        with pytest.raises(ValueError, match="a lease of 3 in pool window"):
            both.receiver.grant(prompt.room, {"full": lease}, {"full": {0}})
        assert both.receiver.slots.free == both.receiver.slots.total
        lease.release()
        both.receiver.abort(prompt.room, "no use")
        both.quiet()


BAD_PLACES: Mapping[str, tuple[m.GrantedPages, ...]] = {
    "a pool that there isn't": (m.GrantedPages("latent", 0, (1,), (0,)),),
    "one pool twice": (m.GrantedPages("full", 0, (1,), (0,)), m.GrantedPages("full", 1, (2,), (0,))),
    "nothing": (m.GrantedPages("full", 0, (), ()),),
    "the null page": (m.GrantedPages("full", 0, (1, 0), (0, 0)),),
    "pages without epochs": (m.GrantedPages("full", 0, (1, 2), (0,)),),
    "pages before the first": (m.GrantedPages("full", -1, (1,), (0,)),),
}


@pytest.mark.parametrize("places", BAD_PLACES)
def test_a_grant_of_places_that_cannot_be_is_refused_with_a_word(places: str) -> None:
    with ends(SETS["all"], "local") as both:
        prompt = both.prompt(9)
        peer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
        both.receiver.open(prompt.room, peer, ExpectedPrompt(prompt.keys, 9))
        both.sender.open(prompt.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        both.until(lambda: both.sender_peers, "hello")
        (entry,) = both.sender_peers.values()
        with pytest.raises(WireError, match=f"room {prompt.room} was granted places of"):
            both.sender_rooms.hear(entry, m.PageGrant(prompt.room, BAD_PLACES[places], 0, 0, 1))
        assert not both.sender.granted(prompt.room)
