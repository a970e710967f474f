"""Plane `staged`: loads, and what a device that copies late may not do. The oracle is the region's bytes, by hand."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgpack
import pytest
import torch

from tests.support.pool_sets import entry, filled, pool_sets
from tests.support.raw_writer import RawWriter, revoke_waits_for, tcp_config, tcp_reader, until
from tests.support.room_ends import ends, image, placed
from twinpool.cache.device.device_copies import HostCopies
from twinpool.cache.device.device_port import Completion
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net import sealed_stream
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.planes.data_plane import PageNumbers, PageWrite, RoomTarget
from twinpool.transfer.planes.make_plane import make_plane
from twinpool.transfer.planes.tcp import bounce_buffers
from twinpool.transfer.planes.tcp.bounce_buffers import BounceBuffer, Staging, StreamPart, buffer_bytes, loads
from twinpool.transfer.planes.tcp.page_stream import PoolStream, shared
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane

SPEC = pool_sets()["all"]
ROOM = RoomId("room-1")
TARGET = RoomTarget(ROOM, {"full": PageNumbers(2, (5, 7, 6, 2)), "state": PageNumbers(4, (3,))}, 1, 77)
WRITE = PageWrite(TARGET, {"full": PageNumbers(2, (1, 2, 8, 4)), "state": PageNumbers(4, (6,))})
FULL, STATE = SPEC.unit_bytes("full"), SPEC.unit_bytes("state")
SMALL = 64
"""Bytes of a buffer that takes one or two entries: a write has many loads."""
CURVE = CurveKeys.from_secret(b"s" * 32)


class LateCopies:
    """A device that copies when it is waited for, in order, and not before the gate is open."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate, self._queue, self._lock = gate, list[Callable[[], object]](), threading.Lock()
        self.begun, self.ran = threading.Event(), 0
        self.broken = False

    def begin(self, copy: Callable[[], object]) -> Completion:
        with self._lock:
            self._queue.append(copy)
            self.begun.set()
            return _LateCopy(self, self.ran + len(self._queue))

    def run_to(self, number: int) -> None:
        if self._gate is not None:
            assert self._gate.wait(60)
        with self._lock:
            while self.ran < number:
                if self.broken:
                    raise RuntimeError("an illegal address was touched")
                self._queue.pop(0)()
                self.ran += 1

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)


