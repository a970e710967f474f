"""What a reader over TCP stores, and what it drops."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgpack
import pytest
import torch
import zmq

from tests.support.pool_sets import entry, pool_sets
from tests.support.raw_writer import RawWriter, revoke_waits_for, tcp_config, tcp_reader, until, writing
from tests.support.room_ends import ends, image
from twinpool.cache.device.device_port import DONE
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.sealed_stream import HELLO_BYTES, SALT_BYTES, SealedStream, connection_key, draw_secret
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.planes.data_plane import PageNumbers, PageWrite, PostedWrite, RoomTarget, SentCounts
from twinpool.transfer.planes.tcp import data_listener
from twinpool.transfer.planes.tcp import zmq_link as data_connection
from twinpool.transfer.planes.tcp.zmq_link import DataConnection, DataDoor, OutgoingWrite
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane
from twinpool.transfer.rooms.room_states import HandoverFailed

SPEC = pool_sets()["all"]
WIDE = PoolSetSpec(16, (PoolSpec("full", (BufferSpec("k", 2, (4, 64), torch.float32),)),))
"""Rows of 16 KiB, which the kernel stores straight into the pages."""
ROOM = RoomId("room-1")
TARGET = RoomTarget(ROOM, {"full": PageNumbers(2, (5, 7, 6)), "state": PageNumbers(4, (3,))}, 1, 77)
TICKET = TARGET.ticket
COUNTS = SPEC.even(9)
ALONE = (0, 1, 1)
"""The first write of a writer of one rank."""
FULL, STATE = SPEC.unit_bytes("full"), SPEC.unit_bytes("state")


def reader(
    spec: PoolSetSpec = SPEC, curve: CurveKeys | None = None
) -> AbstractContextManager[tuple[ZmqPlane, PoolSet]]:
    return tcp_reader(TARGET, spec, curve)


def deliver(plane: ZmqPlane, *frames: bytes) -> None:
    """Send a message, and a notice after it to wait for."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(plane.describe()["ranks"][0]["endpoint"])
    socket.send_multipart(frames)
    socket.send_multipart([b"N", msgpack.packb(("", 0, 1)), b"over"])
    try:
        until(lambda: plane.waitable[0].poll(20) and plane.poll() == [b"over"], "the notice")
    finally:
        socket.close(linger=0)


def test_a_write_of_several_pools_is_stored_in_the_places_that_were_granted() -> None:
    with reader() as (plane, pools), writing(plane) as writer:
        before = image(pools)
        writer.write((ROOM, TICKET, [("full", 3, 2), ("state", 4, 1)], *ALONE), b"\1" * 2 * FULL, b"\3" * STATE)
        after = image(pools)
        assert {place for place in after if after[place] != before[place]} == {("full", 7), ("full", 6), ("state", 3)}
        for (pool, index), byte in ((("full", 7), b"\1"), (("full", 6), b"\1"), (("state", 3), b"\3")):
            assert set(b"".join(entry(pools, pool, index))) == set(byte)
        assert plane.poll() == []
        assert plane.dropped == 0


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["packed", "rows"])
def test_bytes_travel_buffer_by_buffer_layer_by_layer_page_by_page(spec: PoolSetSpec) -> None:
    """By hand: whatever way the reader stores them, each byte has one place."""
    pool, tokens = spec.by_name["full"], spec.page_tokens
    with reader(spec) as (plane, pools), writing(plane) as writer:
        sent, expected = bytearray(), dict[int, list[bytes]]()
        for number, buffer in enumerate(pool.buffers):
            for layer in range(buffer.layers):
                for index in (5, 7):
                    value = bytes([1 + (16 * number + 4 * layer + index) % 251])
                    sent += value * buffer.entry_bytes(tokens)
                    expected.setdefault(index, []).append(value * buffer.entry_bytes(tokens))
        writer.write((ROOM, TICKET, [("full", 2, 2)], *ALONE), bytes(sent))
        for index, rows in expected.items():
            assert b"".join(entry(pools, "full", index)) == b"".join(rows)


