"""A peer that dies takes its rooms with it: by the proof of its death, not by a message, and not by a timeout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import ends
from tests.support.stand_in_ranks import headed_sets
from twinpool.cache.device.device_port import DONE
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed

SPEC = pool_sets()["all"]


@pytest.fixture
def stand_in() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing but live, to be taken for a worker's."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def identity_of(child: subprocess.Popen[bytes]) -> tuple[int, int, str]:
    return child.pid, process.start_ticks(child.pid) or 0, process.namespace()


@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "nixl", "staged"])
def test_b10_a_dead_peers_leases_end_by_revocation(
    plane: str, stand_in: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's leases of every pool end with the writer's process; while it lives, given up or not, they don't."""
    with ends(SPEC, plane) as both:
        prompt, other = both.prompt(27), both.prompt(12)
        peer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
        both.receiver.open(prompt.room, peer, ExpectedPrompt(prompt.keys, 27))
        monkeypatch.setattr(process, "mine", lambda: identity_of(stand_in))
        both.until(lambda: both.sender_peers, "hello")
        leases = both.open(other)
        both.sender.write(other.room, {"full": other.part("full")}, (DONE,))
        both.receiver.abort(other.room, "cancelled")
        revocable = both.receiver_plane.revocable
        assert both.receiver.poll() == []
        assert [lease.live for lease in leases.values()] == [not revocable] * 3
        both.clock.advance(10_000)
        assert both.receiver.poll() == []
        assert both.receiver.rooms == (1 if revocable else 2)
        stand_in.kill()
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert "died" in broken.message
        assert not any(o.room == other.room for o in both.outcomes)
        assert not any(lease.live for lease in leases.values())
        assert both.receiver.rooms == 0
        for allocator in both.target.allocators.values():
            assert allocator.free == allocator.total


@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "nixl", "staged"])
def test_b10_a_dead_readers_rooms_end_at_the_writer_and_nothing_stays_pinned(
    plane: str, stand_in: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends(SPEC, plane) as both:
        prompt = both.prompt(27)
        monkeypatch.setattr(process, "mine", lambda: identity_of(stand_in))
        both.open(prompt)
        both.sender.write(prompt.room, {"window": prompt.part("window")}, (DONE,))
        stand_in.kill()
        assert both.released(prompt.room).reason == "decode-0 died"
        assert both.sender.rooms == 0
        for pool, lease in prompt.leases.items():
            lease.release()
            assert both.source.allocators[pool].quarantined == 0
        assert both.sender.check() == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("plane", ["nixl", "staged"])
def test_b10_a_dead_writers_leases_end_on_every_rank_of_both(
    plane: str, ranks: tuple[int, int], stand_in: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends(headed_sets()["all"], plane, ranks=ranks) as both:
        prompt = both.prompt(27)
        monkeypatch.setattr(process, "mine", lambda: identity_of(stand_in))
        leases = both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full")}, (DONE,))
        (peer,) = both.sender_peers.values()
        both.until(lambda: not len(peer.writes), "the write")
        both.receiver.abort(prompt.room, "cancelled")
        assert [lease.live for lease in leases.values()] == [not both.receiver_plane.revocable] * 3
        stand_in.kill()
        both.until(lambda: not any(lease.live for lease in leases.values()), "its end")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("plane", ["nixl", "staged"])
def test_b10_a_dead_readers_rooms_end_at_every_rank_of_the_writer(
    plane: str, ranks: tuple[int, int], stand_in: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends(headed_sets()["all"], plane, ranks=ranks) as both:
        prompt = both.prompt(27)
        monkeypatch.setattr(process, "mine", lambda: identity_of(stand_in))
        both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full")}, (DONE,))
        stand_in.kill()
        assert both.released(prompt.room).reason == "decode-0 died"
        for pool, lease in prompt.leases.items():
            lease.release()
            assert both.source.allocators[pool].quarantined == 0
