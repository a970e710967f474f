"""What peers and strangers send is taken in by bounds: frames, polls, early grants, peers, unread answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import pytest
import torch
import zmq

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, ends, image
from tests.support.worker_parts import inbox_of
from twinpool.cache.device.device_port import DONE
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.planes import one_sided
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageNumbers, RoomTarget
from twinpool.transfer.planes.one_sided import MAX_HELD, OrderedNotices
from twinpool.transfer.planes.tcp import zmq_plane as tcp
from twinpool.transfer.planes.tcp.zmq_link import ZmqLink
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived
from twinpool.transfer.rooms.sender import sender_peers as early

SPEC = pool_sets()["all"]
FULL = pool_sets()["full"]


@contextmanager
def calling(endpoint: str, kind: int = zmq.PUSH) -> Iterator[zmq.Socket[bytes]]:
    """A stranger's socket."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close(linger=0)


def data_endpoint(both: Ends) -> str:
    return str(both.receiver_plane.describe()["ranks"][0]["endpoint"])


def bounds_of(socket: zmq.Socket[bytes]) -> tuple[int, int]:
    return int(socket.get(zmq.MAXMSGSIZE)), int(socket.get(zmq.RCVHWM))


def test_no_socket_between_workers_takes_in_frames_without_bound() -> None:
    """Every one that somebody else sends to: the longest frame, and how many wait, are bounded and configured."""
    control, frame = 70_000, 90_000
    for plane in ("shm", "zmq"):
        sizes = {"plane": plane, "control_frame_bytes": control, "frame_bytes": frame}
        with ends(SPEC, plane, transfer=sizes) as both:
            prompt = both.prompt(4)
            both.open(prompt)
            (peer,) = both.receiver_peers.values()
            sockets: list[tuple[Any, int]] = [
                (inbox_of(both.sender)._socket, control),
                (peer.channel._socket, control),  # type: ignore[attr-defined]
                (both.receiver_plane.waitable[0], control),
            ]
            for socket, most in sockets:
                longest, waiting = bounds_of(socket)
                assert longest == most
                assert 0 < waiting <= 1000
            assert inbox_of(both.sender)._socket.get(zmq.SNDHWM) > 0, "answers that nobody reads"
            both.receiver.abort(prompt.room, "enough")
            both.quiet()


@pytest.mark.parametrize("plane", ["shm", "zmq", "staged"])
def test_a_strangers_long_frame_is_not_taken_in_and_cuts_off_only_the_stranger(plane: str) -> None:
    sizes = {"plane": plane, "control_frame_bytes": 50_000, "frame_bytes": 50_000}
    with ends(SPEC, plane, transfer=sizes) as both:
        prompt = both.prompt(11)
        both.open(prompt)
        before = image(both.target)
        with calling(both.sender.control, zmq.DEALER) as control, calling(data_endpoint(both)) as data:
            cut = {s: s.get_monitor_socket(zmq.EVENT_DISCONNECTED) for s in (control, data)}
            control.send(bytes(50_001))
            data.send(bytes(50_001))
            both.until(lambda: all(monitor.poll(0) for monitor in cut.values()), "both to be cut off")
            for socket in cut:
                socket.disable_monitor()
        assert image(both.target) == before
        assert both.sender.refused == both.receiver.refused == 0, "nobody has seen it"
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        both.quiet()


def test_writes_longer_than_the_readers_frames_are_split_and_arrive_whole() -> None:
    page = SPEC.unit_bytes("full")
    with ends(SPEC, "zmq") as both:
        prompt = both.prompt(120)
        leases = both.open(prompt)
        link = both.sender_peers[b"decode-0:1"].link
        assert link.frame_bytes == both.receiver_plane.describe()["ranks"][0]["frame_bytes"]
        link.frame_bytes = 5 * page + 1
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        assert both.sender_rooms[prompt.room].writes == 6
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        assert isinstance(link, ZmqLink)
        assert link.sent.writes == 6
        assert link.sent.nbytes == sum(arrived.received.values())
        assert not both.receiver_plane.dropped
        assert arrived.received["full"] == page * len(leases["full"])
        arrived.release()
        both.quiet()


def test_a_page_that_is_longer_than_the_configured_frame_is_taken_in_all_the_same() -> None:
    plane = ZmqPlane(TransferConfig("zmq", frame_bytes=10), FaultsConfig(), "127.0.0.1", None)
    plane.register(PoolSet(SPEC, SPEC.even(3)), None)
    (mine,) = plane.describe()["ranks"]
    assert mine["frame_bytes"] == max(SPEC.unit_bytes(pool.name) for pool in SPEC.pools)
    for wrong, why in (
        ({"frame_bytes": "many"}, "must be of type int"),
        ({"frame_bytes": 10}, "takes frames of 10 bytes, one page has"),
        ({"pages": "tcp://127.0.0.1:70000"}, "pages must go to tcp://HOST:PORT"),
        ({"pages": "ipc://here"}, "pages must go to tcp://HOST:PORT"),
        ({"secret": b"short"}, "secret must have 32 bytes, got 5"),
    ):
        with pytest.raises(LayoutMismatch, match=why):
            plane._link({**mine, **wrong}, SPEC, None)
    plane.close()


