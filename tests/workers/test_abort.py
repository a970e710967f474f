"""A request may be ended anywhere: in every phase, on every plane, in every way, and everything is whole afterwards.

State is of every kind, and the engine's tokens are a hash of the state it read, so a page that came back too early, or
belongs to two, changes the answer of the request that runs beside it, or of the one that comes after.
"""

from __future__ import annotations

import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.worker_pair import SESSION, turns
from tests.support.worker_parts import manager_of, poll, receiver_of, scheduler_of, table_of
from tests.workers.test_any_state import HashPair, hash_pair
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import RequestId, Role, RoomId
from twinpool.contracts.messages.router_commands import Cancel
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import DecodePhase
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.request import PrefillPhase
from twinpool.prefill.worker import PrefillWorker

SETS = ("full+window", "full+state", "all")
PLANES = ("local", "shm", "zmq", "nixl", "staged")
SOME = (("full+window", "local"), ("full+state", "nixl"), ("all", "shm"), ("all", "zmq"), ("all", "staged"))
"""Every plane, and every kind of state."""
PROMPT, ANSWER, PAGE = 22, 6, 4
FILLER = 36
UNTIL_S = 60.0
PARAMS = SamplingParams(max_tokens=ANSWER, temperature=0.0)
DEADLINE_S = 500.0
BOTH = (Role.PREFILL, Role.DECODE)


@dataclass
class Scene:
    """A pair, and what it holds of the request that is to be ended."""

    both: HashPair
    clock: ManualClock
    random: random.Random
    name: str

    @property
    def prefill(self) -> PrefillWorker:
        assert isinstance(self.both.prefill, PrefillWorker)
        return self.both.prefill

    @property
    def decode(self) -> DecodeWorker:
        assert isinstance(self.both.decode, DecodeWorker)
        return self.both.decode

    def prompt(self, length: int = PROMPT) -> list[int]:
        return [self.random.randrange(300) for _ in range(length)]

    def submit(self, prompt: list[int], legs: tuple[Role, ...] = BOTH) -> RequestId:
        return self.both.submit(prompt, PARAMS, legs=legs, deadline_s=DEADLINE_S)

    def until(self, reached: Callable[[], object], *roles: Role) -> None:
        """Turns of both, or of `roles` alone, with a look after each: no phase that a turn ends passes by unseen."""
        end = time.monotonic() + UNTIL_S
        for role in itertools.cycle(roles or BOTH):
            if reached():
                return
            assert time.monotonic() < end, "the phase was never reached"
            self.both.step(role)
            self.both.prefill.wait(0.001)

    def at_prefill(self, rid: RequestId, phase: PrefillPhase) -> bool:
        return any(r.phase is phase for r in table_of(self.prefill) if r.submit.request_id == rid)

    def at_decode(self, rid: RequestId, phase: DecodePhase) -> bool:
        return any(r.phase is phase for r in table_of(self.decode) if r.submit.request_id == rid)

    def check(self, prompt: list[int], rid: RequestId) -> None:
        from tests.support.hash_workers import recite

        (answer,) = self.both.run(rid)
        assert answer.done is not None
        assert answer.done.error is None, answer.done
        assert answer.list == recite(pool_sets(PAGE)[self.name], prompt, ANSWER)


# ---------------------------------------------------------------- phases: how a request gets there


def queued(scene: Scene) -> RequestId:
    return scene.submit(scene.prompt())


def only_prefill_has_heard(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt(), (Role.PREFILL,))
    scene.until(lambda: scene.at_prefill(rid, PrefillPhase.COMPUTED), Role.PREFILL)
    return rid


def only_decode_has_heard(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt(), (Role.DECODE,))
    scene.until(lambda: scene.at_decode(rid, DecodePhase.ARRIVING))
    return rid


def computed_without_a_grant(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt())
    scene.until(lambda: scene.at_prefill(rid, PrefillPhase.COMPUTED), Role.PREFILL)
    return rid


def prefetching(scene: Scene) -> RequestId:
    """What it needs lies in storage alone, and is being read."""
    first = scene.prompt(16)
    scene.both.run(scene.submit(first))
    for _ in range(3):  # Others take the room that its pages have on the device and on the host.
        scene.both.run(scene.submit(scene.prompt(FILLER)))
    rid = scene.submit([*first, *scene.prompt(5)])
    (request,) = [r for r in table_of(scene.prefill) if r.submit.request_id == rid]
    assert request.prefetch is not None
    return rid


