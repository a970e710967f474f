"""Plane `zmq`: pages as messages over TCP, stored by the reader itself.

The reader copies, so access is revocable: a frame for a room that has ended is dropped and counted, and its pages
can be used again at once. A write names positions in the room's grant, never addresses; the reader looks them up.
Pages travel in the canonical page layout, one frame a pool, which ZMQ sends without another copy; a write of several
pools is one message, stored whole or not at all.

Between workers of several ranks each rank has its own socket at the reader, and a frame holds what the two ranks have
in common. Notices go to the leader, where they wait for the writes to other ranks (`transfer.planes.ordered_notices`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
import zmq

from cache.memory.head_slices import HeadSlice, chosen, copy_common, packed_layouts
from cache.memory.kv_cache_spec import PoolSetSpec
from cache.pool.pool_set import PoolSet
from contracts.config.cluster_config import FaultsConfig
from contracts.config.worker_config import TransferConfig
from contracts.errors import ConfigError, LayoutMismatch
from contracts.ids import RoomId
from contracts.messages.rank_orders import WriteArrived
from transfer.net.curve_keys import CurveKeys, bind, dial
from transfer.net.disconnects import keep_alive
from transfer.net.fault_injection import WriteFaults, via_proxy
from transfer.planes.data_plane import SLOT_BYTES, RoomTarget, WriteLink, said
from transfer.planes.ordered_notices import OrderedNotices
from transfer.planes.rank_fan import MOST_RANKS, fan, rank_cut, writers
from transfer.planes.shm_plane import AT_ONCE, WAITING
from transfer.planes.zmq_link import NOTICE_FRAME, PAGES_FRAME, SLOT_FRAME, PoolPacking, ZmqLink

# A received frame is read-only memory, and is only read.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning, "transfer.planes.zmq_plane")


LINK_TIMEOUT_S = TransferConfig().link_timeout_s
FRAME_BYTES = TransferConfig().frame_bytes
_POLL_BYTES = 32 * 1024 * 1024
"""Bytes that one poll takes in at most, so that a decode step never waits long."""


class ZmqPlane:
    """The data plane of a writer and a reader that TCP connects."""

    kind = "zmq"
    revocable = True

    def __init__(
        self,
        faults: FaultsConfig,
        host: str,
        curve: CurveKeys | None,
        rank: int = 0,
        size: int = 1,
        link_timeout_s: float = LINK_TIMEOUT_S,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """`frame_bytes`: the longest frame that is taken in, unless one page or a metadata slot has more."""
        self._rank, self._size = rank, size
        self._link_timeout_s, self._frame_bytes = link_timeout_s, frame_bytes
        self._host, self._endpoint = host, ""
        self._held = OrderedNotices(size, lambda sources, at: writers(self._pools.spec.whole, sources, at, size))
        self._settled: list[WriteArrived] = []
        self._due: list[bytes] = []
        self._faults = WriteFaults(faults)
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.set(zmq.RCVHWM, WAITING)
        keep_alive(self._inbound, link_timeout_s)
        self._proxy = faults.proxy
        self._targets: dict[RoomId, RoomTarget] = {}
        self._from: dict[tuple[int, int], dict[str, PoolPacking]] = {}
        self.dropped = 0

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools, self._slots = pools, slots
        if not self._endpoint:
            # Only now is the longest frame known, and limits of a socket must be set before `bind`.
            whole = pools.spec.whole
            self._frame_bytes = max(self._frame_bytes, SLOT_BYTES, *(whole.unit_bytes(p.name) for p in whole.pools))
            self._inbound.set(zmq.MAXMSGSIZE, self._frame_bytes)
            endpoint = bind(self._inbound, self._host, self._curve)
            self._endpoint = via_proxy(endpoint, "data", str(os.getpid()), self._proxy)

    def describe(self) -> dict[str, Any]:
        return {"ranks": [{"endpoint": self._endpoint, "frame_bytes": self._frame_bytes}]}

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        return fan(self._pools.spec.whole, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: HeadSlice | None) -> WriteLink:
        endpoint, frame_bytes = said(descriptor, "endpoint", str), said(descriptor, "frame_bytes", int)
        whole = self._pools.spec.whole
        least = max(whole.unit_bytes(pool.name) for pool in whole.pools)
        if frame_bytes < least:
            raise LayoutMismatch(f"plane zmq: the reader takes frames of {frame_bytes} bytes, one page has {least}")
        socket, watch = dial(self._context, endpoint, self._curve, self._link_timeout_s)
        ranks = (self._rank, self._size)
        return ZmqLink(self._pools, socket, watch, self._faults, ranks, spec, cut, frame_bytes)

    def permit(self, target: RoomTarget) -> None:
        self._targets[target.room] = target
        self._held.open(target.room)

    def revoke(self, room: RoomId) -> None:
        self._targets.pop(room, None)
        self._due += self._held.close(room)

    def settled(self, rank: int, settled: WriteArrived) -> None:
        self._held.settled(rank, RoomId(settled.room), settled.source, settled.number)

    def take_settled(self) -> list[WriteArrived]:
        settled, self._settled = self._settled, []
        return settled

    def poll_followers(self) -> None: ...

    def poll(self) -> list[bytes]:
        notices = [*self._due, *self._held.due()]
        self._due.clear()
        taken = 0
        for _ in range(AT_ONCE):
            if taken >= _POLL_BYTES:
                break
            try:
                kind, *frames = self._inbound.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            taken += sum(len(f.buffer) for f in frames)
            if kind.bytes == NOTICE_FRAME and len(frames) == 2:
                notices += self._notice(frames[0].bytes, frames[1].bytes)
            elif not self._store(kind.bytes, [f.buffer for f in frames]):
                self.dropped += 1
        return notices

    def _notice(self, head: bytes, data: bytes) -> list[bytes]:
        try:
            room, writes, sources = msgpack.unpackb(head)
            if not (type(room) is str and type(writes) is type(sources) is int and 0 < sources <= MOST_RANKS):
                raise ValueError(f"{writes} writes of {sources} ranks")
            return self._held.add(RoomId(room), data, writes, sources)
        except (ValueError, TypeError, ConfigError, msgpack.UnpackException):
            self.dropped += 1
            return []

    def _store(self, kind: bytes, frames: Sequence[memoryview]) -> bool:
        """Store a write into its room's places or slot. Returns False, with nothing stored, where it can't be read or
        was not granted."""
        if kind == SLOT_FRAME and len(frames) == 2:
            try:
                room, ticket = msgpack.unpackb(frames[0])
                target = self._granted(room, ticket)
            except (ValueError, TypeError, LookupError, msgpack.UnpackException):
                return False
            if self._slots is None or not 0 < len(frames[1]) <= SLOT_BYTES:
                return False
            self._slots[target.slot, : len(frames[1])] = torch.frombuffer(bytearray(frames[1]), dtype=torch.uint8)
            return True
        if kind != PAGES_FRAME or not frames:
            return False
        places: list[tuple[PoolPacking, tuple[int, ...]]] = []
        try:
            room, ticket, runs, source, sources, number = msgpack.unpackb(frames[0])
            if not (type(source) is type(sources) is type(number) is int and 0 <= source < sources <= MOST_RANKS):
                return False
            target = self._granted(room, ticket)
            packings = self._packings(source, sources)
            for (pool, first, count), frame in zip(runs, frames[1:], strict=True):
                if not type(first) is type(count) is int or count <= 0:
                    return False
                places.append((packings[pool], target.at(pool, range(first, first + count))))
                if len(frame) != count * packings[pool].page_bytes:
                    return False
        except (ValueError, TypeError, LookupError, ConfigError, msgpack.UnpackException):
            return False
        if len({packing.pool for packing, _ in places}) != len(places):
            return False
        layout = self._pools.layout
        for (packing, indices), frame in zip(places, frames[1:], strict=True):
            packed = torch.frombuffer(frame, dtype=torch.uint8)
            ends = (len(indices), range(len(indices))), (layout.counts[packing.pool], indices)
            copy_common(
                packing.frames, packed, ends[0], packing.mine, self._pools.region, ends[1], layout.spec.page_tokens
            )
        settled = WriteArrived(room, source, number)
        self._held.settled(self._rank, RoomId(settled.room), settled.source, settled.number)
        if self._rank:
            self._settled.append(settled)
        return True

    def _granted(self, room: str, ticket: int) -> RoomTarget:
        """Return the room's places. Raises `LookupError` for a room without a grant of this ticket."""
        target = self._targets[RoomId(room)]
        if target.ticket != ticket:
            raise LookupError(f"room {room} was granted to somebody else")
        return target

    def _packings(self, source: int, sources: int) -> dict[str, PoolPacking]:
        """Return the layouts of frames from rank `source` of a writer of `sources` ranks, by pool; worked out once."""
        found = self._from.get((source, sources))
        if found is None:
            whole, layout = self._pools.spec.whole, self._pools.layout
            theirs = whole.shard(source, sources)
            cut = rank_cut(whole, (source, sources), (self._rank, self._size))
            found = {}
            for pool, names in cut.items():
                mine = chosen(layout.buffers[pool], names)
                its = [b for b in theirs.by_name[pool].buffers if b.name in names]
                frames = packed_layouts(its, [b.spec for b in mine], layout.spec.page_tokens)
                found[pool] = PoolPacking(pool, mine, tuple(frames))
            self._from[source, sources] = found
        return found

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._inbound,)

    def close(self) -> None:
        self._inbound.close(linger=0)