class _LateCopy:
    def __init__(self, copies: LateCopies, number: int) -> None:
        self._copies, self._number = copies, number

    @property
    def done(self) -> bool:
        return self._copies.ran >= self._number

    def wait(self) -> None:
        self._copies.run_to(self._number)

    def order(self) -> None:
        self.wait()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Every line of copies that is made, one for each thread."""
    made: list[LateCopies] = []

    def device_copies(device: torch.device) -> LateCopies:
        made.append(LateCopies())
        return made[-1]

    monkeypatch.setattr(bounce_buffers, "device_copies", device_copies)
    return made


def plane(curve: CurveKeys | None = None, bounce_bytes: int = SMALL) -> ZmqPlane:
    return ZmqPlane(tcp_config(20.0, bounce_bytes), FaultsConfig(), "127.0.0.1", curve)


def reader(
    curve: CurveKeys | None = None, bounce_bytes: int = SMALL
) -> AbstractContextManager[tuple[ZmqPlane, PoolSet]]:
    return tcp_reader(TARGET, SPEC, curve, bounce_bytes)


def streams(spec: PoolSetSpec, pools: PoolSet) -> dict[str, PoolStream]:
    out = {}
    for pool in spec.pools:
        mine = pools.layout.buffers[pool.name]
        sent = shared(mine, pool.buffers)
        out[pool.name] = PoolStream(pool.name, pools.layout.counts[pool.name], mine, sent, spec.page_tokens)
    return out


def by_hand(pools: PoolSet, parts: list[StreamPart]) -> bytes:
    """Buffer by buffer, layer by layer, page by page."""
    out = b""
    for stream, pages in parts:
        for number, buffer in enumerate(pools.spec.by_name[stream.pool].buffers):
            before = sum(b.layers for b in pools.spec.by_name[stream.pool].buffers[:number])
            for layer in range(buffer.layers):
                out += b"".join(entry(pools, stream.pool, page)[before + layer] for page in pages)
    return out


@pytest.mark.parametrize("name", ["full", "all"])
def test_loads_fit_a_buffer_and_have_every_byte_of_a_write_once_and_in_order(name: str) -> None:
    spec, rng = pool_sets()[name], random.Random(4)
    pools = filled(PoolSet(spec, spec.even(20)), 3)
    least = buffer_bytes(spec, 1)
    for most in (least, least + 16, 3 * least, 1 << 20):
        for _ in range(8):
            parts = [
                (stream, tuple(rng.sample(range(1, 20), rng.randint(1, 12))))
                for stream in streams(spec, pools).values()
            ]
            staging = Staging(pools.region, most)
            cut = loads(parts, most)
            assert all(load.nbytes <= most for load in cut)
            assert sum(piece.first for load in cut for piece in load.pieces) == len(parts)
            sent = b"".join(bytes(buffer.bytes[: load.nbytes]) for buffer, load in staging.gathered(parts))
            assert sent == by_hand(pools, parts)


def test_pieces_begin_where_a_kernel_can_copy_whole_words() -> None:
    narrow = PoolSpec("full", tuple(BufferSpec(name, 2, (size,), torch.int8) for name, size in (("k", 3), ("v", 5))))
    spec = PoolSetSpec(1, (narrow,))
    (stream,) = streams(spec, PoolSet(spec, spec.even(9))).values()
    for pages in ((1,), (1, 4), (2, 3, 7, 8)):
        pieces = [piece for load in loads([(stream, pages)], 1 << 20) for piece in load.pieces]
        assert sum(piece.nbytes for piece in pieces) == len(pages) * stream.page_bytes
        assert all(piece.start % 16 == 0 for piece in pieces), "each of them in a load of its own, if need be"
    wide = PoolSetSpec(1, (PoolSpec("full", tuple(BufferSpec(name, 2, (16,), torch.int8) for name in "kv")),))
    (stream,) = streams(wide, PoolSet(wide, wide.even(9))).values()
    assert len(loads([(stream, (2, 3, 7))], 1 << 20)) == 1, "and else together, as many as fit"


def test_pages_are_gathered_on_the_device_that_they_lie_on() -> None:
    buffer = BounceBuffer(torch.empty(64, dtype=torch.uint8, device="meta"), HostCopies(), 64)
    assert buffer._gathered.device == torch.device("meta")


def test_a_buffer_has_room_for_the_largest_page_of_a_layer_whatever_was_asked_for() -> None:
    entries = [b.entry_bytes(SPEC.page_tokens) for pool in SPEC.pools for b in pool.buffers]
    assert buffer_bytes(SPEC, 1) == max(entries)
    assert buffer_bytes(SPEC, 1 << 20) == 1 << 20


def test_a_thread_has_two_buffers_and_keeps_them() -> None:
    staging = Staging(PoolSet(SPEC, SPEC.even(9)).region, 4096)
    mine = staging.buffers()
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(staging.buffers()))
    thread.start()
    thread.join()
    assert len(mine) == 2
    assert staging.buffers() is mine
    assert others != [mine]


@pytest.mark.parametrize("curve", [None, CURVE], ids=["plain", "sealed"])
@pytest.mark.parametrize("sizes", [(SMALL, 1 << 20), (1 << 20, SMALL), (300, 300)])
def test_a7_every_page_arrives_whatever_buffers_the_ends_have(
    curve: CurveKeys | None, sizes: tuple[int, int], late: list[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that copies as late as it may: who reads a buffer before its copy is over reads something else."""
    monkeypatch.setattr(sealed_stream, "PIECE_BYTES", 200)
    with reader(curve, sizes[1]) as (theirs, pools):
        mine = plane(curve, sizes[0])
        source = filled(PoolSet(SPEC, SPEC.even(9)), 5)
        mine.register(source, None)
        link = mine.connect(theirs.describe())
        try:
            link.post(WRITE).wait()
            for pool, run in WRITE.runs.items():
                for here, there in zip(run.indices, TARGET.at(pool, run.numbers), strict=True):
                    assert entry(source, pool, here) == entry(pools, pool, there)
        finally:
            link.close()
            mine.close()
    assert len(late) == 2, "a line of copies for the thread at either end"


def test_a_write_is_cut_in_its_middle_where_faults_on_purpose_come_however_few_loads_it_has() -> None:
    with reader() as (theirs, _):
        for size in (SMALL, 1 << 20):
            mine = plane(bounce_bytes=size)
            mine.register(PoolSet(SPEC, SPEC.even(9)), None)
            link = mine.connect(theirs.describe())
            parts = [(link._streams[pool], run.indices) for pool, run in WRITE.runs.items()]  # type: ignore[attr-defined]
            sent = [sum(map(len, rows)) for rows in link._bounced(parts)]  # type: ignore[attr-defined]
            assert sum(sent) == 4 * FULL + STATE
            assert 0 < sent[0] < sum(sent), "half of the first load, after which a fault may come"
            assert sent[0] == sent[1] or size == SMALL
            link.close()
            mine.close()


@pytest.mark.parametrize("sets", ["full", "all"])
def test_rooms_end_whole_on_a_device_that_copies_late(sets: str, late: list[LateCopies]) -> None:
    spec = pool_sets()[sets]
    with ends(spec, "staged", transfer={"bounce_bytes": SMALL}) as both:
        prompts = [both.prompt(positions) for positions in (5, 37, 64)]
        leases = {prompt.room: both.open(prompt) for prompt in prompts}
        for prompt in prompts:
            both.sender.write(prompt.room, prompt.all(), ())
            both.seal(prompt)
            both.outcome(prompt.room)
            placed(both, prompt, leases[prompt.room], {pool: run.numbers for pool, run in prompt.runs.items()})
    assert late