MISFITS: dict[str, list[Any]] = {
    "another room": [("room-2", [("full", 3, 1)]), b"\1" * FULL],
    "pages before the grant's": [(ROOM, [("full", 1, 1)]), b"\1" * FULL],
    "pages after the grant's": [(ROOM, [("full", 4, 2)]), b"\1" * FULL * 2],
    "a pool that was not granted": [(ROOM, [("window", 4, 1)]), b"\1" * SPEC.unit_bytes("window")],
    "no such pool": [(ROOM, [("latent", 4, 1)]), b"\1"],
    "too few bytes": [(ROOM, [("full", 3, 1)]), b"\1" * (FULL - 1)],
    "too many bytes": [(ROOM, [("full", 3, 1)]), b"\1" * (FULL + 1)],
    "layers that the pool doesn't have": [(ROOM, [("full", 3, 1, 0, 9)]), b"\1" * FULL],
    "layers before the first": [(ROOM, [("full", 3, 1, -1, 1)]), b"\1" * FULL],
    "no layers": [(ROOM, [("full", 3, 1, 1, 1)]), b"\1" * FULL],
    "layers that are no numbers": [(ROOM, [("full", 3, 1, 0, "1")]), b"\1" * FULL],
    "half a range of layers": [(ROOM, [("full", 3, 1, 0)]), b"\1" * FULL],
    "no pages": [(ROOM, [("full", 3, 0)]), b""],
    "a pool twice": [(ROOM, [("full", 3, 1), ("full", 2, 1)]), b"\1" * FULL * 2],
    "names that are no names": [([1], [("full", 3, 1)]), b"\1" * FULL],
    "numbers that are no numbers": [(ROOM, [("full", "3", 1)]), b"\1" * FULL],
    "nothing": [(ROOM, 5)],
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_b6_a_write_that_does_not_fit_in_one_pool_is_stored_in_none(misfit: str) -> None:
    head, *frames = MISFITS[misfit]
    with reader() as (plane, pools), writing(plane) as writer:
        before = image(pools)
        writer.write((head[0], TICKET, *head[1:], *ALONE), *frames)
        beside = (head[0], [("state", 4, 1), *head[1]] if isinstance(head[1], list) else 5)
        writer.write((beside[0], TICKET, *beside[1:], *ALONE), b"\3" * STATE, *frames)
        assert image(pools) == before
        plane.poll()
        assert plane.dropped == 2
        writer.write((ROOM, TICKET, [("state", 4, 1)], *ALONE), b"\3" * STATE)
        assert image(pools) != before, "the connection goes on"


@pytest.mark.parametrize(
    "ranks", [(), (1, 1, 1), (-1, 1, 1), (0, 0, 1), (0, 10**9, 1), ("0", 1, 1), (0, 1, "1"), (0, 1, 1, 1)]
)
def test_a_write_of_ranks_that_cannot_be_is_dropped(ranks: tuple[Any, ...]) -> None:
    with reader() as (plane, pools), writing(plane) as writer:
        before = image(pools)
        writer.write((ROOM, TICKET, [("full", 3, 1)], *ranks), b"\1" * FULL)
        plane.poll()
        assert image(pools) == before
        assert plane.dropped == 1


@pytest.mark.parametrize("ranks", [0, 65, 1 + 3 * 256, 4 + 1 * 256])
def test_a_notice_of_ranks_that_cannot_have_this_models_state_is_dropped_and_not_held(ranks: int) -> None:
    with reader() as (plane, _):
        deliver(plane, b"N", msgpack.packb((ROOM, 1, ranks)), b"of nobody")
        assert plane.dropped == 1
        assert plane.poll() == []


@pytest.mark.parametrize("head", [b"\xc1", b"\x91\x63", b"\x80", b"no msgpack at all"])
def test_a_head_that_is_none_is_dropped_with_its_body(head: bytes) -> None:
    with reader() as (plane, pools), writing(plane) as writer:
        before = image(pools)
        writer.write(head, b"\1" * FULL)
        plane.poll()
        assert (image(pools), plane.dropped) == (before, 1)


@pytest.mark.parametrize(("head", "body"), [(0, 10), (data_connection.HEAD_BYTES + 1, 10), (10, 1 << 40)])
def test_a_write_longer_than_any_that_was_described_cuts_the_connection(head: int, body: int) -> None:
    with reader() as (plane, _), writing(plane) as writer, writing(plane) as other:
        writer.socket.sendall(data_connection.LENGTHS.pack(head, body))
        assert writer.cut
        other.write((ROOM, TICKET, [("full", 3, 1)], *ALONE), b"\1" * FULL)
        plane.poll()
        assert plane.dropped == 0, "and no other connection"


def test_a_write_may_have_the_longest_part_of_each_pool() -> None:
    transfer = TransferConfig("zmq", link_timeout_s=5.0, frame_bytes=1)
    plane, pools = ZmqPlane(transfer, FaultsConfig(), "127.0.0.1", None), PoolSet(SPEC, COUNTS)
    plane.register(pools, None)
    places = {pool.name: PageNumbers(3, (5,)) for pool in SPEC.pools}
    plane.permit(RoomTarget(ROOM, places, 0, TICKET))
    try:
        with writing(plane) as writer:
            parts = [b"\1" * SPEC.unit_bytes(pool) for pool in places]
            with contextlib.suppress(OSError, EOFError):
                writer.write((ROOM, TICKET, [(pool, 3, 1) for pool in places], *ALONE), *parts)
        assert all(set(b"".join(entry(pools, pool, 5))) == {1} for pool in places)
    finally:
        plane.close()


def test_layers_are_those_of_the_buffer_that_has_most_of_them() -> None:
    """As keys of an index, which fewer layers have, may come first in a pool."""
    buffers = (BufferSpec("few", 1, (2,), torch.float32), BufferSpec("many", 3, (2,), torch.float32))
    spec = PoolSetSpec(4, (PoolSpec("full", buffers),))
    with tcp_reader(RoomTarget(ROOM, {"full": PageNumbers(2, (5,))}, 1, 77), spec) as (plane, pools):
        with writing(plane) as writer:
            writer.write((ROOM, TICKET, [("full", 2, 1, 1, 3)], *ALONE), b"\1" * 2 * buffers[1].entry_bytes(4))
        assert [set(row) for row in entry(pools, "full", 5)] == [{0}, {0}, {1}, {1}]


def test_a5_what_comes_for_a_room_that_was_revoked_is_dropped_and_counted() -> None:
    with reader() as (plane, pools), writing(plane) as writer:
        before = image(pools)
        plane.revoke(ROOM)
        writer.write((ROOM, TICKET, [("full", 2, 1)], *ALONE), b"\1" * FULL)
        deliver(plane, b"S", msgpack.packb((ROOM, TICKET)), b"\1" * 10)
        assert image(pools) == before
        assert plane.dropped == 2


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["packed", "rows"])
def test_a5_nothing_lands_after_revoke_although_the_write_had_begun(
    spec: PoolSetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_listener, "_MIN_BYTES", 1)
    size = spec.unit_bytes("full")
    with reader(spec) as (plane, pools), writing(plane) as writer, writing(plane) as other:
        writer.begin(msgpack.packb((ROOM, TICKET, [("full", 2, 2)], *ALONE)), 2 * size)
        writer.socket.sendall(b"\1" * size)
        if spec is WIDE:
            until(lambda: bool((pools.region == 1).any()), "a part of it to be stored")
        plane.revoke(ROOM)
        before = image(pools)
        plane.permit(RoomTarget(RoomId("next"), TARGET.runs, 0, 5))
        writer.socket.sendall(b"\1" * size)
        until(lambda: (plane.poll(), plane.dropped)[1] == 1, "the rest to be dropped")
        assert image(pools) == before
        other.write(("next", 5, [("full", 2, 1)], *ALONE), b"\2" * size)
        assert set(b"".join(entry(pools, "full", 5))) == {2}


