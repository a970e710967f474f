"""Planes `zmq` and `staged`: pages over TCP connections, stored by the reader itself.

The reader copies, so access is revocable: what comes for a room that has ended is dropped and counted, and its pages
can be used again at once. A write names positions in the room's grant, never addresses; the reader looks them up before
it stores anything, and a write of several pools that doesn't fit in one is stored in none.

Pages go down plain sockets (`transfer.planes.tcp.zmq_link`), on threads of their own at both ends and without a
copy by either process: the kernel takes them from the writer's pages and puts them into the reader's
(`transfer.planes.tcp.data_listener`). Off the loopback what they carry is sealed. Notices and metadata go over a ZMQ
socket and may overtake pages: a notice waits for the writes before it (`transfer.planes.one_sided`).

Between workers of several ranks each rank has its own sockets at the reader, and a write holds what the two ranks have
in common. Notices go to the leader.

Plane `staged` is the same for pools anywhere: at either end pages go through bounce buffers in host memory
(`transfer.planes.tcp.bounce_buffers`), which a device copies from and to.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import torch
import zmq

from twinpool.cache.device.device_copies import CPU, zeroed
from twinpool.cache.memory.head_slices import HeadSlice, RankCount, chosen, of_layers
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived
from twinpool.transfer.net.fault_injection import WriteFaults, via_proxy
from twinpool.transfer.net.sealed_stream import SALT_BYTES
from twinpool.transfer.net.zmq_sockets import CurveKeys, bind, dial
from twinpool.transfer.planes.data_plane import (
    SLOT_BYTES,
    RoomTarget,
    WakeCallback,
    WriteLink,
    refuse_device_memory,
    said,
)
from twinpool.transfer.planes.one_sided import AT_ONCE, OrderedNotices, pull_socket
from twinpool.transfer.planes.rank_fan import fan, packed_ranks, rank_cut, unpacked_ranks, writers
from twinpool.transfer.planes.tcp.bounce_buffers import Staging, StreamPart, buffer_bytes, loads
from twinpool.transfer.planes.tcp.data_listener import DataListener, Landing, LandingPart
from twinpool.transfer.planes.tcp.page_stream import PoolStream, bytes_of, shared
from twinpool.transfer.planes.tcp.zmq_link import NOTICE_FRAME, SLOT_FRAME, DataDoor, PageWay, ZmqLink


@dataclass(eq=False)
class _Granted:
    """A room's places, until they are revoked."""

    target: RoomTarget
    revoked: bool = False


