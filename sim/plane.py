"""Data planes over the simulated network: implement `transfer.plane.Plane`.

shm   the writer stores into the reader's memory, the second half of a write some time after the first: if it
      stands still in between, it stores the rest whenever it goes on, whatever has become of those pages (A5)
zmq   what is written travels, and the reader stores it if the room still exists
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from cache.device import DONE, Completion
from cache.moves import Move, Part, copy_state, gather, scatter
from cache.pools import PoolSet
from contracts.errors import LayoutMismatch
from contracts.ids import RoomId
from sim.network import Network
from sim.process import Process
from transfer.metadata import SLOT_BYTES
from transfer.plane import Link, PageWrite, SlotWrite, Target


class Damage:
    """Bytes that flip on their way."""

    def __init__(self) -> None:
        self.due = 0
        self.done = 0

    def strike(self, region: torch.Tensor, offset: int) -> None:
        if self.due:
            self.due -= 1
            self.done += 1
            region[offset] ^= 0x40


class SimPlane:
    """One worker's end."""

    def __init__(
        self,
        kind: str,
        network: Network,
        process: Process,
        planes: dict[int, SimPlane],
        rng: random.Random,
        damage: Damage,
        wake: Callable[[], None],
    ) -> None:
        self.kind, self.revocable = kind, kind == "zmq"
        self.network, self.process, self.rng, self.damage = network, process, rng, damage
        self.dropped = 0
        self.halt: Callable[[], None] | None = None
        """Called once, in the middle of the next write of pages."""
        self._planes, self._wake = planes, wake
        self._arrived: deque[bytes | _Frames] = deque()
        self._permitted: dict[RoomId, Target] = {}
        planes[process.pid] = self

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self.pools, self.slots = pools, slots

    def describe(self) -> dict[str, Any]:
        return {"ranks": [{"pid": self.process.pid, "node": self.process.node}]}

    def connect(self, descriptor: dict[str, Any]) -> Link:
        (part,) = descriptor["ranks"]
        reader = self._planes[part["pid"]]
        if self.kind == "zmq":
            return SentLink(self, reader)
        if part["node"] != self.process.node or not reader.process.alive:
            raise LayoutMismatch(f"plane shm: the reader {reader.process} can't be reached from {self.process}")
        return StoredLink(self, reader)

    def permit(self, target: Target) -> None:
        self._permitted[target.room] = target

    def revoke(self, room: RoomId) -> None:
        self._permitted.pop(room, None)

    def arrive(self, item: bytes | _Frames) -> None:
        self._arrived.append(item)
        self._wake()

    def hear(self) -> None: ...

    def poll(self) -> list[bytes]:
        notices: list[bytes] = []
        while self._arrived:
            item = self._arrived.popleft()
            if isinstance(item, bytes):
                notices.append(item)
            elif not self._store(item):
                self.dropped += 1
        return notices

    def _store(self, frames: _Frames) -> bool:
        target = self._permitted.get(frames.room)
        if target is None:
            return False
        if frames.slot is not None:
            assert self.slots is not None
            self.slots[target.slot, : len(frames.slot)] = torch.frombuffer(bytearray(frames.slot), dtype=torch.uint8)
        for pool, numbers, packed in frames.parts:
            scatter(packed, self.pools.region, self.pools.layout, pool, target.at(pool, numbers))
        return True

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return ()

    def close(self) -> None: ...


class _Frames:
    """What one write of plane zmq sends."""

    def __init__(
        self, room: RoomId, parts: Sequence[tuple[str, range, torch.Tensor]] = (), slot: bytes | None = None
    ) -> None:
        self.room, self.parts, self.slot = room, parts, slot


class SentLink:
    """Implements `transfer.plane.Link` for plane zmq."""

    def __init__(self, writer: SimPlane, reader: SimPlane) -> None:
        self._writer, self._reader = writer, reader
        self._cut = False
        self._pipe = writer.network.pipe(writer.process, reader.process, self._reset)

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            self._send(_Frames(write.target.room, slot=write.data))
            return DONE
        pools, parts = self._writer.pools, []
        for pool, run in write.runs.items():
            packed = gather(pools.region, pools.layout, pool, run.indices)
            self._writer.damage.strike(packed.view(-1), 0)
            parts.append((pool, run.numbers, packed))
        self._send(_Frames(write.target.room, parts))
        return DONE

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._send(data)

    def _send(self, item: bytes | _Frames) -> None:
        reader = self._reader
        self._pipe.send(lambda: reader.arrive(item))

    def _reset(self) -> None:
        self._cut = True

    def cut(self) -> bool:
        cut, self._cut = self._cut, False
        return cut

    def close(self) -> None: ...


class StoredLink:
    """Implements `transfer.plane.Link` for plane shm."""

    def __init__(self, writer: SimPlane, reader: SimPlane) -> None:
        self._writer, self._reader = writer, reader
        self._cut = False
        self._pipe = writer.network.pipe(writer.process, reader.process, self._reset)

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        reader = self._reader
        if isinstance(write, SlotWrite):
            assert reader.slots is not None
            assert len(write.data) <= SLOT_BYTES
            slot = torch.frombuffer(bytearray(write.data), dtype=torch.uint8)
            reader.slots[write.target.slot, : len(write.data)] = slot
            return DONE
        first, rest = _halves(write.move)
        self._copy(first)
        store = _Store(lambda: self._copy(rest))
        halt, self._writer.halt = self._writer.halt, None
        if halt is not None:
            halt()
        self._writer.process.later(self._writer.rng.random() * 0.004, store.wait)
        return store

    def _copy(self, move: Move) -> None:
        ours, theirs = self._writer.pools, self._reader.pools
        copy_state(move, ours.region, ours.layout, theirs.region, theirs.layout)
        for part in move.parts:
            buffer = theirs.layout.buffers[part.pool][0]
            self._writer.damage.strike(theirs.region, buffer.offset(0, part.targets[0]))

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        reader = self._reader
        self._pipe.send(lambda: reader.arrive(data))

    def _reset(self) -> None:
        self._cut = True

    def cut(self) -> bool:
        cut, self._cut = self._cut, False
        return cut

    def close(self) -> None: ...


class _Store:
    """The rest of a write: done by whoever comes first, the time or somebody who waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    @property
    def done(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    def order(self) -> None:
        self.wait()


def _halves(move: Move) -> tuple[Move, Move]:
    """The first half of what it moves of each pool, and the rest."""
    cuts = [(part, (len(part.sources) + 1) // 2) for part in move.parts]
    first = tuple(Part(p.pool, p.sources[:cut], p.targets[:cut]) for p, cut in cuts)
    rest = tuple(Part(p.pool, p.sources[cut:], p.targets[cut:]) for p, cut in cuts if len(p.sources) > cut)
    return Move(first), Move(rest)