def test_a5_revoke_waits_for_the_slice_that_is_being_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its last bytes would land in pages that are somebody else's by then."""
    storing, go = threading.Event(), threading.Event()

    def slowly(rows: Any) -> Any:
        storing.set()
        assert go.wait(60)
        return real(rows)

    real = data_listener._slice
    monkeypatch.setattr(data_listener, "_slice", slowly)
    size = WIDE.unit_bytes("full")
    with reader(WIDE) as (plane, _), writing(plane) as writer:
        writer.begin(msgpack.packb((ROOM, TICKET, [("full", 2, 1)], *ALONE)), size)
        writer.socket.sendall(b"\1" * size)
        assert storing.wait(60)
        revoke_waits_for(go, plane, ROOM)


def listener_of(plane: ZmqPlane) -> Any:
    assert plane._listener is not None
    return plane._listener


def only_connection(plane: ZmqPlane) -> Any:
    """The one connection that a plane has accepted, once it has."""
    until(lambda: listener_of(plane)._connections, "the connection")
    (connection,) = listener_of(plane)._connections
    return connection


class HeldUp:
    """A lock that one thread gets only when it may `go`."""

    def __init__(self, lock: threading.Lock, thread: threading.Thread) -> None:
        self._lock, self._thread = lock, thread
        self.waits, self.go = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self._thread:
            self.waits.set()
            assert self.go.wait(60)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["packed", "rows"])
