"""What users of systems like this one complain about most, each as a test of the hand-over.

One more of them, a KV reference out of range, is in `test_bad_messages`.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import torch
import zmq

from tests.support.pool_sets import entry, filled, pool_sets
from tests.support.room_ends import PLANES, Ends, Prompt, ends, image
from tests.support.worker_parts import rooms_of, slots_of
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DONE
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.net.zmq_sockets import bind as first_bind
from twinpool.transfer.planes.data_plane import PageWrite, RoomTarget, SlotWrite, WriteLink
from twinpool.transfer.planes.make_plane import make_plane
from twinpool.transfer.planes.tcp import zmq_plane as tcp
from twinpool.transfer.planes.tcp.zmq_link import ZmqLink
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import RoomEnd, fingerprint
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.room_messages import HandoverMetadata, pack
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived, RoomReleased
from twinpool.transfer.rooms.sender.kv_sender import KVSender, _sealed

SPEC = pool_sets()["all"]
OVER_TCP = ("zmq", "staged")


def whole(both: Ends, prompt: Prompt) -> PromptArrived:
    both.sender.write(prompt.room, prompt.all(), (DONE,))
    both.seal(prompt)
    arrived = both.outcome(prompt.room)
    assert isinstance(arrived, PromptArrived), arrived
    return arrived


def say_all(both: Ends, prompt: Prompt, link: WriteLink, target: RoomTarget | None, ticket: int) -> None:
    """Everything that a writer writes and says in a room, past its own books: as one that knows of no end."""
    assert target is not None
    link.post(PageWrite(target, prompt.runs))
    parts = tuple(_sealed(pool, run.first, prompt.tags[pool]) for pool, run in prompt.runs.items())
    link.notify(prompt.room, m.encode_notice(m.PagesWritten(prompt.room, ticket, parts)))
    link.post(SlotWrite(target, pack(HandoverMetadata(prompt.room, 0, 7, None, 0, prompt.positions))))
    link.notify(prompt.room, m.encode_notice(m.SlotWritten(prompt.room, ticket)))


def late_words(both: Ends, count: int) -> None:
    """Until the reader has heard as many messages of rooms that it doesn't have any more."""
    both.until(lambda: both.receiver.late + both.receiver.refused >= count, f"{count} late words")


# ------------------------------------------------------------ already consumed


