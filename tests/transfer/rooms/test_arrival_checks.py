"""Pages that arrived are looked at by the device, not by the loop: what waits for that, and what is kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, ends
from tests.support.worker_parts import arrivals_of
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.contracts.errors import ErrorKind
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]


@contextmanager
def late_reader() -> Iterator[tuple[Ends, AdversarialDevice]]:
    """A reader whose device runs nothing by itself."""
    device = AdversarialDevice(1, stray=0.0, polled=0.0)
    with ends(SPEC, "local", reader_device=device) as both:
        yield both, device


def handed_over(both: Ends) -> Prompt:
    """A prompt of which everything was written and told."""
    prompt = both.prompt(40)
    both.open(prompt)
    both.sender.write(prompt.room, prompt.all(), ())
    both.seal(prompt)
    return prompt


def test_nothing_has_arrived_before_its_check_is_over() -> None:
    with late_reader() as (both, device):
        prompt = handed_over(both)
        for _ in range(3):
            both.poll()
        assert (both.outcomes, device.queued) == ([], 1)
        assert both.receiver.next_deadline is not None, "a device that doesn't wake its host is looked at again"
        device.settle()
        both.poll()
        assert isinstance(both.outcomes[0], PromptArrived)
        assert both.outcomes[0].room == prompt.room
        for lease in both.outcomes[0].leases.values():
            lease.release()
        both.quiet()


@pytest.mark.parametrize("pool", [pool.name for pool in SPEC.pools])
def test_a9_damage_in_any_pool_is_found_by_the_check(pool: str) -> None:
    with late_reader() as (both, device):
        prompt = handed_over(both)
        both.poll()
        place = both.receiver_rooms[prompt.room].runs[pool].indices[-1]
        first = both.target.layout.buffers[pool][0]
        both.target.region[first.offset(0, place)] ^= 1
        device.settle()
        both.poll()
        assert isinstance(both.outcomes[0], HandoverFailed)
        assert f"{pool}: pages" in both.outcomes[0].message
        assert both.receiver.damage == {pool: 1}


def test_a6_pages_that_are_being_checked_go_to_nobody_else_although_their_room_has_ended() -> None:
    with late_reader() as (both, device):
        prompt = handed_over(both)
        both.poll()
        granted = both.receiver_rooms[prompt.room].runs["full"].indices
        both.receiver.abort(prompt.room, "nobody wants it any more")
        both.until(lambda: not both.receiver.rooms, "the writer's word")
        allocator = both.target.allocators["full"]
        free = allocator.lease(allocator.free, "somebody else")
        assert not set(free.indices) & set(granted)
        assert both.receiver.checking
        device.settle()
        both.poll()
        assert not both.receiver.checking
        assert set(allocator.lease(allocator.free, "the next").indices) == set(granted)


def test_a_check_that_fails_ends_the_room_and_is_no_damage() -> None:
    with late_reader() as (both, device):
        handed_over(both)
        both.poll()

        def broken(*args: object) -> list[int]:
            raise RuntimeError("a bus error")

        both.target.digesting = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError, match="a bus error"):
            device.settle()
        both.poll()
        assert isinstance(both.outcomes[0], HandoverFailed)
        assert "could not be looked at: a bus error" in both.outcomes[0].message
        assert not both.receiver.damage


def test_the_loop_reads_digests_only_when_the_device_has_taken_them() -> None:
    """On a GPU asking for digests before that would wait for its whole stream of loads."""
    with late_reader() as (both, device):
        begin, read = both.target.digesting, list[str]()

        def digesting(pool: str, *where: Any) -> Callable[[], list[int]]:
            there = begin(pool, *where)

            def digests() -> list[int]:
                assert not device.queued, "the loop waits for the check of what arrived"
                read.append(pool)
                return there()

            return digests

        def waits(*where: Any) -> list[int]:
            raise AssertionError("an operation waits for digests")

        both.target.digesting, both.target.digest = digesting, waits  # type: ignore[method-assign, assignment]
        handed_over(both)
        for _ in range(3):
            both.poll()
        assert not read
        device.settle()
        both.poll()
        assert sorted(read) == sorted(SPEC.by_name)
        assert isinstance(both.outcomes[0], PromptArrived)
        for lease in both.outcomes[0].leases.values():
            lease.release()


@pytest.mark.parametrize("plane", ["shm", "local", "zmq"])
def test_a5_a_damaged_rooms_pages_come_back_when_its_writer_has_stopped_and_not_before(plane: str) -> None:
    """The writer is in the middle of the room: it may store into all of it until it says that it doesn't any more."""
    with ends(SPEC, plane) as both:
        prompt = both.prompt(40)
        leases = both.open(prompt)
        first = {pool: prompt.part(pool, prompt.runs[pool].numbers[:1]) for pool in prompt.runs}
        if plane != "zmq":
            place = leases["full"].indices[0]
            arrived = arrivals_of(both.receiver).begin
            buffer = both.target.layout.buffers["full"][0]

            def damaging(*about: Any) -> Any:
                both.target.region[buffer.offset(0, place)] ^= 1
                return arrived(*about)

            arrivals_of(both.receiver).begin = damaging  # type: ignore[method-assign, assignment]
        else:
            tags = tuple(ContentTag(tag.key, tag.digest ^ 1) for tag in first["full"].tags)
            first["full"] = replace(first["full"], tags=tags)
        both.sender.write(prompt.room, first, ())
        while not both.outcomes:
            both.outcomes += both.receiver.poll()
            both.sender_peers[b"decode-0:1"].writes.flush()
        assert isinstance(both.outcomes[0], HandoverFailed)
        assert both.outcomes[0].kind is ErrorKind.DAMAGED
        revocable = plane == "zmq"
        for _ in range(3):
            both.receiver.poll()
            assert all(lease.live is not revocable for lease in leases.values())
            assert both.receiver.rooms == (0 if revocable else 1)
        both.released(prompt.room)
        both.quiet()
        assert len(both.outcomes) == 1, "it is told once"