def test_a5_nothing_lands_of_a_room_revoked_while_its_slice_waited_for_the_lock(spec: PoolSetSpec) -> None:
    """Its thread looks for that under the lock: what it saw before may have changed while it waited."""
    size = spec.unit_bytes("full")
    with reader(spec) as (plane, pools), writing(plane) as writer:
        connection = only_connection(plane)
        held = HeldUp(connection.landing, connection._thread)
        connection.landing = held
        writer.begin(msgpack.packb((ROOM, TICKET, [("full", 2, 1)], *ALONE)), size)
        writer.socket.sendall(b"\1" * size)
        assert held.waits.wait(60)
        before = image(pools)
        plane.revoke(ROOM)
        held.go.set()
        until(lambda: (plane.poll(), plane.dropped)[1] == 1, "the write to be dropped")
        assert image(pools) == before


def test_a5_a_slice_that_gets_the_lock_once_revoke_has_passed_it_stores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`revoke` waits for one connection after the other: the first may go on before it returns."""
    size = SPEC.unit_bytes("full")
    with reader() as (plane, pools), writing(plane) as writer:
        connection = only_connection(plane)
        held = HeldUp(connection.landing, connection._thread)
        connection.landing = held
        writer.begin(msgpack.packb((ROOM, TICKET, [("full", 2, 1)], *ALONE)), size)
        writer.socket.sendall(b"\1" * size)
        assert held.waits.wait(60)
        before, settle = image(pools), listener_of(plane).settle

        def settle_and_go_on() -> None:
            settle()
            held.go.set()
            until(lambda: (plane.poll(), plane.dropped)[1] == 1, "the write to be dropped")

        monkeypatch.setattr(listener_of(plane), "settle", settle_and_go_on)
        plane.revoke(ROOM)
        assert image(pools) == before


def test_who_does_not_know_the_secret_gets_no_connection() -> None:
    with reader() as (plane, pools), writing(plane) as writer:
        stranger = RawWriter(plane, secret=bytes(32))
        assert stranger.cut
        stranger.close()
        before = image(pools)
        writer.write((ROOM, TICKET, [("full", 2, 1)], *ALONE), b"\1" * FULL)
        assert image(pools) != before


def test_strangers_that_say_nothing_are_bounded_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_listener, "_STRANGERS", 3)
    with reader() as (plane, pools):
        silent = []
        (part,) = plane.describe()["ranks"]
        host, _, port = part["pages"].removeprefix("tcp://").rpartition(":")
        for _ in range(9):
            silent.append(socket.create_connection((host, int(port)), 60))
        before = image(pools)
        with writing(plane) as writer:
            writer.write((ROOM, TICKET, [("full", 2, 1)], *ALONE), b"\1" * FULL)
        assert image(pools) != before
        for one in silent:
            one.close()


@pytest.mark.parametrize("said", [b"", b"x" * (HELLO_BYTES - 1)], ids=["nothing", "half a hello"])
def test_a_stranger_that_does_not_say_who_it_is_in_time_is_cut_though_nobody_else_comes(said: bytes) -> None:
    listener = data_listener.DataListener("127.0.0.1", 1, 0.05, lambda head, nbytes: None, sealed=False)
    host, _, port = listener.endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 30) as stranger:
            assert len(stranger.recv(SALT_BYTES, socket.MSG_WAITALL)) == SALT_BYTES
            stranger.sendall(said)
            cut = select.select([stranger], [], [], 30)[0] and is_cut(stranger)
            assert cut
    finally:
        listener.close()


def is_cut(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_cannot_be_taken_keeps_nobody_else_out(monkeypatch: pytest.MonkeyPatch) -> None:
    take, refused = data_connection.patient, list[object]()

    def refuse_the_first(connected: Any, timeout_s: float) -> None:
        if not refused:
            refused.append(connected)
            raise OSError("it is gone again")
        take(connected, timeout_s)

    with reader() as (plane, _):
        with monkeypatch.context() as patched:
            patched.setattr("twinpool.transfer.planes.tcp.data_listener.patient", refuse_the_first)
            with pytest.raises((OSError, EOFError)), writing(plane) as writer:
                writer.write((ROOM, TICKET, [("state", 4, 1)], *ALONE), b"\3" * STATE)
        with writing(plane) as writer:
            writer.write((ROOM, TICKET, [("state", 4, 1)], *ALONE), b"\3" * STATE)
    assert refused


@contextlib.contextmanager
def no_file_left() -> Generator[None]:
    """No file descriptor can be opened: the limit is at the highest open one, and every number below it is taken."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in taken:
            os.close(file)


