"""Ways for chunks of pages to get from one process to another: our data planes, and what they are measured by.

A chunk is a list of pages. The writer's pages hold seeded noise, so the reader's can be compared afterwards: every
way delivers the same bytes, and a way that doesn't has no speed.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from twinpool.cache.device.device_port import Completion
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetLayout, PoolSetSpec, PoolSpec
from twinpool.cache.memory.page_moves import gather
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.zmq_channel import Waiter
from twinpool.transfer.planes.data_plane import SLOT_BYTES, DataPlane, PageNumbers, PageWrite, RoomTarget
from twinpool.transfer.planes.direct.cuda_ipc import CudaIpc, MappedRegion
from twinpool.transfer.planes.direct.direct_link import LocalPlane
from twinpool.transfer.planes.direct.shm_plane import ShmPlane
from twinpool.transfer.planes.nixl.nixl_agent import HOST_MEMORY, byte_runs, load_nixl
from twinpool.transfer.planes.nixl.nixl_plane import NixlPlane
from twinpool.transfer.planes.one_sided import page_runs
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane

HOST = "127.0.0.1"
DISTINCT = 4
"""Chunks with places of their own; later ones go round."""
_POLL_MS = 1000


@dataclass(frozen=True)
class Shape:
    """What is handed over: a model's state for `chunk_tokens` positions at a time."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    chunk_tokens: int

    @property
    def spec(self) -> PoolSetSpec:
        entry = (self.kv_heads, self.head_dim)
        buffers = tuple(BufferSpec(name, self.layers, entry, torch.bfloat16) for name in ("k", "v"))
        return PoolSetSpec(self.page_tokens, (PoolSpec("full", buffers),))

    @property
    def chunk_pages(self) -> int:
        return -(-self.chunk_tokens // self.page_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_pages * self.spec.page_bytes


class Memory:
    """A pool set and the pages of each distinct chunk, scattered as in a pool that has been used for a while."""

    def __init__(self, shape: Shape, seed: int, allocate: Callable[[str, int], torch.Tensor], noise: bool) -> None:
        pages = 1 + DISTINCT * shape.chunk_pages
        layout = PoolSetLayout(shape.spec, {"full": pages})
        self.pools = PoolSet(shape.spec, layout.counts, allocate("pages", layout.nbytes))
        if noise:
            drawn = torch.empty(layout.nbytes, dtype=torch.uint8)
            self.pools.region.copy_(drawn.random_(0, 256, generator=torch.Generator().manual_seed(1)))
        order = list(range(1, pages))
        random.Random(seed).shuffle(order)
        each = shape.chunk_pages
        self.chunks = [order[at : at + each] for at in range(0, DISTINCT * each, each)]

    def packed(self, number: int) -> torch.Tensor:
        return gather(self.pools.region, self.pools.layout, "full", self.chunks[number % DISTINCT]).cpu()

    def sums(self) -> list[int]:
        """A checksum of each distinct chunk."""
        return [zlib.crc32(raw(self.packed(n))) for n in range(DISTINCT)]


def raw(chunk: torch.Tensor) -> memoryview:
    array: Any = chunk.numpy()
    return memoryview(array).cast("B")


def plain(name: str, nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


class Reader(Protocol):
    def describe(self) -> Any:
        """What the writer needs to reach it; can be pickled."""

    def receive(self) -> int:
        """Wait a second at most; returns how many chunks are newly in place."""

    def sums(self) -> list[int]: ...

    def close(self) -> None: ...


class Writer(Protocol):
    def send(self, number: int) -> None:
        """Begin to send a chunk."""

    def finish(self) -> None:
        """Wait until a chunk has been sent, the oldest one, and tell the reader; nothing happens without one."""

    def close(self) -> None: ...


def make_plane(kind: str, wake: Callable[[], None] = lambda: None) -> DataPlane:
    faults = FaultsConfig()
    if kind == "shm":
        return ShmPlane(faults, HOST, None)
    if kind == "nixl":
        return NixlPlane(faults, HOST, None, wake=wake)
    if kind in {"zmq", "staged"}:
        transfer = TransferConfig("staged" if kind == "staged" else "zmq", frame_bytes=1 << 30)
        return ZmqPlane(transfer, faults, HOST, None, wake=wake)
    if kind == "cuda_ipc":
        return ShmPlane(faults, HOST, None, sharing=CudaIpc())
    if kind == "cuda_ipc, rehearsed":
        return ShmPlane(faults, HOST, None, sharing=SharedFile())
    return LocalPlane(faults, lambda: None)


class SharedFile:
    """What stands for CUDA IPC where there is no GPU: memory of a file without a name, which another process maps.
    Implements `transfer.planes.direct.cuda_ipc.DeviceSharing`."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._fd = os.memfd_create("bench-shared")
        os.ftruncate(self._fd, nbytes)
        return torch.frombuffer(mmap.mmap(self._fd, nbytes), dtype=torch.uint8)

    def describe(self, region: torch.Tensor) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}

    def open(self, described: Mapping[str, Any], nbytes: int, device: torch.device) -> MappedRegion:
        with open(described["path"], "r+b") as file:
            region = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        return MappedRegion(region, lambda: None)


class PlaneReader:
    """Decode's end of a plane: grants a room for each distinct chunk."""

    def __init__(self, kind: str, shape: Shape, device: str = "cpu") -> None:
        """`device`: where the pages lie."""
        self._waiter = Waiter()
        self.plane = make_plane(kind, self._waiter.wake)
        there = partial(self.plane.allocate, device=torch.device(device))
        self.memory = Memory(shape, seed=2, allocate=there, noise=False)
        slots = self.plane.allocate("slots", DISTINCT * SLOT_BYTES).view(DISTINCT, SLOT_BYTES)
        self.plane.register(self.memory.pools, slots)
        self.targets = [
            RoomTarget(RoomId(f"room-{n}"), {"full": PageNumbers(0, tuple(self.memory.chunks[n]))}, n)
            for n in range(DISTINCT)
        ]
        for target in self.targets:
            self.plane.permit(target)
        for waitable in self.plane.waitable:
            self._waiter.add(waitable)

    def describe(self) -> Any:
        return self.plane.describe(), self.targets

    def receive(self) -> int:
        self._waiter.wait(_POLL_MS / 1000)
        notices = self.plane.poll()
        if self.plane.dropped:
            raise RuntimeError(f"the plane dropped {self.plane.dropped} writes")
        return len(notices)

    def sums(self) -> list[int]:
        return self.memory.sums()

    def close(self) -> None:
        self.plane.close()
        self._waiter.close()


class PlaneWriter:
    """Prefill's end of a plane: posts chunks, and notifies of each when it is complete."""

    def __init__(self, kind: str, memory: Memory, description: Any) -> None:
        """`memory`: of a plane of this kind, or any that it can read."""
        descriptor, self._targets = description
        self._memory = memory
        self._plane = make_plane(kind)
        self._plane.register(memory.pools, None)
        self._link = self._plane.connect(descriptor)
        self._posted: deque[Completion] = deque()

    def send(self, number: int) -> None:
        at = number % DISTINCT
        write = PageWrite(self._targets[at], {"full": PageNumbers(0, tuple(self._memory.chunks[at]))})
        self._posted.append(self._link.post(write))

    def finish(self) -> None:
        if self._posted:
            self._posted.popleft().wait()
            self._link.notify(RoomId("bench"), b"wrote")

    def close(self) -> None:
        self._link.close()
        self._plane.close()


class SocketReader:
    """A bare TCP connection into memory that is there already; no pages, no messages."""

    def __init__(self, shape: Shape) -> None:
        self._listening = socket.create_server((HOST, 0))
        self._listening.settimeout(10)
        self._connection: socket.socket | None = None
        self._chunks = [torch.zeros(shape.chunk_bytes, dtype=torch.uint8) for _ in range(DISTINCT)]
        self._number = 0

    def describe(self) -> Any:
        return self._listening.getsockname()

    def receive(self) -> int:
        if self._connection is None:
            self._connection, _ = self._listening.accept()
            self._connection.settimeout(10)
        view = raw(self._chunks[self._number % DISTINCT])
        at = 0
        while at < len(view):
            got = self._connection.recv_into(view[at:])
            if not got:
                raise RuntimeError("the writer is gone")
            at += got
        self._number += 1
        return 1

    def sums(self) -> list[int]:
        return [zlib.crc32(raw(chunk)) for chunk in self._chunks]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listening.close()


class SocketWriter:
    def __init__(self, memory: Memory, description: Any) -> None:
        self._chunks = [raw(memory.packed(n)) for n in range(DISTINCT)]
        self._socket = socket.create_connection(description)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int) -> None:
        self._socket.sendall(self._chunks[number % DISTINCT])

    def finish(self) -> None: ...

    def close(self) -> None:
        self._socket.close()


class NixlReader:
    """Bare NIXL: one agent with a thread of its own, and pages scattered as on the planes."""

    def __init__(self, shape: Shape) -> None:
        api = load_nixl()
        self.memory = Memory(shape, seed=2, allocate=plain, noise=False)
        self._agent = api.nixl_agent("bare-reader", api.nixl_agent_config())
        region = self.memory.pools.region
        self._agent.register_memory([(region.data_ptr(), region.numel(), 0, "")], "DRAM")

    def describe(self) -> Any:
        counts = dict(self.memory.pools.layout.counts)
        return self._agent.get_agent_metadata(), self.memory.pools.region.data_ptr(), self.memory.chunks, counts

    def receive(self) -> int:
        until = time.monotonic() + _POLL_MS / 1000
        while time.monotonic() < until:
            if found := sum(len(said) for said in self._agent.get_new_notifs().values()):
                return found
            time.sleep(0.0002)
        return 0

    def sums(self) -> list[int]:
        return self.memory.sums()

    def close(self) -> None:
        del self._agent


class NixlWriter:
    def __init__(self, memory: Memory, description: Any) -> None:
        metadata, base, chunks, counts = description
        api, region, layout = load_nixl(), memory.pools.region, memory.pools.layout
        self._agent = api.nixl_agent("bare-writer", api.nixl_agent_config())
        self._agent.register_memory([(region.data_ptr(), region.numel(), 0, "")], "DRAM")
        reader = self._agent.add_remote_agent(metadata)
        theirs = PoolSetLayout(layout.spec, counts)
        self._handles = []
        for mine, its in zip(memory.chunks, chunks, strict=True):
            sides = page_runs(layout.buffers["full"], mine, theirs.buffers["full"], its, layout.spec.page_tokens)
            pairs = [
                byte_runs(at, side, sides[2], HOST_MEMORY)
                for at, side in zip((region.data_ptr(), base), sides, strict=False)
            ]
            both = (self._agent.get_xfer_descs(pair, "DRAM") for pair in pairs)
            self._handles.append(self._agent.initialize_xfer("WRITE", *both, reader, b"wrote"))

    def send(self, number: int) -> None:
        handle = self._handles[number % DISTINCT]
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"bare NIXL: {state}")

    def finish(self) -> None: ...

    def close(self) -> None:
        for handle in self._handles:
            handle.release()


BETWEEN_PROCESSES: Sequence[str] = ("shm", "zmq", "staged", "nixl", "tcp socket", "bare nixl")


def make_reader(way: str, shape: Shape, device: str = "cpu") -> Reader:
    if way == "bare nixl":
        return NixlReader(shape)
    if way == "tcp socket":
        return SocketReader(shape)
    return PlaneReader(way, shape, device)


def make_writer(way: str, memory: Memory, description: Any) -> Writer:
    if way == "bare nixl":
        return NixlWriter(memory, description)
    if way == "tcp socket":
        return SocketWriter(memory, description)
    return PlaneWriter(way, memory, description)
