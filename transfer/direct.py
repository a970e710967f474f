"""Planes whose writer stores straight into the reader's memory: `local` (one process) and `shm` (one host).

Neither is revocable: a stopped writer that comes back finishes its store, whatever happened meanwhile. In `shm` a
reader's memory is an anonymous memfd, which the writer opens through the reader's `/proc/PID/fd`; it has no name, so
nothing stays behind when processes die. Notices go over a ZMQ socket, after the stores they tell of.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import zmq

from cache.device import DONE, Completion
from cache.heads import Cut, chosen, common, copy_common
from cache.moves import Move, Part, copy_state
from cache.pools import PoolSet
from cache.registry import BufferLayout, PoolSetLayout, PoolSetSpec
from contracts.config import FaultsConfig, TransferConfig
from contracts.errors import LayoutMismatch, WireError
from contracts.ids import RoomId
from contracts.orders import Arrival
from transfer import process
from transfer.cuts import CutWatch, keep_alive
from transfer.detour import detour
from transfer.fan import fan
from transfer.faults import WriteFaults
from transfer.metadata import SLOT_BYTES
from transfer.plane import Link, PageWrite, SlotWrite, Target, Wake, said
from transfer.security import Curve, bind, dial

LINK_TIMEOUT_S = TransferConfig().link_timeout_s
FRAME_BYTES = TransferConfig().control_frame_bytes
AT_ONCE = 4096
"""Notices that one poll takes in."""
WAITING = 64
"""Messages of one connection that wait here; more wait at their sender."""
_SEGMENT = "twinpool-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MOST_COUNT = 2**40
_HEAD = 64
"""Bytes in front of a segment: a nonce, by which a writer knows that it mapped what was described."""


class DirectLink:
    """Writes into memory that is mapped here."""

    frame_bytes: int | None = None

    def __init__(
        self,
        source: PoolSet,
        region: torch.Tensor,
        layout: PoolSetLayout,
        slots: torch.Tensor | None,
        notify: Callable[[bytes], None],
        watch: CutWatch | None,
        close: Callable[[], None],
        faults: WriteFaults,
        cut: Cut | None = None,
    ) -> None:
        """`slots` and `notify` are the reader's leader's; notices go by a connection that `watch` watches. `cut`: the
        buffers to write, and of them the heads that both hold; None: all of every page."""
        self._source = source
        self._cut = cut
        self._region = region
        self._layout = layout
        self._slots = slots
        self._notify = notify
        self._watch = watch
        self._close = close
        self._faults = faults

    def admit(self, target: Target) -> None:
        for pool, run in target.runs.items():
            count = self._layout.counts.get(pool, 0)
            if not all(0 < index < count for index in run.indices):
                raise WireError(f"room {target.room} was granted places of {pool} beyond the reader's {count}")
        if self._slots is not None and not 0 <= target.slot < len(self._slots):
            raise WireError(f"room {target.room} was granted slot {target.slot} of {len(self._slots)}")

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            assert self._slots is not None, "metadata goes to the reader's leader"
            data = torch.frombuffer(bytearray(write.data), dtype=torch.uint8)
            self._slots[write.target.slot, : len(write.data)] = data
            return DONE
        move = write.move
        first, rest = _halves(move)
        self._copy(first)
        self._faults.in_write()
        self._copy(rest)
        for part in move.parts:
            for buffer in self._chosen(self._layout, part.pool)[:1]:
                self._faults.after_seal(self._region, buffer.offset(0, part.targets[0]) + self._first_byte(buffer))
        return DONE

    def _copy(self, move: Move) -> None:
        ours, theirs = self._source.layout, self._layout
        if self._cut is None:
            copy_state(move, self._source.region, ours, self._region, theirs)
            return
        for part in move.parts:
            copy_common(
                self._chosen(ours, part.pool), self._source.region, (ours.counts[part.pool], part.sources),
                self._chosen(theirs, part.pool), self._region, (theirs.counts[part.pool], part.targets),
                ours.spec.page_tokens,
            )  # fmt: skip

    def _chosen(self, layout: PoolSetLayout, pool: str) -> tuple[BufferLayout, ...]:
        return layout.buffers[pool] if self._cut is None else chosen(layout.buffers[pool], self._cut.get(pool, ()))

    def _first_byte(self, buffer: BufferLayout) -> int:
        """Where in an entry of the reader's buffer this link writes its first byte."""
        spec = buffer.spec
        if not spec.heads:
            return 0
        pool = next(p for p in self._layout.spec.pools if spec in p.buffers)
        mine = next(b for b in self._source.spec.by_name[pool.name].buffers if b.name == spec.name)
        return (common(mine, spec).start - spec.first_head) * (spec.shape_bytes // spec.shape[0])

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._notify(data)

    def cut(self) -> bool:
        return self._watch is not None and self._watch.cut()

    @property
    def up(self) -> bool:
        return self._watch is None or self._watch.was_up

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._close()


def _halves(move: Move) -> tuple[Move, Move]:
    """The first half of what it moves of each pool, and the rest."""
    cuts = [(part, (len(part.sources) + 1) // 2) for part in move.parts]
    first = tuple(Part(p.pool, p.sources[:cut], p.targets[:cut]) for p, cut in cuts)
    rest = tuple(Part(p.pool, p.sources[cut:], p.targets[cut:]) for p, cut in cuts if len(p.sources) > cut)
    return Move(first), Move(rest)


class LocalPlane:
    """Reader and writer in one process: for tests, and for trying things out without a cluster."""

    kind = "local"
    revocable = False
    _readers: ClassVar[dict[str, LocalPlane]] = {}

    def __init__(self, faults: FaultsConfig, wake: Wake, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size
        self._token = secrets.token_hex(16)
        self._arrived: deque[bytes] = deque()
        self._wake = wake
        self._faults = WriteFaults(faults)
        self.dropped = 0
        self._readers[self._token] = self

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools, self._slots = pools, slots

    def describe(self) -> dict[str, Any]:
        return {"ranks": [{"token": self._token}]}

    def connect(self, descriptor: dict[str, Any]) -> Link:
        return fan(self._pools.spec.whole, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: Cut | None) -> Link:
        reader = self._readers.get(said(descriptor, "token", str))
        if reader is None:
            raise LayoutMismatch("plane local: the reader isn't in this process, or is closed")

        def notify(data: bytes) -> None:
            reader._arrived.append(data)
            reader._wake()

        pools, slots = reader._pools, reader._slots
        if slots is None and reader._rank == 0:
            raise LayoutMismatch("plane local: the reader has no metadata slots")
        return DirectLink(self._pools, pools.region, pools.layout, slots, notify, None, lambda: None, self._faults, cut)

    def permit(self, target: Target) -> None: ...

    def revoke(self, room: RoomId) -> None: ...

    def hear(self) -> None: ...

    def poll(self) -> list[bytes]:
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), AT_ONCE))]

    def settled(self, rank: int, settled: Arrival) -> None: ...

    def take_settled(self) -> list[Arrival]:
        return []

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return ()

    def close(self) -> None:
        self._readers.pop(self._token, None)