def test_without_a_file_for_a_connection_a_write_fails_and_nothing_else() -> None:
    with ends(SPEC, "zmq") as both:
        prompt = both.prompt(8)
        both.open(prompt)
        with no_file_left():
            both.sender.write(prompt.room, prompt.all(), (DONE,))
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert "no connection for pages can be opened" in outcome.message


def test_a_connection_sleeps_once_its_writes_are_taken_in() -> None:
    with ends(SPEC, "zmq") as both:
        prompt = both.prompt(8)
        both.open(prompt)
        link = next(iter(both.sender_peers.values())).link
        link.post(PageWrite(RoomTarget(prompt.room, prompt.runs, 0), prompt.runs)).wait()
        (connection,) = (one for one in link._connections if one is not None)  # type: ignore[attr-defined]
        with pytest.raises(BlockingIOError):
            os.eventfd_read(connection._wake)


def test_a_slow_writer_is_told_that_its_write_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take the connection for a silent one, however much of a long write has come."""
    monkeypatch.setattr(data_listener, "_PATIENCE_S", 0.0)
    with reader() as (plane, pools), writing(plane) as writer:
        writer.begin(msgpack.packb((ROOM, TICKET, [("full", 2, 1)], *ALONE)), FULL)
        writer.socket.sendall(b"\1")
        assert writer.socket.recv(1) == data_connection.COMING
        writer.socket.sendall(b"\1" * (FULL - 1))
        until(lambda: set(b"".join(entry(pools, "full", 5))) == {1}, "the write")


def test_a_dribbling_writer_holds_up_nobody_but_itself() -> None:
    size = SPEC.unit_bytes("full")
    with reader() as (plane, pools), writing(plane) as slow, writing(plane) as quick:
        slow.begin(msgpack.packb((ROOM, TICKET, [("full", 2, 1)], *ALONE)), size)
        for _ in range(3):
            slow.socket.sendall(b"\1")
            quick.write((ROOM, TICKET, [("full", 3, 1)], *ALONE), b"\2" * size)
        assert set(b"".join(entry(pools, "full", 7))) == {2}
        slow.socket.sendall(b"\1" * (size - 3))
        until(lambda: set(b"".join(entry(pools, "full", 5))) == {1}, "its own write")


# ------------------------------------------------------------ sealed

CURVE = CurveKeys.from_secret(b"s" * 32)


def sealing(writer: RawWriter, plane: ZmqPlane) -> SealedStream:
    (part,) = plane.describe()["ranks"]
    return SealedStream(connection_key(part["secret"], writer.salt, writer.mine))


def sealed_write(writer: RawWriter, stream: SealedStream, tamper: int = -1, room: str = ROOM) -> None:
    """Send one sealed write, with a bit of its head (0) or of its body (1) changed."""
    head, body = msgpack.packb((room, TICKET, [("full", 2, 1)], *ALONE)), b"\1" * FULL
    lengths = data_connection.LENGTHS.pack(len(head), len(body))
    pieces = [bytes(stream.seal(head, memoryview(bytearray(len(head) + 16)), lengths))]
    pieces.append(bytes(stream.seal(body, memoryview(bytearray(len(body) + 16)))))
    if tamper >= 0:
        pieces[tamper] = bytes([pieces[tamper][0] ^ 1]) + pieces[tamper][1:]
    writer.socket.sendall(lengths + b"".join(pieces))


def test_a_sealed_write_is_stored_also_behind_one_that_was_dropped() -> None:
    with reader(curve=CURVE) as (plane, pools), writing(plane) as writer:
        stream = sealing(writer, plane)
        sealed_write(writer, stream, room="of nobody")
        sealed_write(writer, stream)
        with contextlib.suppress(OSError):
            assert [writer.socket.recv(1) for _ in range(2)] == [b"\1"] * 2
        assert set(b"".join(entry(pools, "full", 5))) == {1}


@pytest.mark.parametrize("tamper", [0, 1])
def test_a_sealed_write_that_was_changed_on_the_way_is_stored_nowhere(tamper: int) -> None:
    with reader(curve=CURVE) as (plane, pools), writing(plane) as writer:
        before = image(pools)
        sealed_write(writer, sealing(writer, plane), tamper)
        assert writer.cut
        assert image(pools) == before


def test_off_the_loopback_no_byte_of_a_page_travels_as_it_is() -> None:
    with reader(curve=CURVE) as (plane, pools):
        writer = ZmqPlane(tcp_config(5.0), FaultsConfig(), "127.0.0.1", CURVE)
        source = PoolSet(SPEC, SPEC.even(9))
        source.region.fill_(7)
        writer.register(source, None)
        link = writer.connect(plane.describe())
        try:
            link.post(PageWrite(TARGET, {"full": PageNumbers(2, (1, 2)), "state": PageNumbers(4, (8,))})).wait()
            assert set(b"".join(entry(pools, "full", 7))) == {7}
            assert set(b"".join(entry(pools, "state", 3))) == {7}
            connections = [c for c in link._connections if c is not None]  # type: ignore[attr-defined]
            assert all(c._stream is not None for c in connections)
        finally:
            link.close()
            writer.close()


class SilentReader:
    """Takes connections and all that is sent on them, and answers so many writes of each."""

    def __init__(self, answers: int = 0) -> None:
        self._door, self._answers = socket.create_server(("127.0.0.1", 0)), answers
        self.taken = list[socket.socket]()
        self.heard = 0
        threading.Thread(target=self._take, daemon=True).start()

    @property
    def door(self) -> DataDoor:
        return DataDoor(self._door.getsockname(), b"s" * SALT_BYTES, False, 20.0)

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._door.accept()
            self.taken.append(connection)
            connection.sendall(draw_secret())
            left = self._answers
            while said := connection.recv(1 << 16):
                self.heard += len(said)
                if left and self.heard > HELLO_BYTES:
                    connection.sendall(data_connection.TAKEN * left)
                    left = 0

    def close(self) -> None:
        for each in (self._door, *self.taken):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class SteppedClock:
    """Stands in for the module `time`."""

    at, asked = 0.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return self.at


@pytest.mark.parametrize("ending", ["the link is closed", "the reader is gone", "its pages can't be read"])
def test_every_write_of_a_connection_that_ends_has_ended_whether_it_was_sent_or_not(ending: str) -> None:
    """Some are sent and not answered, one is being sent, others wait: whoever posted them waits for each."""
    reader, entered, go = SilentReader(), threading.Event(), threading.Event()

    def body(number: int) -> Generator[list[memoryview]]:
        if number == 2:
            entered.set()
            assert go.wait(60)
            if ending == "its pages can't be read":
                raise RuntimeError("an illegal address was touched")
        yield [memoryview(b"x" * 64)]

    connection = DataConnection(reader.door, lambda: None, SentCounts())
    posted = [PostedWrite(lambda: None) for _ in range(5)]
    try:
        for number, one in enumerate(posted):
            assert connection.send(OutgoingWrite(b"head", partial(body, number), 64, one))
        assert entered.wait(60)
        assert len(connection) == 5
        assert not any(one.done for one in posted)
        if ending == "the reader is gone":
            until(lambda: reader.taken, "the connection")
            reader.close()
        go.set()
        if ending == "the link is closed":
            connection.close()
        for one in posted:
            assert one._over.wait(60)
            with pytest.raises(RuntimeError, match="the connection that pages take was cut"):
                one.wait()
        assert len(connection) == 0
        assert connection.failed
        assert not connection.send(OutgoingWrite(b"head", partial(body, 0), 64, PostedWrite(lambda: None)))
    finally:
        connection.close()
        reader.close()


def test_a_reader_that_says_that_a_write_comes_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a slow connection takes for the write."""
    clock = SteppedClock()
    monkeypatch.setattr(data_connection, "time", clock)
    reader, posted = SilentReader(), PostedWrite(lambda: None)
    connection = DataConnection(reader.door, lambda: None, SentCounts())
    try:
        connection.send(OutgoingWrite(b"head", lambda: (rows for rows in [[memoryview(b"x" * 64)]]), 64, posted))
        until(lambda: reader.heard == HELLO_BYTES + data_connection.LENGTHS.size + 4 + 64, "the write")
        for _ in range(4):
            clock.at += 0.75 * reader.door.timeout_s
            asked = clock.asked
            reader.taken[0].sendall(data_connection.COMING)
            until(lambda asked=asked: clock.asked > asked, "the link to hear it")  # type: ignore[misc]
            assert not connection.failed
        reader.taken[0].sendall(data_connection.TAKEN)
        posted.wait()
    finally:
        connection.close()
        reader.close()


