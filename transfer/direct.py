"""Planes whose writer stores straight into the reader's memory: `local` (one process) and `shm` (one host).

Neither is revocable: a stopped writer that comes back finishes its store, whatever happened meanwhile. In `shm` a
reader's memory is an anonymous memfd, which the writer opens through the reader's `/proc/PID/fd`; it has no name, so
nothing stays behind when processes die. Notices go over a ZMQ socket, after the stores they tell of.
"""

from __future__ import annotations

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
from contracts.errors import LayoutMismatch
from contracts.ids import RoomId
from contracts.orders import Arrival
from transfer import process
from transfer.cuts import CutWatch, keep_alive
from transfer.detour import detour
from transfer.fan import fan
from transfer.faults import WriteFaults
from transfer.metadata import SLOT_BYTES
from transfer.plane import Link, PageWrite, SlotWrite, Target, Wake
from transfer.security import Curve, bind, dial

LINK_TIMEOUT_S = TransferConfig().link_timeout_s
_HEAD = 64
"""Bytes in front of a segment: a nonce, by which a writer knows that it mapped what was described."""


class DirectLink:
    """Writes into memory that is mapped here."""

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
        reader = self._readers.get(str(descriptor.get("token")))
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
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

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
    ) -> None:
        self._rank, self._size = rank, size
        self._link_timeout_s = link_timeout_s
        self._nonce = secrets.token_bytes(_HEAD)
        self._segments: dict[str, tuple[int, int]] = {}
        self._maps: list[mmap.mmap] = []
        self._faults = WriteFaults(faults)
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._notices = self._context.socket(zmq.PULL)
        self._notices.set(zmq.RCVHWM, 0)
        keep_alive(self._notices, link_timeout_s)
        self._endpoint = detour(bind(self._notices, host, curve), "data", str(os.getpid()), faults.proxy)
        self.dropped = 0

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        fd = os.memfd_create(f"twinpool-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEAD + nbytes)
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
        return fan(self._pools.spec.whole, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: Cut | None) -> Link:
        here = process.namespace()
        if descriptor["namespace"] != here:
            raise LayoutMismatch(
                f"plane shm: the reader is on host {descriptor['namespace']}, the writer on {here}; "
                "use transfer.plane=zmq"
            )
        pages = self._map(descriptor, "pages")
        slots = self._map(descriptor, "slots").view(-1, SLOT_BYTES) if "slots" in descriptor["segments"] else None
        layout = PoolSetLayout(spec, descriptor["counts"])
        if self._rank or slots is None:
            # Notices go from leader to leader: between other ranks there is nothing that a connection could lose.
            return DirectLink(self._pools, pages, layout, None, _no_notices, None, lambda: None, self._faults, cut)
        socket, watch = dial(self._context, descriptor["endpoint"], self._curve, self._link_timeout_s)
        return DirectLink(self._pools, pages, layout, slots, socket.send, watch, socket.close, self._faults, cut)

    def _map(self, descriptor: dict[str, Any], name: str) -> torch.Tensor:
        fd, nbytes = descriptor["segments"][name]
        try:
            mine = os.open(f"/proc/{descriptor['pid']}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(mine, _HEAD + nbytes)
            finally:
                os.close(mine)
        except (OSError, ValueError) as error:
            raise LayoutMismatch(f"plane shm: can't map {name} of process {descriptor['pid']}: {error}") from None
        if memory[:_HEAD] != descriptor["nonce"]:
            raise LayoutMismatch(f"plane shm: process {descriptor['pid']} isn't the one that described its memory")
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
    """Every message that has arrived."""
    out = []
    while True:
        try:
            out.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return out