def head(*runs: tuple[str, int, int]) -> bytes:
    packed: bytes = msgpack.packb((ROOM, TARGET.ticket, runs, 0, 1, 1))
    return packed


def test_a5_of_a_room_revoked_in_mid_write_no_further_load_is_stored() -> None:
    with reader() as (one, pools):
        writer = RawWriter(one)
        writer.begin(head(("full", 2, 2)), 2 * FULL)
        writer.socket.sendall(b"\1" * FULL)
        until(lambda: bool((pools.region == 1).any()), "a part of it to be stored")
        one.revoke(ROOM)
        before = image(pools)
        one.permit(RoomTarget(RoomId("next"), TARGET.runs, 0, 5))
        writer.socket.sendall(b"\1" * FULL)
        until(lambda: (one.poll(), one.dropped)[1] == 1, "the rest to be dropped")
        assert image(pools) == before
        writer.close()


def test_a5_revoke_waits_for_the_copies_to_pages_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would end in pages that are somebody else's by then."""
    gate = threading.Event()
    copies = LateCopies(gate)
    monkeypatch.setattr(bounce_buffers, "device_copies", lambda device: copies)
    with reader() as (one, pools):
        writer = RawWriter(one)
        writer.begin(head(("full", 2, 2)), 2 * FULL)
        writer.socket.sendall(b"\1" * (2 * FULL))
        assert copies.begun.wait(60)
        revoke_waits_for(gate, one, ROOM)
        after = image(pools)
        until(lambda: (one.poll(), one.dropped)[1] == 1, "the rest to be dropped")
        assert image(pools) == after
        writer.close()


def test_a9_a_write_is_answered_when_its_last_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    copies = LateCopies(gate)
    monkeypatch.setattr(bounce_buffers, "device_copies", lambda device: copies)
    with reader(bounce_bytes=1 << 20) as (one, pools):
        writer = RawWriter(one)
        writer.begin(head(("full", 2, 1)), FULL)
        writer.socket.sendall(b"\1" * FULL)
        assert copies.begun.wait(60)
        writer.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            writer.socket.recv(1)
        assert one.poll() == []
        assert not (pools.region == 1).any()
        gate.set()
        writer.socket.settimeout(60)
        assert writer.socket.recv(1) == b"\1"
        assert set(b"".join(entry(pools, "full", 5))) == {1}
        writer.close()


@pytest.mark.parametrize("size", [SMALL, 1 << 20], ids=["of many loads", "of one load"])
def test_a9_a_write_whose_copy_fails_is_never_answered_and_its_connection_is_cut(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = LateCopies()
    monkeypatch.setattr(bounce_buffers, "device_copies", lambda device: copies)
    with reader(bounce_bytes=size) as (one, _):
        copies.broken = True
        writer = RawWriter(one)
        writer.begin(head(("full", 2, 1)), FULL)
        writer.socket.sendall(b"\1" * FULL)
        assert writer.cut
        writer.close()


def test_a6_a_write_whose_pages_cannot_be_read_fails_and_reads_none_after_its_link_is_closed(
    late: list[LateCopies],
) -> None:
    with reader() as (theirs, _):
        mine = plane()
        mine.register(filled(PoolSet(SPEC, SPEC.even(9)), 5), None)
        link = mine.connect(theirs.describe())
        link.post(WRITE).wait()
        for copies in late:
            copies.broken = True
        failed = link.post(WRITE)
        with pytest.raises(RuntimeError, match="illegal address"):
            failed.wait()
        link.close()
        ran = [copies.ran for copies in late]
        mine.close()
        assert [copies.ran for copies in late] == ran
        assert all(thread.name != "kv-send" for thread in threading.enumerate())


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_a_plane_of_host_memory_refuses_a_devices_and_names_those_that_reach_it(kind: str) -> None:
    made = make_plane(config_from_dict({"transfer": {"plane": kind}}), "127.0.0.1", None, lambda: None)
    try:
        with pytest.raises(
            ConfigError, match=rf"transfer\.plane={kind} reaches host memory alone.*cuda_ipc or staged or nixl or local"
        ):
            made.allocate("pages", 64, torch.device("cuda:0"))
    finally:
        made.close()


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a6_a_write_that_is_given_up_reads_no_page_any_more_with_either_of_its_buffers(
    taken: int, late: list[LateCopies]
) -> None:
    """The next load is being gathered while one is sent: whoever gives the write up gives both back."""
    pools = filled(PoolSet(SPEC, SPEC.even(9)), 5)
    parts = [(stream, WRITE.runs[pool].indices) for pool, stream in streams(SPEC, pools).items() if pool in WRITE.runs]
    staging = Staging(pools.region, buffer_bytes(SPEC, SMALL))
    gathered = staging.gathered(parts)
    for _ in range(taken):
        next(gathered)
    (copies,) = late
    begun = copies.ran + len(copies._queue)
    assert begun == taken + 1
    gathered.close()
    assert copies.ran == begun
    assert all(buffer.over.done for buffer in staging.buffers())