def test_the_kernel_cuts_a_connection_whose_other_host_is_silent_for_the_links_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as one:
        data_connection.patient(one, 2.5)
        limits = [(socket.TCP_USER_TIMEOUT, 2500), (socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2)]
        assert [(what, one.getsockopt(socket.IPPROTO_TCP, what)) for what, _ in limits] == limits
        waits = [one.getsockopt(socket.SOL_SOCKET, what, 16) for what in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)]
        assert [round(seconds + micro / 1e6, 1) for seconds, micro in map(struct.Struct("ll").unpack, waits)] == [
            2.5
        ] * 2


def test_what_a_revoked_room_held_back_is_told_once() -> None:
    """Notices whose writes never came: they are late, and counted, when their room is over."""
    with reader() as (plane, _):
        deliver(plane, b"N", msgpack.packb((ROOM, 3, 1)), b"behind a third write")
        assert plane.poll() == []
        plane.revoke(ROOM)
        assert plane.poll() == [b"behind a third write"]
        assert plane.poll() == []


def test_a_link_tells_of_a_cut_once_and_writes_go_over_a_new_connection() -> None:
    with reader() as (plane, pools):
        mine = ZmqPlane(tcp_config(5.0), FaultsConfig(), "127.0.0.1", None)
        source = PoolSet(SPEC, SPEC.even(9))
        source.region.fill_(3)
        mine.register(source, None)
        link = mine.connect(plane.describe())
        write = PageWrite(TARGET, {"full": PageNumbers(2, (1, 2, 4))})
        link.post(write).wait()
        assert not link.cut()
        for _ in range(2):
            for connection in list(listener_of(plane)._connections):
                connection.close()
            until(lambda: link._connections[0].failed, "the cut")  # type: ignore[attr-defined]
            assert link.cut()
            assert not link.cut()
            pools.region.zero_()
            link.post(write).wait()
            assert set(b"".join(entry(pools, "full", 7))) == {3}
        link.close()
        mine.close()