@pytest.mark.parametrize("plane", PLANES)
def test_state_that_was_consumed_already_never_comes_back_in_another_answer(plane: str) -> None:
    """The complaint: the previous prompt's answer comes back for another one. Its room ends with its hand-over; what is
    said of it again, by a writer that repeats itself word for word, reaches neither its pages nor its slot."""
    with ends(SPEC, plane, slots=1) as both:
        first, second = both.prompt(11), both.prompt(11)
        both.open(first)
        room = both.sender_rooms[first.room]
        target, ticket, link = room.target, room.ticket, both.sender_peers[b"decode-0:1"].link
        arrived = whole(both, first)
        assert arrived.metadata.room == first.room
        assert both.released(first.room).received
        arrived.release()
        with pytest.raises(WireError, match="exists already"):
            both.receiver.open(first.room, next(iter(both.receiver_peers.values())).ref, ExpectedPrompt(first.keys, 11))
        with pytest.raises(WireError, match="exists already"):
            both.sender.open(first.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        # The second gets the same slot, and may well get the same pages.
        leases = both.open(second)
        assert both.sender_rooms[second.room].target is not None
        if plane in OVER_TCP:  # Elsewhere a write has an address, and the writer's books are what stands before it.
            before = image(both.target)
            say_all(both, first, link, target, ticket)
            late_words(both, 2)
            assert image(both.target) == before
        for word in (m.SlotWritten(first.room, ticket), m.SlotWritten(second.room, ticket)):
            link.notify(second.room, m.encode_notice(word))
        late_words(both, 2)
        assert not any(o.room == second.room for o in both.outcomes)
        again = whole(both, second)
        assert again.metadata.room == second.room
        for pool, run in second.runs.items():
            for ours, there in zip(run.indices, leases[pool].indices, strict=True):
                assert entry(both.source, pool, ours) == entry(both.target, pool, there)
        again.release()
        assert sum(o.room == first.room for o in both.outcomes) == 1
        both.quiet()


@pytest.mark.parametrize("plane", PLANES)
def test_metadata_of_the_previous_prompt_in_a_slot_is_never_taken_for_this_ones(plane: str) -> None:
    """The slot is used again, and what lies in it is the last one's, whole and undamaged."""
    with ends(SPEC, plane, slots=1) as both:
        first, second = both.prompt(11), both.prompt(11)
        both.open(first)
        whole(both, first).release()
        both.open(second)
        both.sender.write(second.room, second.all(), (DONE,))
        peer, ticket = both.sender_peers[b"decode-0:1"], both.sender_rooms[second.room].ticket
        peer.writes.settle()
        peer.link.notify(
            second.room, m.encode_notice(m.SlotWritten(second.room, ticket)), 1
        )  # Without having written it.
        broken = both.outcome(second.room)
        assert isinstance(broken, HandoverFailed)
        assert broken.kind is ErrorKind.DAMAGED
        assert f"holds room {first.room}" in broken.message
        both.quiet()


# ------------------------------------------------------------ after the lease


@pytest.mark.parametrize("plane", PLANES)
def test_pages_are_never_decoded_after_their_room_expired(plane: str) -> None:
    """The complaint: decode goes on from pages whose lease had run out while prefill was slow. Everything arrives, to
    the last byte, after the room was given up: nobody adopts it, and it is written to nobody else's pages."""
    with ends(SPEC, plane) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        room = both.sender_rooms[prompt.room]
        target, ticket, link = room.target, room.ticket, both.sender_peers[b"decode-0:1"].link
        both.clock.advance(both.receiver.end.config.room_timeout_s + 1)
        both.outcomes += both.receiver.poll()
        (broken,) = both.outcomes
        assert isinstance(broken, HandoverFailed)
        assert "nothing came for" in broken.message
        taken = {p: a.lease(a.free, "another request") for p, a in both.target.allocators.items()}
        before = {(p, i): entry(both.target, p, i) for p, lease in taken.items() for i in lease.indices}
        revocable = both.receiver_plane.revocable
        assert [lease.live for lease in leases.values()] == [not revocable] * len(leases)
        say_all(both, prompt, link, target, ticket)
        for _ in range(2):
            both.outcomes += both.receiver.poll()
        both.until(lambda: not both.receiver.rooms and not both.sender.rooms, "the end of the room")
        late_words(both, 1 if revocable else 0)
        assert {place: entry(both.target, *place) for place in before} == before
        assert both.outcomes == [broken]
        for lease in taken.values():
            lease.release()
        both.quiet()


# ------------------------------------------------------------ other bytes


@pytest.mark.parametrize("plane", PLANES)
def test_a_transfer_that_delivers_other_bytes_is_damage_and_never_an_answer(plane: str) -> None:
    """The complaint: a transfer ends well, and the bytes are others. One bit, anywhere in any page of any pool."""
    rng = random.Random(7)
    with ends(SPEC, plane, count=200) as both:
        for pool in ("full", "window", "state"):
            prompt = both.prompt(27)
            both.open(prompt)
            buffer = rng.choice(both.source.layout.buffers[pool])
            at = buffer.offset(rng.randrange(buffer.spec.layers), rng.choice(prompt.runs[pool].indices))
            both.source.region[at + rng.randrange(buffer.entry_bytes)] ^= 1 << rng.randrange(8)
            both.sender.write(prompt.room, prompt.all(), (DONE,))
            broken = both.outcome(prompt.room)
            assert isinstance(broken, HandoverFailed)
            assert broken.kind is ErrorKind.DAMAGED
            assert broken.message.startswith(f"{pool}: ")
            assert both.released(prompt.room).damaged
        assert both.receiver.damage == {"full": 1, "window": 1, "state": 1}
        both.until(lambda: not both.receiver.rooms and not both.sender.rooms, "the last room")


# ------------------------------------------------------------ a reader that was started again


Start = Callable[[], KVReceiver]


def _bind_again(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Where another socket was bound until now: it is let go of by a thread of ZMQ's, soon."""
    end = time.monotonic() + 60
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > end:
                raise
            select.poll().poll(10)


@contextmanager
def restarting(plane: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KVSender, Start, Waiter]]:
    """A prefill end, and what starts the next incarnation of a decode worker: over TCP, at the very same endpoint."""
    clock, waiter, bound = ManualClock(), Waiter(), list[str]()
    config = config_from_dict({"transfer": {"plane": plane, "link_timeout_s": 5.0}})
    transport = ZmqControlTransport("127.0.0.1", waiter, None, 5.0)
    mark = fingerprint("a model", SPEC, "invariant:by hand")
    layout = PoolSetLayout(SPEC, SPEC.even(40))

    def bind(socket: zmq.Socket[bytes], host: str, curve: CurveKeys | None) -> str:
        if bound:
            _bind_again(socket, bound[0])
        else:
            bound.append(first_bind(socket, host, curve))
        return bound[0]

    def part(seed: int) -> tuple[Any, PoolSet]:
        its = make_plane(config, "127.0.0.1", None, waiter.wake)
        return its, filled(PoolSet(SPEC, layout.counts, its.allocate("pages", layout.nbytes)), seed)

    source, pools = part(1)
    rest = config.transfer, transport, clock
    writer = KVSender(RoomEnd(WorkerName("prefill-0"), Incarnation(1), mark, source, pools, CpuDevice(), *rest))
    monkeypatch.setattr(tcp, "bind", bind)
    started: list[KVReceiver] = []

    def start() -> KVReceiver:
        if started:
            waiter.remove(started[-1].end.plane.waitable[0])
            started[-1].close()
        its, region = part(2 + len(started))
        number = Incarnation(1 + len(started))
        end = KVReceiver(
            RoomEnd(WorkerName("decode-0"), number, mark, its, region, CpuDevice(), *rest), 4, verify=False
        )
        waiter.add(its.waitable[0])
        started.append(end)
        return end

    try:
        yield writer, start, waiter
    finally:
        writer.close()
        started[-1].close()
        waiter.close()


@pytest.mark.parametrize("plane", ["shm", "zmq", "staged"])
def test_a_decode_worker_that_restarted_is_not_written_to_by_stale_addresses(
    plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complaint: decode comes back at the same address, and prefill goes on writing where the old one had granted
    it. No byte of the new one changes, although nobody verifies here, and the room of the old one ends."""
    with restarting(plane, monkeypatch) as (writer, start, waiter):
        room, expected = RoomId("room-1"), ExpectedPrompt((b"a" * 16, b"b" * 16, b"c" * 16), 12)
        prefill = PeerRef(WorkerName("prefill-0"), Incarnation(1), writer.control)
        old = start()
        writer.open(room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        old.open(room, prefill, expected)
        wanted = old.missing(expected)
        assert old.grant(room, {p: old._pools.allocators[p].lease(len(n), room) for p, n in wanted.items()})
        while not writer.granted(room):
            writer.poll()
            old.poll()
            waiter.wait(0.01)
        stale = rooms_of(writer)[room]
        assert stale.peer is not None
        assert stale.target is not None
        new = start()
        before, slots = image(new._pools), slots_of(new).clone()
        if plane in OVER_TCP:
            # What is sent while the old connection ends may be lost with it: only the next one is of interest here.
            ended = False
            while not (ended and stale.peer.link.up):
                ended = stale.peer.link.cut() or ended
                waiter.wait(0.01)
        stale.peer.link.post(PageWrite(stale.target, stale.target.runs))
        stale.peer.link.post(SlotWrite(stale.target, b"\1" * 100))
        stale.peer.link.notify(room, m.encode_notice(m.SlotWritten(room, stale.ticket)))
        while plane in OVER_TCP and (new._plane.dropped, new.late) < (1, 1):
            # Slot and notice come: the connection was made again by itself. Pages don't: it has another secret.
            assert new.poll() == []
            waiter.wait(0.01)
        # The new one meets the writer, which then knows that the old one is gone.
        new.open(RoomId("room-2"), prefill, expected)
        reasons: list[str] = []
        while "decode-0 is now incarnation 2" not in reasons:
            reasons += [o.reason for o in writer.poll() if isinstance(o, RoomReleased)]
            assert new.poll() == []
            waiter.wait(0.01)
        assert image(new._pools) == before
        assert torch.equal(slots_of(new), slots)
        assert room not in rooms_of(writer)


def test_a_frame_for_the_reader_that_was_here_before_is_dropped() -> None:
    """What a connection that came back by itself still had to send, with a room and a ticket of the old one's."""
    with ends(SPEC, "zmq") as both:
        prompt = both.prompt(11)
        both.open(prompt)
        room = both.sender_rooms[prompt.room]
        before = image(both.target)
        link = both.sender_peers[b"decode-0:1"].link
        head = msgpack.packb((prompt.room, room.ticket + 1, [("full", 0, 1)], 0, 1, 1))
        assert isinstance(link, ZmqLink)
        link._socket.send_multipart([b"P", head, b"\1" * SPEC.unit_bytes("full")])
        both.until(lambda: both.receiver_plane.dropped, "the drop")
        assert image(both.target) == before
        whole(both, prompt).release()
        both.quiet()


# ------------------------------------------------------------ an aborted prefill


@pytest.mark.parametrize("written", [0, 3, 7], ids=["nothing", "some of it", "all but the metadata"])
@pytest.mark.parametrize("plane", PLANES)
def test_an_aborted_prefill_answers_nothing(plane: str, written: int) -> None:
    """The complaint: prefill was aborted half way, and decode answers from what had come by then. Whatever a writer
    still writes and says behind its own end, right or not, becomes no answer."""
    with ends(SPEC, plane) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        room = both.sender_rooms[prompt.room]
        ticket, link = room.ticket, both.sender_peers[b"decode-0:1"].link
        if written:
            rest = {} if written < 7 else {p: prompt.part(p) for p in ("window", "state")}
            both.sender.write(prompt.room, {"full": prompt.part("full", range(written)), **rest}, (DONE,))
        both.sender.fail(prompt.room, ErrorKind.CANCELLED, "aborted")
        both.sender_peers[b"decode-0:1"].writes.settle()
        for word in (m.SlotWritten(prompt.room, ticket), m.NothingToDecode(prompt.room, ticket)):
            link.notify(prompt.room, m.encode_notice(word))
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert broken.kind is ErrorKind.CANCELLED
        late_words(both, 2)
        assert both.outcomes == [broken]
        assert not any(lease.live for lease in leases.values())
        with pytest.raises(KeyError):
            both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.quiet()
