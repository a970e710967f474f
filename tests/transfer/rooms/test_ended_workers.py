"""What a worker that has ended for the controller held comes back where its access is ended, and nowhere by its word
alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, ends, image, simulated_ends
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DONE
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.worker_status import EndedWorker
from twinpool.sim.fabric.sim_plane import SimPlane
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.transfer.net import process_watch
from twinpool.transfer.rooms.peers import EndedWorkers
from twinpool.transfer.rooms.room_states import HandoverFailed

SPEC = pool_sets()["all"]
HERE, ELSEWHERE = ("node-0", "node-0"), ("node-1", "node-0")
WRITER, READER = WorkerName("prefill-0"), WorkerName("decode-0")


def ended(name: WorkerName, incarnation: int = 1, closed_from: int = 0) -> list[EndedWorker]:
    return [EndedWorker(name, Incarnation(incarnation), Incarnation(closed_from))]


@contextmanager
def stopped_in_mid_write(
    plane: str, nodes: tuple[str, str]
) -> Iterator[tuple[Ends, Prompt, dict[str, Lease], SimProcess]]:
    """A writer that stands still with half of a room's pages written, and whose reader has given the room up."""
    with simulated_ends(SPEC, plane, seed=3, count=64, slots=4, device=CpuDevice(), nodes=nodes) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        writer = both.sender_plane
        assert isinstance(writer, SimPlane)
        both.sender.write(prompt.room, prompt.all(), ())
        writer.process.stop()
        both.receiver.abort(prompt.room, "cancelled")
        both.clock.advance(10_000)
        both.receiver.poll()
        yield both, prompt, leases, writer.process


def live(leases: dict[str, Lease]) -> bool:
    (held,) = {lease.live for lease in leases.values()}
    return held


def test_a5_quarantine_of_a_writer_on_another_host_ends_by_the_controllers_word_and_nothing_of_it_lands_then() -> None:
    with stopped_in_mid_write("nixl", ELSEWHERE) as (both, _, leases, writer):
        assert live(leases)
        both.receiver.workers_ended(ended(WRITER))
        both.receiver.poll()
        assert not live(leases)
        before = image(both.target)
        writer.go_on()
        both.waiter.wait(0.1)
        assert image(both.target) == before


@pytest.mark.parametrize("plane", ["nixl", "shm"])
def test_a5_a_writer_of_this_host_is_proven_dead_by_its_process_and_not_by_the_controllers_word(plane: str) -> None:
    with stopped_in_mid_write(plane, HERE) as (both, _, leases, writer):
        both.receiver.workers_ended(ended(WRITER))
        both.receiver.poll()
        assert live(leases), "its lease is over, and it may store the rest as soon as it goes on"
        writer.die()
        both.receiver.poll()
        assert not live(leases)


@pytest.mark.parametrize("plane", ["zmq", "nixl", "shm"])
def test_a_writer_of_this_host_that_has_closed_is_forgotten_though_its_process_lives(plane: str) -> None:
    """It has said that it holds nothing any more: its process goes on as another worker."""
    with simulated_ends(SPEC, plane, seed=3, count=64, slots=4, device=CpuDevice(), nodes=HERE) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        both.receiver.workers_ended(ended(WRITER, 3, closed_from=2))
        both.outcomes += both.receiver.poll()
        assert live(leases), "incarnation 1 was another process"
        both.receiver.workers_ended(ended(WRITER, 4, closed_from=1))
        both.outcomes += both.receiver.poll()
        (outcome,) = both.outcomes
        assert isinstance(outcome, HandoverFailed)
        assert not live(leases)


def test_a_reader_of_this_host_that_has_closed_is_forgotten_though_its_process_lives() -> None:
    with simulated_ends(SPEC, "shm", seed=3, count=64, slots=4, device=CpuDevice(), nodes=HERE) as both:
        prompt = both.prompt(27)
        both.open(prompt)
        both.sender.poll()
        assert len(both.sender_peers) == 1
        both.sender.workers_ended(ended(READER))
        both.sender.poll()
        assert len(both.sender_peers) == 1, "its process lives, and has said nothing"
        both.sender.workers_ended(ended(READER, 1, closed_from=1))
        both.sender.poll()
        assert not both.sender_peers
        for lease in prompt.leases.values():
            lease.release()


@pytest.mark.parametrize("plane", ["zmq", "nixl"])
def test_rooms_of_a_writer_that_has_ended_fail_at_once(plane: str) -> None:
    with simulated_ends(SPEC, plane, seed=3, count=64, slots=4, device=CpuDevice(), nodes=ELSEWHERE) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        both.receiver.workers_ended(ended(WRITER, 2))
        both.outcomes += both.receiver.poll()
        (outcome,) = both.outcomes
        assert isinstance(outcome, HandoverFailed)
        assert outcome.message == "prefill-0, incarnation 1, has ended, as the controller says"
        assert not live(leases)


def test_rooms_of_a_reader_that_has_ended_end_at_the_writer() -> None:
    with simulated_ends(SPEC, "nixl", seed=3, count=64, slots=4, device=CpuDevice(), nodes=ELSEWHERE) as both:
        prompt = both.prompt(27)
        both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, (DONE,))
        both.sender.workers_ended(ended(READER))
        assert "has ended" in both.released(prompt.room).reason
        for lease in prompt.leases.values():
            lease.release()
        assert not any(allocator.quarantined for allocator in both.source.allocators.values())


def test_incarnations_after_the_one_that_has_ended_go_on() -> None:
    known = EndedWorkers()
    known.update(ended(WRITER, 3))
    known.update(ended(WRITER, 2))
    assert [known.covers(WRITER, Incarnation(n)) for n in (1, 3, 4)] == [True, True, False]
    assert not known.covers(READER, Incarnation(1))


def test_only_what_one_process_has_closed_counts_as_closed() -> None:
    known = EndedWorkers()
    known.update(ended(WRITER, 4, closed_from=3))
    known.update(ended(WRITER, 2, closed_from=1))
    known.update(ended(WRITER, 6))
    assert [known.closed(WRITER, Incarnation(n)) for n in (2, 3, 4, 5, 6)] == [False, True, True, False, False]
    assert known.covers(WRITER, Incarnation(6))


def test_a5_over_nixl_itself_nothing_of_a_writer_elsewhere_lands_after_the_controllers_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over UCX's TCP, between processes that can't watch each other."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ends(SPEC, "nixl") as both:
        pid, started, _ = process_watch.mine()
        monkeypatch.setattr(process_watch, "mine", lambda: (pid, started, "another boot/pid:[1]"))
        prompt = both.prompt(27)
        leases = both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, ())
        (peer,) = both.sender_peers.values()
        both.until(lambda: not len(peer.writes), "the first write")
        both.receiver.abort(prompt.room, "cancelled")
        assert live(leases), "the writer has not heard of it"
        both.receiver.workers_ended(ended(WRITER))
        both.receiver.poll()
        assert not live(leases)
        before = image(both.target)
        both.sender.write(prompt.room, prompt.all(), ())
        while len(peer.writes):
            peer.writes.flush()
        assert peer.writes.failed(prompt.room)
        assert image(both.target) == before