class ShmPlane:
    """Writer and reader on one host, in two processes."""

    kind = "shm"
    revocable = False

    def __init__(
        self,
        faults: FaultsConfig,
        host: str,
        curve: Curve | None,
        rank: int = 0,
        size: int = 1,
        link_timeout_s: float = LINK_TIMEOUT_S,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """`frame_bytes`: the longest notice that is taken in."""
        self._rank, self._size = rank, size
        self._link_timeout_s = link_timeout_s
        self._nonce = secrets.token_bytes(_HEAD)
        self._segments: dict[str, tuple[int, int]] = {}
        self._maps: list[mmap.mmap] = []
        self._faults = WriteFaults(faults)
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._notices = self._context.socket(zmq.PULL)
        self._notices.set(zmq.RCVHWM, WAITING)
        self._notices.set(zmq.MAXMSGSIZE, frame_bytes)
        keep_alive(self._notices, link_timeout_s)
        self._endpoint = detour(bind(self._notices, host, curve), "data", str(os.getpid()), faults.proxy)
        self.dropped = 0

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        fd = os.memfd_create(f"{_SEGMENT}{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _HEAD + nbytes)
        # A writer that has it mapped would die if it shrank.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        self._segments[name] = (fd, nbytes)
        memory = mmap.mmap(fd, _HEAD + nbytes)
        memory[:_HEAD] = self._nonce
        self._maps.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools = pools

    def describe(self) -> dict[str, Any]:
        mine = {
            "namespace": process.namespace(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "segments": {name: list(segment) for name, segment in self._segments.items()},
            "counts": dict(self._pools.layout.counts),
            "endpoint": self._endpoint,
        }
        return {"ranks": [mine]}

    def connect(self, descriptor: dict[str, Any]) -> Link:
        ranks = descriptor.get("ranks")
        if isinstance(ranks, list | tuple):
            counts = [said(part, "counts", dict) for part in ranks]
            if any(other != counts[0] for other in counts):
                raise LayoutMismatch(f"plane shm: the reader's ranks have different counts: {counts!r:.200}")
        return fan(self._pools.spec.whole, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: Cut | None) -> Link:
        here, there = process.namespace(), said(descriptor, "namespace", str)
        if there != here:
            raise LayoutMismatch(
                f"plane shm: the reader is on host {there:.200}, the writer on {here}; use transfer.plane=zmq"
            )
        segments, counts = said(descriptor, "segments", dict), said(descriptor, "counts", dict)
        most = {pool.name: counts.get(pool.name) for pool in spec.pools}
        if most != counts or not all(type(count) is int and 0 < count <= _MOST_COUNT for count in most.values()):
            raise LayoutMismatch(f"plane shm: the reader's counts must be of {sorted(most)}, got {counts!r:.200}")
        layout = PoolSetLayout(spec, counts)
        pages = self._map(descriptor, "pages", layout.nbytes)
        slots = self._map(descriptor, "slots").view(-1, SLOT_BYTES) if "slots" in segments else None
        if self._rank or slots is None:
            # Notices go from leader to leader: between other ranks there is nothing that a connection could lose.
            return DirectLink(self._pools, pages, layout, None, _no_notices, None, lambda: None, self._faults, cut)
        endpoint = said(descriptor, "endpoint", str)
        socket, watch = dial(self._context, endpoint, self._curve, self._link_timeout_s)
        return DirectLink(self._pools, pages, layout, slots, socket.send, watch, socket.close, self._faults, cut)

    def _map(self, descriptor: dict[str, Any], name: str, wanted: int | None = None) -> torch.Tensor:
        """Segment `name` of the reader, of `wanted` bytes; None: of any whole number of metadata slots.

        What is opened is one of our own segments, of the size that it should have, which can't shrink any more:
        whatever else a descriptor may name is not mapped.
        """
        pid, segment = said(descriptor, "pid", int), said(descriptor, "segments", dict).get(name)
        where = f"plane shm: {name} of process {pid}"
        if not isinstance(segment, list | tuple) or len(segment) != 2 or not all(type(n) is int for n in segment):
            raise LayoutMismatch(f"{where} must be a descriptor and a size, got {segment!r:.80}")
        fd, nbytes = segment
        if not (nbytes == wanted if wanted is not None else nbytes > 0 and nbytes % SLOT_BYTES == 0):
            raise LayoutMismatch(f"{where} has {nbytes} bytes, wanted {wanted or 'whole slots'}")
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_SEGMENT}"):
                raise LayoutMismatch(f"{where} is not a worker's segment")
            mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(mine).st_size != _HEAD + nbytes or fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    raise LayoutMismatch(f"{where} is not sealed at {nbytes} bytes")
                memory = mmap.mmap(mine, _HEAD + nbytes)
            finally:
                os.close(mine)
        except (OSError, ValueError, OverflowError) as error:
            raise LayoutMismatch(f"{where} can't be mapped: {error}") from None
        if memory[:_HEAD] != said(descriptor, "nonce", bytes):
            raise LayoutMismatch(f"plane shm: process {pid} isn't the one that described its memory")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD)

    def permit(self, target: Target) -> None: ...

    def revoke(self, room: RoomId) -> None: ...

    def hear(self) -> None: ...

    def poll(self) -> list[bytes]:
        return drain(self._notices)

    def settled(self, rank: int, settled: Arrival) -> None: ...

    def take_settled(self) -> list[Arrival]:
        return []

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._notices,)

    def close(self) -> None:
        self._notices.close(linger=0)
        for fd, _ in self._segments.values():
            os.close(fd)
        self._segments.clear()


def _no_notices(data: bytes) -> None:
    raise AssertionError("only leaders give notice, to leaders")


def drain(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Messages that have arrived, `AT_ONCE` at most. Those of several frames are nobody's."""
    out: list[bytes] = []
    for _ in range(AT_ONCE):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(frames) == 1:
            out.append(frames[0])
    return out