def test_one_poll_of_a_plane_takes_in_a_bounded_number_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of garbage keeps nobody in `poll`: what was dropped counts, too."""
    monkeypatch.setattr(tcp, "AT_ONCE", 7)
    monkeypatch.setattr(one_sided, "AT_ONCE", 7)
    for plane in ("shm", "zmq"):
        with ends(SPEC, plane) as both, calling(data_endpoint(both)) as stranger:
            for _ in range(30):
                stranger.send(b"\xc1")
            seen: list[int] = []

            def more(both: Ends = both, seen: list[int] = seen) -> bool:
                before = both.receiver_plane.dropped
                both.receiver.poll()
                seen.append(both.receiver_plane.dropped - before)
                return sum(seen) >= 30

            while not more():
                both.waiter.wait(0.01)
            assert max(seen) <= 7
            assert sum(seen) == 30


def test_one_poll_of_control_messages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.transfer.net.zmq_channel._AT_ONCE", 5)
    with ends(SPEC, "shm") as both, calling(both.sender.control, zmq.DEALER) as stranger:
        for _ in range(23):
            stranger.send(b"\xc1")
        seen = [0]
        while seen[-1] < 23:
            both.waiter.wait(0.01)
            both.sender.poll()
            seen.append(both.sender.refused)
        assert max(after - before for before, after in pairwise(seen)) <= 5


@pytest.mark.parametrize("size", [SLOT_BYTES + 1, 2 * SLOT_BYTES, 0])
def test_a_metadata_frame_of_another_size_than_a_slot_takes_is_dropped(size: int) -> None:
    plane = ZmqPlane(TransferConfig("zmq"), FaultsConfig(), "127.0.0.1", None)
    slots = torch.zeros(3, SLOT_BYTES, dtype=torch.uint8)
    plane.register(PoolSet(SPEC, SPEC.even(9)), slots)
    plane.permit(RoomTarget(RoomId("r"), {"full": PageNumbers(0, (5,))}, 1, 77))
    with pytest.raises(ValueError, match="bytes"):
        plane._heard([b"S", msgpack.packb(("r", 77)), b"\1" * size])
    assert not slots.any()
    assert plane._heard([b"S", msgpack.packb(("r", 77)), b"\1" * SLOT_BYTES]) == []
    assert slots[1].all()
    assert not slots[0].any()
    assert not slots[2].any()
    plane.close()


def test_notices_that_wait_for_writes_are_bounded() -> None:
    held = OrderedNotices(2, lambda sources, rank: frozenset({0, 1}))
    held.open(RoomId("r"))
    for _ in range(MAX_HELD):
        assert held.add(RoomId("r"), b"n", 9, 2) == []
    with pytest.raises(ValueError, match="holds 4096 notices already"):
        held.add(RoomId("r"), b"n", 9, 2)


def test_writes_that_came_before_an_earlier_one_are_counted_up_to_a_bound_and_no_further() -> None:
    """A writer has no more under way: what is beyond would be kept for ever."""
    held, room = OrderedNotices(1, lambda sources, rank: frozenset({0})), RoomId("r")
    held.open(room)
    for number in (*range(2, MAX_HELD + 1), MAX_HELD + 1, 0, -1):
        held.settled(0, room, 0, number)
    assert held.add(room, b"last", MAX_HELD, 1) == []
    held.settled(0, room, 0, 1)
    assert held.due() == [b"last"], "the last write within the bound has counted"
    assert held.add(room, b"beyond", MAX_HELD + 1, 1) == [], "the one beyond it has not"
    held.settled(0, room, 0, MAX_HELD + 1)
    assert held.due() == [b"beyond"], "now it is the next one"
    for _ in range(2):
        held.settled(0, room, 0, 7)
    assert held.add(room, b"again", MAX_HELD + 2, 1) == [], "a write that is told of twice is one"
    assert not any(held._rooms[room].ahead.values()), "nor is it kept for later"


# ------------------------------------------------------------ what a writer keeps for later


def early_grants(both: Ends, rooms: list[str], pages: int = 1) -> None:
    (peer,) = both.receiver_peers.values()
    for number, room in enumerate(rooms):
        place = m.GrantedPages("full", 0, tuple(range(1, 1 + pages)), (0,) * pages)
        peer.channel.send(m.encode(m.PageGrant(RoomId(room), (place,), 0, 0, 100 + number)))


@contextmanager
def one_that_knows_nothing() -> Iterator[Ends]:
    with ends(FULL, "shm") as both:
        prompt = both.prompt(4)
        both.open(prompt)
        both.receiver.abort(prompt.room, "only to meet")
        both.until(lambda: not both.receiver.rooms, "the end of it")
        yield both


def failed_rooms(both: Ends) -> list[tuple[str, int]]:
    """Rooms, with their tickets, that the writer has given up by itself."""
    out: list[tuple[str, int]] = []
    for data in both.receiver_plane.poll():
        word = m.decode_notice(data)
        if isinstance(word, m.RoomFailed):
            assert "keeps no more early grants" in word.message
            out.append((word.room, word.ticket))
    return out


@pytest.mark.parametrize("bound", ["grants", "places"])
def test_early_grants_of_one_peer_are_bounded_and_the_oldest_are_failed_with_a_word(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "_EARLY" if bound == "grants" else "_EARLY_PLACES", 4 if bound == "grants" else 12)
    with one_that_knows_nothing() as both:
        rooms = [f"early-{n}" for n in range(9)]
        early_grants(both, rooms, pages=3)
        (reader,) = both.sender_peers.values()
        failed: list[tuple[str, int]] = []
        while len(failed) < 5:
            both.sender.poll()
            failed += failed_rooms(both)
            both.waiter.wait(0.01)
        assert failed == [(room, 100 + n) for n, room in enumerate(rooms[:5])]
        assert list(reader.early.grants) == rooms[5:]
        assert reader.early.places == 12
        both.sender.open(RoomId(rooms[6]), PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        assert both.sender.granted(RoomId(rooms[6]))
        assert reader.early.places == 9
        assert both.sender.check() == []


def test_rooms_given_up_before_their_requests_came_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "_EARLY", 4)
    with one_that_knows_nothing() as both:
        (peer,) = both.receiver_peers.values()
        (reader,) = both.sender_peers.values()
        for n in range(9):
            peer.channel.send(m.encode(m.AbortRoom(RoomId(f"gone-{n}"), "", False, 1)))
        both.until(lambda: "gone-8" in reader.early.given_up, "the last of them")
        assert list(reader.early.given_up) == [f"gone-{n}" for n in range(5, 9)]


def test_more_peers_than_allowed_are_refused_with_a_word() -> None:
    with ends(FULL, "shm", transfer={"max_peers": 1}) as both:
        both.open(both.prompt(4))
        (writer,) = both.receiver_peers.values()
        second = both.receiver.end.transport.connect(both.sender.control, b"decode-9:1")
        second.send(m.encode(replace(both.receiver_peers.hello(writer.ref), worker="decode-9")))
        both.until(lambda: both.sender.refused, "the refusal")
        answer = None
        while answer is None:
            answer = second.receive()
            both.waiter.wait(0.01)
        said = m.decode(answer)
        second.close()
        assert isinstance(said, m.PeerRefused)
        assert "transfer.max_peers" in said.reason
        assert set(both.sender_peers) == {b"decode-0:1"}


def test_a_reader_that_restarts_is_taken_in_place_of_itself_although_there_are_as_many_peers_as_allowed() -> None:
    """A pool that fills the bound could never be restarted else: the old incarnation's place is free for the new."""
    with ends(FULL, "shm", transfer={"max_peers": 1}) as both:
        both.open(both.prompt(4))
        (writer,) = both.receiver_peers.values()
        again = both.receiver.end.transport.connect(both.sender.control, b"decode-0:2")
        again.send(m.encode(replace(both.receiver_peers.hello(writer.ref), incarnation=2)))
        both.until(lambda: both.sender.refused or b"decode-0:2" in both.sender_peers, "the second hello")
        again.close()
        assert both.sender.refused == 0
        assert set(both.sender_peers) == {b"decode-0:2"}


def test_the_bounds_are_configured() -> None:
    default = TransferConfig()
    assert default.frame_bytes > default.control_frame_bytes > 0
    assert default.max_peers > 0
    assert default.peer_forget_s > default.link_timeout_s


def test_a_room_that_was_failed_for_want_of_room_breaks_at_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "_EARLY", 1)
    with ends(FULL, "shm") as both:
        first, second = both.prompt(4), both.prompt(4)
        monkeypatch.setattr(both.sender, "open", lambda *room: None)
        both.start(first)
        leases = both.start(second)
        broken = both.outcome(first.room)
        assert isinstance(broken, HandoverFailed)
        assert "keeps no more early grants" in broken.message
        assert all(lease.live for lease in leases.values())