def loading(scene: Scene) -> RequestId:
    """Its prefix is on the host, and on its way to the device."""
    first = scene.prompt(16)
    scene.both.run(scene.submit(first))
    for _ in range(3):  # Others take the room on the device; the host has enough.
        scene.both.run(scene.submit(scene.prompt(FILLER)))
    rid = scene.submit([*first, *scene.prompt(5)])
    (request,) = [r for r in table_of(scene.prefill) if r.submit.request_id == rid]
    end = time.monotonic() + UNTIL_S
    while request.allocation is None:
        assert time.monotonic() < end, "it was not admitted"
        poll(scene.prefill)
        scheduler_of(scene.prefill).admit()
        scene.prefill.wait(0.001)
    assert request.cached.host, "it was to come from the host"
    manager_of(scene.prefill).launch()
    return rid


def prefilling(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt())
    scene.until(lambda: any(0 < r.committed < PROMPT for r in table_of(scene.prefill)), Role.PREFILL)
    return rid


def in_transfer(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt())
    before = scene.prefill.setup.sender.sent_bytes
    scene.until(lambda: scene.prefill.setup.sender.sent_bytes > before)
    assert scene.at_decode(rid, DecodePhase.ARRIVING)
    return rid


def sent_and_not_confirmed(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt())
    room = RoomId(rid.replace("r", "room-"))
    scene.until(lambda: room in scene.prefill.setup.sender.unconfirmed)
    return rid


def running(scene: Scene) -> RequestId:
    rid = scene.submit(scene.prompt())
    scene.until(lambda: len(scene.both.answers[rid].tokens) >= 3)
    assert scene.at_decode(rid, DecodePhase.RUNNING)
    return rid


def waiting_for_pages(scene: Scene) -> RequestId:
    """Decode's pool is given to others."""
    others = [scene.submit(scene.prompt(FILLER)) for _ in range(4)]
    rid = scene.submit(scene.prompt(FILLER))
    scene.both.step()
    assert scene.at_decode(rid, DecodePhase.WAITING)
    for other in others[1:]:
        scene.both.cancel(other)
    return rid


PHASES = (
    queued,
    only_prefill_has_heard,
    only_decode_has_heard,
    computed_without_a_grant,
    prefetching,
    loading,
    prefilling,
    in_transfer,
    sent_and_not_confirmed,
    running,
    waiting_for_pages,
)


# ---------------------------------------------------------------- ways to end it


def cancelled(scene: Scene, rid: RequestId) -> None:
    scene.both.cancel(rid)


def cancelled_at_prefill_first(scene: Scene, rid: RequestId) -> None:
    scene.both.cancel(rid, (Role.PREFILL,))
    for _ in range(5):
        scene.both.step()
    scene.both.cancel(rid, (Role.DECODE,))


def cancelled_at_decode_first(scene: Scene, rid: RequestId) -> None:
    scene.both.cancel(rid, (Role.DECODE,))
    for _ in range(5):
        scene.both.step()
    scene.both.cancel(rid, (Role.PREFILL,))


def out_of_time(scene: Scene, rid: RequestId) -> None:
    scene.clock.advance(DEADLINE_S)


def its_router_gone(scene: Scene, rid: RequestId) -> None:
    scene.both.prefill.drop_session(SESSION)
    scene.both.decode.drop_session(SESSION)


Way = Callable[[Scene, RequestId], None]
WAYS: tuple[Way, ...] = (cancelled, cancelled_at_prefill_first, cancelled_at_decode_first, out_of_time, its_router_gone)
ALONE = (out_of_time, its_router_gone)
"""Ways that end everything else as well."""


@contextmanager
def opened(name: str, plane: str, seed: int, host_pages: int = 24) -> Iterator[Scene]:
    clock = ManualClock()
    seeds = itertools.count(seed)
    unit = sum(pool_sets(PAGE)[name].unit_bytes(pool) for pool in pool_sets(PAGE)[name].by_name)
    storage = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 24}
    cache = {"host_bytes": host_pages * unit, "load_back": "always", "storage": storage}
    cache |= {"prefetch": {"policy": "wait_complete"}}
    with hash_pair(
        name, {Role.PREFILL: 26, Role.DECODE: 34}, clock=clock, device=lambda: AdversarialDevice(next(seeds)),
        cache=cache, transfer={"plane": plane}, prefill={"chunk_tokens": 8},
    ) as both:  # fmt: skip
        yield Scene(both, clock, random.Random(seed), name)


