"""Plane `zmq`: pages as messages over TCP, stored by the reader itself.

The reader copies, so access is revocable: a frame for a room that has ended is dropped and counted, and its pages
can be used again at once. A write names positions in the room's grant, never addresses; the reader looks them up.
Pages travel in the canonical page layout, one frame a pool, which ZMQ sends without another copy; a write of several
pools is one message, stored whole or not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
import zmq

from cache.device import DONE, Completion
from cache.moves import gather, scatter
from cache.pools import PoolSet
from contracts.config import FaultsConfig
from contracts.ids import RoomId
from transfer.faults import WriteFaults
from transfer.metadata import SLOT_BYTES
from transfer.plane import PageWrite, SlotWrite, Target
from transfer.security import Curve, bind, dial

# A received frame is read-only memory, and only read.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning, "transfer.tcp")

_PAGES, _SLOT, _NOTICE = b"P", b"S", b"N"
_POLL_BYTES = 32 * 1024 * 1024
"""Stored in one poll at most, so that a decode step never waits long."""


class ZmqLink:
    """Sends pages, slots and notices down one socket, so they arrive in order."""

    def __init__(self, source: PoolSet, socket: zmq.Socket[bytes], faults: WriteFaults) -> None:
        self._source = source
        self._socket = socket
        self._faults = faults

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            self._socket.send_multipart([_SLOT, write.target.room.encode(), write.data])
            return DONE
        region, layout = self._source.region, self._source.layout
        packed = [gather(region, layout, pool, indices) for pool, indices in write.sources.items()]
        self._faults.in_write()
        for part in packed:
            self._faults.after_seal(part.view(-1), 0)
        runs = [(pool, run.first, len(run)) for pool, run in write.runs.items()]
        frames = [memoryview(part.numpy()) for part in packed]  # type: ignore[arg-type]
        self._socket.send_multipart([_PAGES, msgpack.packb((write.target.room, runs))], zmq.SNDMORE)
        self._socket.send_multipart(frames, 0, copy=False)
        return DONE

    def notify(self, data: bytes) -> None:
        self._socket.send_multipart([_NOTICE, data])

    def close(self) -> None:
        self._socket.close(linger=0)


class ZmqPlane:
    """Writer and reader anywhere that TCP reaches."""

    kind = "zmq"
    revocable = True

    def __init__(self, faults: FaultsConfig, host: str, curve: Curve | None) -> None:
        self._faults = WriteFaults(faults)
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.set(zmq.RCVHWM, 0)
        self._endpoint = bind(self._inbound, host, curve)
        self._targets: dict[RoomId, Target] = {}
        self.dropped = 0

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools, self._slots = pools, slots

    def describe(self) -> dict[str, Any]:
        return {"endpoint": self._endpoint}

    def connect(self, descriptor: dict[str, Any]) -> ZmqLink:
        socket = dial(self._context, descriptor["endpoint"], self._curve)
        return ZmqLink(self._pools, socket, self._faults)

    def permit(self, target: Target) -> None:
        self._targets[target.room] = target

    def revoke(self, room: RoomId) -> None:
        self._targets.pop(room, None)

    def poll(self) -> list[bytes]:
        notices: list[bytes] = []
        stored = 0
        while stored < _POLL_BYTES:
            try:
                kind, *frames = self._inbound.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if kind.bytes == _NOTICE and len(frames) == 1:
                notices.append(frames[0].bytes)
            elif self._store(kind.bytes, [f.buffer for f in frames]):
                stored += sum(len(f.buffer) for f in frames)
            else:
                self.dropped += 1
        return notices

    def _store(self, kind: bytes, frames: Sequence[memoryview]) -> bool:
        """Store a write into its room's places or slot; False, with nothing stored, for what was not granted."""
        if kind == _SLOT and len(frames) == 2:
            target = self._targets.get(RoomId(bytes(frames[0]).decode(errors="replace")))
            if target is None or self._slots is None or len(frames[1]) > SLOT_BYTES:
                return False
            self._slots[target.slot, : len(frames[1])] = torch.frombuffer(bytearray(frames[1]), dtype=torch.uint8)
            return True
        if kind != _PAGES or not frames:
            return False
        layout = self._pools.layout
        places: list[tuple[str, tuple[int, ...]]] = []
        try:
            room, runs = msgpack.unpackb(frames[0])
            target = self._targets[room]
            for (pool, first, count), frame in zip(runs, frames[1:], strict=True):
                places.append((pool, target.at(pool, range(first, first + count))))
                if not count or len(frame) != count * layout.spec.unit_bytes(pool):
                    return False
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):
            return False
        for (pool, indices), frame in zip(places, frames[1:], strict=True):
            packed = torch.frombuffer(frame, dtype=torch.uint8).view(len(indices), -1)
            scatter(packed, self._pools.region, layout, pool, indices)
        return True

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._inbound,)

    def close(self) -> None:
        self._inbound.close(linger=0)
