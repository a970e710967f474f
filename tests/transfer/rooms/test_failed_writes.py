"""A write that came to nothing is never announced, and holds up nobody but the room that it was of."""

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
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DeviceOp, DeviceStream
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.errors import ErrorKind, PeerDead, WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived
from twinpool.transfer.rooms.sender import write_queue

SPEC = pool_sets()["full"]


def broken_pass() -> None:
    raise RuntimeError("CUDA error: the forward pass failed")


@contextmanager
def failing(plane: str, verify: bool) -> Iterator[tuple[Ends, Prompt, dict[str, Lease]]]:
    """A room whose second write comes after a step that fails."""
    device = AdversarialDevice(1, stray=0.0)
    with ends(SPEC, plane, device=device) as both:
        arrivals_of(both.receiver)._verify = verify
        prompt = both.prompt(24)
        leases = both.open(prompt)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, ())
        step = device.submit(DeviceOp("forward", DeviceStream.COMPUTE), broken_pass)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2, 6))}, (step,))
        yield both, prompt, leases


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "staged"])
def test_a_send_that_failed_is_never_announced_as_written(plane: str, verify: bool) -> None:
    """Nor is it called damage: no byte of it went wrong."""
    with failing(plane, verify) as (both, prompt, leases):
        both.seal(prompt)
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert outcome.kind is ErrorKind.WORKER
        assert "the forward pass failed" in outcome.message
        assert not both.receiver.damage
        assert not both.released(prompt.room).received
        assert not any(lease.live for lease in leases.values())
        assert not any(a.quarantined for a in both.source.allocators.values()), "its pins are back"
        both.quiet()


def test_a_room_with_a_failed_send_is_not_sealed_once_that_is_known() -> None:
    with failing("shm", True) as (both, prompt, _):
        while not both.sender_rooms[prompt.room].failed:
            both.sender_peers[b"decode-0:1"].writes.flush()
        with pytest.raises(WireError, match="can't be sealed: a write to decode-0 failed: CUDA error"):
            both.seal(prompt)
        both.sender.write(prompt.room, prompt.all(), ())
        assert isinstance(both.outcome(prompt.room), HandoverFailed)
        both.quiet()


def test_a_room_that_cant_be_revoked_can_be_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of the receiver is gone in the middle of a room's end: the worker ends, and closes what it has."""
    with ends(SPEC, "zmq") as both:
        prompt = both.prompt(24)
        leases = both.open(prompt)
        plane = both.receiver_plane
        revoke, refusals = plane.revoke, [PeerDead("rank 1 of this worker can't be reached")]

        def refuse_once(room: RoomId) -> None:
            if refusals:
                raise refusals.pop()
            revoke(room)

        monkeypatch.setattr(plane, "revoke", refuse_once)
        with pytest.raises(PeerDead):
            both.receiver.abort(prompt.room, "the worker closes")
        assert all(lease.live for lease in leases.values())
        both.receiver.abort(prompt.room, "the worker closes")
        assert not any(lease.live for lease in leases.values())
        assert not both.receiver.rooms
        both.quiet()


def test_a_device_that_fails_at_once_ends_the_room_and_not_the_worker() -> None:
    class Refusing(CpuDevice):
        def submit(self, op: DeviceOp, run: Callable[[], object], *args: Any, **options: Any) -> Any:
            raise RuntimeError("out of resources")

    with ends(SPEC, "shm", device=Refusing()) as both:
        prompt = both.prompt(24)
        both.open(prompt)
        both.sender.write(prompt.room, prompt.all(), ())
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert "out of resources" in outcome.message
        both.quiet()


class Held:
    """A completion that is over when a test says so."""

    def __init__(self) -> None:
        self.done = False
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1
        self.done = True

    order = wait


class SlowLink:
    """A reader's link whose writes take as long as a test likes."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.completion = Held()

    def post(self, write: Any) -> Held:
        self._link.post(write)
        return self.completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


@contextmanager
def two_readers() -> Iterator[tuple[Ends, Prompt, Prompt, SlowLink]]:
    """A room of decode-0, whose link is slow, and one of decode-9, whose link isn't; both at one receiver."""
    with ends(SPEC, "shm") as both:
        slow, quick = both.prompt(24), both.prompt(24)
        both.open(slow)
        peer = both.sender_peers[b"decode-0:1"]
        link = SlowLink(peer.link)
        peer.writes._link = link
        both.sender.write(slow.room, slow.all(), ())
        both.seal(slow)
        both.receiver_peers._end = replace(both.receiver.end, name=WorkerName("decode-9"))
        former = list(both.receiver_peers.values())
        both.receiver_peers._peers.clear()
        try:
            both.start(quick, wants=PeerRef(WorkerName("decode-9"), Incarnation(1), ""))
            both.until(lambda: both.sender.granted(quick.room), "the grant")
            yield both, slow, quick, link
        finally:
            for reached in former:
                reached.channel.close()


def test_one_slow_peer_holds_up_nobody_else() -> None:
    with two_readers() as (both, slow, quick, link):
        both.sender.write(quick.room, quick.all(), ())
        both.seal(quick)
        arrived = both.outcome(quick.room)
        assert isinstance(arrived, PromptArrived)
        assert not link.completion.done
        assert not link.completion.waited, "nobody waited for it"
        assert not any(o.room == slow.room for o in both.outcomes)
        arrived.release()
        link.completion.done = True
        other = both.outcome(slow.room)
        assert isinstance(other, PromptArrived)
        other.release()


def test_a5_a_last_word_follows_the_writes_before_it_and_waits_for_them_without_blocking() -> None:
    with two_readers() as (both, slow, _, link):
        both.sender.fail(slow.room, ErrorKind.CANCELLED, "enough")
        for _ in range(20):
            both.poll()
        assert not any(o.room == slow.room for o in both.outcomes), "its pages are still being written"
        assert both.receiver_rooms[slow.room].leases
        assert not link.completion.waited
        assert both.sender.next_deadline is not None
        link.completion.done = True
        assert isinstance(both.outcome(slow.room), HandoverFailed)


def test_writes_under_way_to_one_peer_are_bounded_and_cost_only_its_own_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "_QUEUED", 3)
    with two_readers() as (both, slow, quick, link):
        more = both.prompt(24)
        both.receiver_peers._end = replace(both.receiver.end, name=WorkerName("decode-0"))
        peer = both.sender_peers[b"decode-0:1"]
        both.sender.open(more.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        grant = both.sender_rooms[slow.room].grant
        assert grant is not None
        both.sender_rooms[more.room].peer = peer
        both.sender_rooms.grant(both.sender_rooms[more.room], peer, type(grant)(more.room, grant.places, 2, 0, 99))
        both.sender.write(more.room, {"full": more.part("full", range(1))}, ())
        assert len(peer.writes) == 3
        both.sender.write(more.room, {"full": more.part("full", range(1, 2))}, ())
        assert len(peer.writes) == 3
        assert "under way already" in both.released(more.room).reason
        both.sender.write(quick.room, quick.all(), ())
        both.seal(quick)
        assert isinstance(both.outcome(quick.room), PromptArrived)
        link.completion.done = True