def whole(both: HashPair) -> None:
    end = time.monotonic() + UNTIL_S
    while any(w.check().rooms for w in (both.prefill, both.decode)):  # On sockets, words take their time.
        assert time.monotonic() < end, "rooms are left"
        both.step()
        both.prefill.wait(0.001)
    both.settle(20000)
    for worker in (both.prefill, both.decode):
        assert worker.check().violations == ()


def end_in_every_way(name: str, plane: str, number: int, ways: Sequence[Way]) -> None:
    """Brings a request into phase `number` and ends it, in each way, beside one that goes on where the way allows."""
    phase = PHASES[number]
    with opened(name, plane, seed=100 * number, host_pages=200 if phase is loading else 24) as scene:
        for way in ways:
            beside = None if way in ALONE or phase is waiting_for_pages else scene.prompt(9)
            bystander = scene.submit(beside) if beside is not None else None
            way(scene, phase(scene))
            if beside is not None and bystander is not None:
                scene.check(beside, bystander)
            whole(scene.both)
        after = scene.prompt(PROMPT)
        scene.check(after, scene.submit(after))


@pytest.mark.slow
@pytest.mark.parametrize("phase", range(len(PHASES)), ids=lambda n: PHASES[n].__name__)
@pytest.mark.parametrize(("name", "plane"), SOME)
def test_b2_a_request_that_is_ended_in_any_phase_leaves_everything_whole(name: str, plane: str, phase: int) -> None:
    """Cancelled, and in one other way; the soak has all ways on all planes for all kinds of state."""
    end_in_every_way(name, plane, phase, [cancelled, WAYS[1 + phase % (len(WAYS) - 1)]])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("phase", range(len(PHASES)), ids=lambda n: PHASES[n].__name__)
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", SETS)
def test_b2_a_request_that_is_ended_in_any_phase_in_any_way_leaves_everything_whole(
    name: str, plane: str, phase: int
) -> None:
    end_in_every_way(name, plane, phase, WAYS)


@pytest.mark.parametrize("name", ["full+window", "full+state"])
def test_a7_what_is_still_being_loaded_is_not_sent_when_its_grant_comes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes out behind the step that waits for the load."""
    with opened(name, "local", seed=5, host_pages=200) as scene:
        rid = loading(scene)
        (request,) = [r for r in table_of(scene.prefill) if r.submit.request_id == rid]
        assert request.allocation is not None
        manager_of(scene.decode).tree.eviction.clear()  # It has nothing of the prefix itself.
        before = scene.prefill.setup.sender.sent_bytes
        with monkeypatch.context() as patched:
            patched.setattr(manager_of(scene.prefill), "poll", list)  # Nobody looks at the load.
            for _ in turns(100):
                scene.both.step(Role.DECODE)
                poll(scene.prefill)
                if scene.prefill.setup.sender.granted(request.submit.room):
                    break
            for _ in range(100):
                scene.both.step(Role.DECODE)
                poll(scene.prefill)
        assert scene.prefill.setup.sender.granted(request.submit.room)
        assert not manager_of(scene.prefill).allocations.ready(request.allocation), "the load was to be under way"
        assert scene.prefill.setup.sender.sent_bytes == before
        scene.check(list(request.submit.tokens), rid)
        assert scene.prefill.setup.sender.sent_bytes > before


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plane"), SOME)
def test_a5_pages_of_a_request_given_up_in_mid_transfer_return_on_the_writers_word_alone(name: str, plane: str) -> None:
    with opened(name, plane, seed=7) as scene:
        rid = in_transfer(scene)
        receiver = receiver_of(scene.decode)
        scene.decode.handle(SESSION, Cancel(rid, 0))
        revocable = receiver.end.plane.revocable
        for _ in range(20):  # The writer hears nothing of it: only decode takes its turns.
            scene.both.step(Role.DECODE)
            scene.clock.advance(100.0)
        assert bool(receiver.rooms) is not revocable
        free = {pool: allocator.free for pool, allocator in manager_of(scene.decode).pools.allocators.items()}
        held = sum(receiver.holds(pool) for pool in free)
        assert (held > 0) is not revocable, "what a writer may still write to belongs to nobody else"
        scene.prefill.handle(SESSION, Cancel(rid, 0))
        whole(scene.both)
        after = scene.prompt()
        scene.check(after, scene.submit(after))