class ZmqPlane:
    """The data plane of a writer and a reader that TCP connects."""

    revocable = True
    by_peer = False

    def __init__(
        self,
        transfer: TransferConfig,
        faults: FaultsConfig,
        host: str,
        curve: CurveKeys | None,
        rank: int = 0,
        size: int = 1,
        wake: WakeCallback = lambda: None,
    ) -> None:
        """`transfer`: with ``staged``, pages go through bounce buffers; else they lie in host memory. `wake`: called,
        on any thread, when `poll` or a completion has news."""
        self.kind = "staged" if transfer.plane == "staged" else "zmq"
        self._bounce_bytes = transfer.bounce_bytes if transfer.plane == "staged" else None
        self._staging: Staging | None = None
        self._rank, self._size = rank, size
        self._link_timeout_s, self._frame_bytes = transfer.link_timeout_s, transfer.frame_bytes
        self._lanes = transfer.connections
        self._host, self._endpoint, self._data_endpoint = host, "", ""
        self._held = OrderedNotices(size, lambda sources, at: writers(self._pools.spec, sources, at, size))
        self._stored: deque[WriteArrived | None] = deque()
        """Writes that were stored, and a None for each that was dropped, until `poll` takes them in."""
        self._settled: list[WriteArrived] = []
        self._due: list[bytes] = []
        self._faults, self._proxy = WriteFaults(faults), faults.proxy
        self._curve, self._wake = curve, wake
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbound = pull_socket(
            self._context, transfer.link_timeout_s, max(SLOT_BYTES, transfer.control_frame_bytes)
        )
        self._listener: DataListener | None = None
        self._granted: dict[RoomId, _Granted] = {}
        self._from: dict[tuple[int, int], dict[str, PoolStream]] = {}
        self.dropped = 0

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        if self._bounce_bytes is None:
            refuse_device_memory(self.kind, device)
        return zeroed(nbytes, device)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools, self._slots = pools, slots
        if self._listener is None:
            # Only now is the longest write known.
            whole = pools.spec.whole
            self._frame_bytes = max(self._frame_bytes, *(whole.unit_bytes(p.name) for p in whole.pools))
            most, sealed = self._frame_bytes * len(whole.pools), self._curve is not None
            if self._bounce_bytes is not None:
                self._staging = Staging(pools.region, buffer_bytes(whole, self._bounce_bytes))
            endpoint = bind(self._inbound, self._host, self._curve)
            self._endpoint = via_proxy(endpoint, "data", str(os.getpid()), self._proxy)
            self._listener = DataListener(self._host, most, self._link_timeout_s, self._landing, sealed, self._staging)
            self._data_endpoint = via_proxy(self._listener.endpoint, "pages", str(os.getpid()), self._proxy)
            if self._staging is None:
                self._region = bytes_of(pools.region)

    def describe(self, peer: str = "") -> dict[str, Any]:
        assert self._listener is not None, "to be registered before it is described"
        places = {"endpoint": self._endpoint, "pages": self._data_endpoint}
        return {"ranks": [{**places, "secret": self._listener.secret, "frame_bytes": self._frame_bytes}]}

    def sever(self, peer: str) -> None: ...

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        return fan(self._pools.spec, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: HeadSlice | None) -> WriteLink:
        endpoint, frame_bytes = said(descriptor, "endpoint", str), said(descriptor, "frame_bytes", int)
        address, secret = _address(said(descriptor, "pages", str)), said(descriptor, "secret", bytes)
        if len(secret) != SALT_BYTES:
            raise LayoutMismatch(
                f"plane {self.kind}: the reader's secret must have {SALT_BYTES} bytes, got {len(secret)}"
            )
        whole = self._pools.spec.whole
        least = max(whole.unit_bytes(pool.name) for pool in whole.pools)
        if frame_bytes < least:
            raise LayoutMismatch(
                f"plane {self.kind}: the reader takes frames of {frame_bytes} bytes, one page has {least}"
            )
        names = {p.name: tuple(b.name for b in p.buffers) for p in spec.pools} if cut is None else cut
        streams = {pool: self._stream(pool, names[pool], spec) for pool in names}
        socket, watch = dial(self._context, endpoint, self._curve, self._link_timeout_s)
        door = DataDoor(address, secret, self._curve is not None, self._link_timeout_s)
        pages = PageWay(door, self._lanes, frame_bytes, self._staging)
        ranks = self._rank, packed_ranks(RankCount(self._size, self._pools.spec.stages))
        return ZmqLink(self._pools, socket, watch, pages, streams, ranks, self._faults, self._wake)

    def _stream(self, pool: str, names: Sequence[str], other: PoolSetSpec) -> PoolStream:
        """Return the byte stream of a pool's buffers `names` between this rank and one with the pools `other`."""
        layout = self._pools.layout
        mine = chosen(layout.buffers[pool], names)
        theirs = [b for b in other.by_name[pool].buffers if b.name in names]
        sent = shared(mine, theirs)
        mine = tuple(of_layers([buffer], spec.here)[0] for buffer, spec in zip(mine, sent, strict=True))
        return PoolStream(pool, layout.counts[pool], mine, sent, layout.spec.page_tokens)

    def permit(self, target: RoomTarget) -> None:
        self._granted[target.room] = _Granted(target)
        self._held.open(target.room)

    def revoke(self, room: RoomId) -> None:
        granted = self._granted.pop(room, None)
        if granted is not None:
            granted.revoked = True
            if self._listener is not None:
                self._listener.settle()
        self._due += self._held.close(room)

    def settled(self, rank: int, settled: WriteArrived) -> None:
        self._held.settled(rank, RoomId(settled.room), settled.source, settled.number)

    def take_settled(self) -> list[WriteArrived]:
        settled, self._settled = self._settled, []
        return settled

    def poll_followers(self) -> None: ...

    def poll(self) -> list[bytes]:
        while self._stored:
            settled = self._stored.popleft()
            if settled is None:
                self.dropped += 1
                continue
            self.settled(self._rank, settled)
            if self._rank:
                self._settled.append(settled)
        notices = [*self._due, *self._held.due()]
        self._due.clear()
        for _ in range(AT_ONCE):
            try:
                frames = self._inbound.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                notices += self._heard(frames)
            except (ValueError, TypeError, LookupError, ConfigError, msgpack.UnpackException):
                self.dropped += 1
        return notices

    def _heard(self, frames: list[bytes]) -> list[bytes]:
        """Take in a message; returns the notices that are due with it. Raises one of many errors for what is none."""
        kind, about, data = frames
        if kind == NOTICE_FRAME:
            room, writes, sources = msgpack.unpackb(about)
            if not (type(room) is str and type(writes) is type(sources) is int):
                raise ValueError(f"{writes} writes of {sources} ranks")
            unpacked_ranks(sources)
            return self._held.add(RoomId(room), data, writes, sources)
        if kind != SLOT_FRAME or self._slots is None or not 0 < len(data) <= SLOT_BYTES:
            raise ValueError(f"{kind!r:.80} of {len(data)} bytes")
        room, ticket = msgpack.unpackb(about)
        target = self._granted_to(room, ticket).target
        self._slots[target.slot, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return []

    # ------------------------------------------------------------ called on the threads of connections

    def _landing(self, head: bytes, nbytes: int) -> Landing | None:
        """Return where a write goes. None, with nothing stored, where it can't be read or was not granted."""
        try:
            return self._places(head, nbytes)
        except (ValueError, TypeError, LookupError, ConfigError, msgpack.UnpackException):
            self._news(None)
            return None

    def _places(self, head: bytes, nbytes: int) -> Landing:
        room, ticket, runs, source, sources, number = msgpack.unpackb(head)
        if not (type(source) is type(sources) is type(number) is int and 0 <= source < unpacked_ranks(sources).size):
            raise ValueError(f"rank {source} of {sources}")
        granted = self._granted_to(room, ticket)
        streams, parts, pools = self._streams(source, sources), list[StreamPart](), set[str]()
        for pool, first, count, *layers in runs:
            if any(type(n) is not int for n in (first, count, *layers)) or count <= 0 or pool in pools:
                raise ValueError(f"{count} pages of {pool}")
            pools.add(pool)
            pages = granted.target.at(pool, range(first, first + count))
            stream = streams[pool]
            if layers:
                begin, stop = layers
                if not 0 <= begin < stop <= stream.layers:
                    raise ValueError(f"layers {begin}..{stop - 1} of {pool}")
                stream = stream.of_layers(range(begin, stop))
            parts.append((stream, pages))
        if sum(len(pages) * stream.page_bytes for stream, pages in parts) != nbytes:
            raise ValueError(f"{nbytes} bytes for {runs!r:.80}")
        arrived = WriteArrived(room, source, number)
        bounced = None if self._staging is None else loads(parts, self._staging.nbytes)
        return Landing(
            lambda: granted.revoked,
            [self._part(*part) for part in parts] if bounced is None else (),
            lambda: self._news(None if granted.revoked else arrived),
            bounced,
        )

    def _part(self, stream: PoolStream, pages: Sequence[int]) -> LandingPart:
        store = partial(self._unpack, stream, pages)
        return LandingPart(len(pages) * stream.page_bytes, stream.rows(self._region, pages), store)

    def _unpack(self, stream: PoolStream, pages: Sequence[int], packed: memoryview) -> None:
        stream.unpack(torch.frombuffer(packed, dtype=torch.uint8), self._pools.region, pages)

    def _news(self, stored: WriteArrived | None) -> None:
        self._stored.append(stored)
        self._wake()

    def _granted_to(self, room: str, ticket: int) -> _Granted:
        """Return the room's places. Raises `LookupError` for a room without a grant of this ticket."""
        granted = self._granted[RoomId(room)]
        if granted.target.ticket != ticket:
            raise LookupError(f"room {room} was granted to somebody else")
        return granted

    def _streams(self, source: int, sources: int) -> dict[str, PoolStream]:
        """Return the byte streams from rank `source` of a writer of `sources` ranks, by pool; worked out once."""
        found = self._from.get((source, sources))
        if found is None:
            writer, reader = unpacked_ranks(sources), RankCount(self._size, self._pools.spec.stages)
            theirs = self._pools.spec.whole.shard(source, *writer)
            cut = rank_cut(self._pools.spec.whole, (source, writer), (self._rank, reader))
            found = {pool: self._stream(pool, names, theirs) for pool, names in cut.items()}
            self._from[source, sources] = found
        return found

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._inbound,)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._inbound.close(linger=0)


def _address(endpoint: str) -> tuple[str, int]:
    """Return the host and port of an endpoint. Raises `LayoutMismatch` where it is none."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (endpoint.startswith("tcp://") and host and port.isdecimal() and int(port) < 1 << 16):
        raise LayoutMismatch(f"pages must go to tcp://HOST:PORT, got {endpoint!r:.80}")
    return host, int(port)
