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
from cache.moves import Move, Part, copy_state
from cache.pools import PoolSet
from cache.registry import PoolSetLayout
from contracts.config import FaultsConfig
from contracts.errors import LayoutMismatch
from contracts.ids import RoomId
from transfer import process
from transfer.faults import WriteFaults
from transfer.metadata import SLOT_BYTES
from transfer.plane import PageWrite, SlotWrite, Target, Wake
from transfer.security import Curve, bind, dial

_HEAD = 64
"""Bytes in front of a segment: a nonce, by which a writer knows that it mapped what was described."""


class DirectLink:
    """Writes into memory that is mapped here."""

    def __init__(
        self,
        source: PoolSet,
        region: torch.Tensor,
        layout: PoolSetLayout,
        slots: torch.Tensor,
        notify: Callable[[bytes], None],
        close: Callable[[], None],
        faults: WriteFaults,
    ) -> None:
        self._source = source
        self._region = region
        self._layout = layout
        self._slots = slots
        self._notify = notify
        self._close = close
        self._faults = faults

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            data = torch.frombuffer(bytearray(write.data), dtype=torch.uint8)
            self._slots[write.target.slot, : len(write.data)] = data
            return DONE
        move = write.move
        first, rest = _halves(move)
        copy_state(first, self._source.region, self._source.layout, self._region, self._layout)
        self._faults.in_write()
        copy_state(rest, self._source.region, self._source.layout, self._region, self._layout)
        for part in move.parts:
            buffer = self._layout.buffers[part.pool][0]
            self._faults.after_seal(self._region, buffer.offset(0, part.targets[0]))
        return DONE

    def notify(self, data: bytes) -> None:
        self._notify(data)

    def close(self) -> None:
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

    def __init__(self, faults: FaultsConfig, wake: Wake) -> None:
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
        return {"token": self._token}

    def connect(self, descriptor: dict[str, Any]) -> DirectLink:
        reader = self._readers.get(str(descriptor.get("token")))
        if reader is None:
            raise LayoutMismatch("plane local: the reader isn't in this process, or is closed")

        def notify(data: bytes) -> None:
            reader._arrived.append(data)
            reader._wake()

        pools, slots = reader._pools, reader._slots
        if slots is None:
            raise LayoutMismatch("plane local: the reader has no metadata slots")
        return DirectLink(self._pools, pools.region, pools.layout, slots, notify, lambda: None, self._faults)

    def permit(self, target: Target) -> None: ...

    def revoke(self, room: RoomId) -> None: ...

    def poll(self) -> list[bytes]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return ()

    def close(self) -> None:
        self._readers.pop(self._token, None)


class ShmPlane:
    """Writer and reader on one host, in two processes."""

    kind = "shm"
    revocable = False

    def __init__(self, faults: FaultsConfig, host: str, curve: Curve | None) -> None:
        self._nonce = secrets.token_bytes(_HEAD)
        self._segments: dict[str, tuple[int, int]] = {}
        self._maps: list[mmap.mmap] = []
        self._faults = WriteFaults(faults)
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._notices = self._context.socket(zmq.PULL)
        self._notices.set(zmq.RCVHWM, 0)
        self._endpoint = bind(self._notices, host, curve)
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
        return {
            "namespace": process.namespace(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "segments": {name: list(segment) for name, segment in self._segments.items()},
            "counts": dict(self._pools.layout.counts),
            "endpoint": self._endpoint,
        }

    def connect(self, descriptor: dict[str, Any]) -> DirectLink:
        here = process.namespace()
        if descriptor["namespace"] != here:
            raise LayoutMismatch(
                f"plane shm: the reader is on host {descriptor['namespace']}, the writer on {here}; "
                "use transfer.plane=zmq"
            )
        pages, slots = (self._map(descriptor, name) for name in ("pages", "slots"))
        layout = PoolSetLayout(self._pools.layout.spec, descriptor["counts"])
        socket = dial(self._context, descriptor["endpoint"], self._curve)
        slots = slots.view(-1, SLOT_BYTES)
        return DirectLink(self._pools, pages, layout, slots, socket.send, socket.close, self._faults)

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

    def poll(self) -> list[bytes]:
        return drain(self._notices)

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._notices,)

    def close(self) -> None:
        self._notices.close(linger=0)
        for fd, _ in self._segments.values():
            os.close(fd)
        self._segments.clear()


def drain(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Every message that has arrived."""
    out = []
    while True:
        try:
            out.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return out
