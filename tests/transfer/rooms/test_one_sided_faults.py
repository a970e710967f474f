"""One-sided writes that fail, are cut off or are overtaken, and what a living writer of this host may still store.

Over the simulator's plane, whose writes can be told what befalls them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, image, placed, simulated_ends
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.pool.page_allocator import Lease
from twinpool.sim.fabric.plane_faults import StoreFault, StoreFaults
from twinpool.sim.fabric.sim_plane import SimPlane
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]
HERE, ELSEWHERE = ("node-0", "node-0"), ("node-1", "node-0")


@contextmanager
def befalling(*due: StoreFault | None, nodes: tuple[str, str] = HERE) -> Iterator[Ends]:
    """Ends whose writer's next writes meet these faults, and later ones none."""
    faults = StoreFaults(random.Random(1), 0.0)
    faults.due.extend(due)
    with simulated_ends(
        SPEC, "nixl", seed=3, count=64, slots=4, device=CpuDevice(), store_faults=faults, nodes=nodes
    ) as both:
        yield both


def process(both: Ends) -> SimProcess:
    plane = both.sender_plane
    assert isinstance(plane, SimPlane)
    return plane.process


def write(both: Ends, prompt: Prompt) -> None:
    both.sender.write(prompt.room, prompt.all(), ())


def arrives(both: Ends, prompt: Prompt, leases: dict[str, Lease]) -> None:
    """Seal a prompt of which all was written: it comes to be whole, in its places."""
    both.seal(prompt)
    arrived = both.outcome(prompt.room)
    assert isinstance(arrived, PromptArrived)
    placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})
    arrived.release()
    both.quiet()


def live(leases: dict[str, Lease]) -> bool:
    """Whether a room still has its pages: all of them, or none."""
    (held,) = {lease.live for lease in leases.values()}
    return held


@contextmanager
def one_failed_and_one_in_mid_write(
    nodes: tuple[str, str],
) -> Iterator[tuple[Ends, dict[str, Lease], dict[str, Lease]]]:
    """Two rooms of one writer, as the reader has heard of the first one's failure: the writer stands still, with half
    of the second one's pages written."""
    with befalling(StoreFault.FAILED, nodes=nodes) as both:
        failed, other = both.prompt(27), both.prompt(27)
        leases = both.open(failed), both.open(other)
        write(both, failed)
        both.sender.poll()
        assert both.sender.granted(other.room), "of it nothing was sent"
        write(both, other)
        process(both).stop()
        both.until(lambda: not live(leases[0]), "the end of the room whose write failed")
        yield both, *leases


def test_a5_a_write_that_failed_gives_no_pages_back_of_other_rooms_of_a_living_writer_of_this_host() -> None:
    with one_failed_and_one_in_mid_write(HERE) as (both, _, other):
        assert live(other), "its writer stores without this end's help, whatever access was ended"
        rest = {pool: a.lease(a.free, "somebody else") for pool, a in both.target.allocators.items()}
        before = image(both.target)
        process(both).go_on()
        both.waiter.wait(0.1)
        after = image(both.target)
        changed = {at for at in before if before[at] != after[at]}
        assert changed, "the rest of the write has landed"
        assert changed <= {(pool, index) for pool, lease in other.items() for index in lease.indices}
        both.until(lambda: not live(other), "the writer's word about the other room")
        for lease in rest.values():
            lease.release()
        both.quiet()


def test_a5_ending_a_writers_access_ends_all_its_rooms_where_it_is_on_another_host() -> None:
    with one_failed_and_one_in_mid_write(ELSEWHERE) as (both, _, other):
        assert not live(other), "it has no other way into this memory"
        before = image(both.target)
        process(both).go_on()
        both.waiter.wait(0.1)
        assert image(both.target) == before
        both.quiet()


@pytest.mark.parametrize("nodes", [HERE, ELSEWHERE])
def test_a_room_that_comes_after_a_failed_write_has_access_of_its_own(nodes: tuple[str, str]) -> None:
    """Late words about rooms of the access before don't end it."""
    with one_failed_and_one_in_mid_write(nodes) as (both, _, other):
        prompt = both.prompt(27)
        granted = both.start(prompt)
        both.until(lambda: not live(other), "the end of the other room, whose write fails as its link is severed")
        process(both).go_on()
        both.until(lambda: both.sender.granted(prompt.room), "the grant")
        write(both, prompt)
        arrives(both, prompt, granted)


@pytest.mark.parametrize("fault", [StoreFault.FAILED, StoreFault.TRUNCATED])
@pytest.mark.parametrize("nodes", [HERE, ELSEWHERE])
def test_a_write_that_did_not_come_whole_is_never_announced(fault: StoreFault, nodes: tuple[str, str]) -> None:
    with befalling(None, fault, nodes=nodes) as both:
        prompt = both.prompt(27)
        both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, ())
        write(both, prompt)
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert not both.receiver.damage
        both.quiet()


def test_a_write_that_is_overtaken_is_announced_once_it_has_landed() -> None:
    with befalling(StoreFault.REORDERED) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, ())
        write(both, prompt)
        arrives(both, prompt, leases)
