"""Plane `nixl`: one-sided writes by NIXL over UCX, into registered memory.

UCX takes the way that both ends have: RDMA, memory that processes of one host share, or TCP. It is not revocable by
room: a writer that has the address may write. But each writer is given an agent of its own here, and `sever` ends that
one: its connections are closed and its registrations are gone, and nothing that comes through it is stored any more.

What `sever` can't end is a process of this host that UCX lets write into this one's memory by a system call: such a
writer can be watched, and must be dead before its agent is ended (`transfer.rooms.receiver`). A dead writer may have
left writes with this end's agent, which are stored when that makes progress: its agent is ended, too, before anybody
else gets the pages.

Pages may lie on a GPU at either end, where UCX has CUDA: a worker registers them as it starts, and is refused where
that can't be. Metadata slots are the host's memory. Nothing of this was run on a GPU yet: see docs/gpu.md.

Notices go over a ZMQ socket as on plane `shm`, each after its write has landed: it wakes who sleeps, and is
authenticated off the loopback. What UCX carries is neither authenticated nor encrypted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import zmq

from twinpool.cache.device.device_copies import CPU, zeroed
from twinpool.cache.memory.head_slices import HeadSlice
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.net.zmq_sockets import CurveKeys, dial
from twinpool.transfer.planes.data_plane import RoomTarget, WakeCallback, WriteLink, said
from twinpool.transfer.planes.nixl.nixl_agent import HOST_MEMORY, MemoryKind, NixlAgent, kind_of, load_nixl, own_device
from twinpool.transfer.planes.nixl.nixl_link import NixlLink, ReaderMemory
from twinpool.transfer.planes.one_sided import MAX_COUNT, NoticeInbox, NoticeLine, OneSidedPlane, described_layout
from twinpool.transfer.planes.rank_fan import fan

LINK_TIMEOUT_S = TransferConfig().link_timeout_s
FRAME_BYTES = TransferConfig().control_frame_bytes
_BUSY_S, _IDLE_S = 0.001, 0.05
"""Seconds between looks at what has come, while rooms are granted and while none is."""
_MAX_METADATA = 1 << 16
_MEMORIES, _MAX_DEVICES = ("DRAM", "VRAM"), 1 << 10


class NixlPlane(OneSidedPlane):
    """The data plane of a writer and a reader that both have NIXL."""

    kind = "nixl"
    by_peer = True

    def __init__(
        self,
        faults: FaultsConfig,
        host: str,
        curve: CurveKeys | None,
        rank: int = 0,
        size: int = 1,
        link_timeout_s: float = LINK_TIMEOUT_S,
        frame_bytes: int = FRAME_BYTES,
        wake: WakeCallback = lambda: None,
    ) -> None:
        """`frame_bytes`: the longest notice that is taken in. `wake` is called, on any thread, when a completion has
        news. Raises `ConfigError` where NIXL isn't installed."""
        load_nixl()
        self._rank, self._size = rank, size
        self._link_timeout_s, self._curve, self._wake = link_timeout_s, curve, wake
        self._faults = WriteFaults(faults)
        self._notices = NoticeInbox(host, curve, link_timeout_s, frame_bytes, faults.proxy)
        self._agents: dict[str, NixlAgent] = {}
        """The agents that writers write through, by writer."""
        self._using = threading.Lock()
        """Held to use agents, and to change which there are."""
        self._granted: set[RoomId] = set()
        self._closing = threading.Event()
        self._progress: threading.Thread | None = None
        self.dropped = 0

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        return zeroed(nbytes, device)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools, self._slots = pools, slots
        if kind_of(pools.region) != HOST_MEMORY:
            # A worker that can't be reached there is refused as it starts, and not when its first peer comes.
            probe = NixlAgent()
            try:
                probe.register(pools.region)
            finally:
                probe.close()

    def describe(self, peer: str = "") -> dict[str, Any]:
        with self._using:
            agent = self._agents.get(peer)
            if agent is None:
                agent = self._agents[peer] = self._open_agent()
        if self._progress is None:
            self._progress = threading.Thread(target=self._run, name="kv-progress", daemon=True)
            self._progress.start()
        kind = kind_of(self._pools.region)
        mine = {
            "agent": agent.metadata,
            "pages": self._pools.region.data_ptr(),
            "memory": kind.name,
            "device": kind.device,
            "counts": dict(self._pools.layout.counts),
            "slots": self._slots.data_ptr() if self._slots is not None else 0,
            "slot_count": len(self._slots) if self._slots is not None else 0,
            "endpoint": self._notices.endpoint,
        }
        return {"ranks": [mine]}

    def _open_agent(self) -> NixlAgent:
        """An agent with all memory that a writer may write to; none stays behind where that can't be registered."""
        agent = NixlAgent()
        try:
            agent.register(self._pools.region)
            if self._slots is not None:
                agent.register(self._slots)
        except ConfigError:
            agent.close()
            raise
        return agent

    def sever(self, peer: str) -> None:
        with self._using:
            agent = self._agents.pop(peer, None)
            if agent is not None:
                agent.close()

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        return fan(self._pools.spec, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: HeadSlice | None) -> WriteLink:
        layout, metadata = described_layout(self.kind, descriptor, spec), said(descriptor, "agent", bytes)
        if not 0 < len(metadata) <= _MAX_METADATA:
            raise LayoutMismatch(f"plane nixl: an agent's metadata of {len(metadata)} bytes")
        pages, slots = said(descriptor, "pages", int), said(descriptor, "slots", int)
        slot_count = said(descriptor, "slot_count", int)
        if not (0 < pages < 1 << 63 and 0 <= slots < 1 << 63 and 0 <= slot_count <= MAX_COUNT):
            raise LayoutMismatch(f"plane nixl: no memory is at {pages}, or at {slots}")
        known = "memory" in descriptor  # Older builds say nothing of it, and have the host's alone.
        kind = MemoryKind(said(descriptor, "memory", str), said(descriptor, "device", int)) if known else HOST_MEMORY
        if kind.name not in _MEMORIES or not 0 <= kind.device < _MAX_DEVICES:
            raise LayoutMismatch(f"plane nixl: no memory is of kind {kind.name!r:.80}, device {kind.device}")
        reader = ReaderMemory(metadata, pages, kind, layout, slots, slot_count)
        if self._rank or not slots:
            return self._opened(reader, cut, None)
        return self._opened(reader, cut, said(descriptor, "endpoint", str))

    def _opened(self, reader: ReaderMemory, cut: HeadSlice | None, endpoint: str | None) -> WriteLink:
        """Open a link. Notices go from leader to leader: other links have no `endpoint`."""
        notices = NoticeLine()
        if endpoint is not None:
            socket, watch = dial(zmq.Context.instance(), endpoint, self._curve, self._link_timeout_s)
            notices = NoticeLine(socket.send, watch, lambda: socket.close(linger=0))
        try:
            return NixlLink(self._pools, reader, notices, self._faults, cut, self._link_timeout_s, self._wake)
        except BaseException:
            notices.close()
            raise

    def permit(self, target: RoomTarget) -> None:
        self._granted.add(target.room)

    def revoke(self, room: RoomId) -> None:
        self._granted.discard(room)

    def poll(self) -> list[bytes]:
        return self._notices.poll()

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return self._notices.waitable

    def close(self) -> None:
        self._closing.set()
        if self._progress is not None:
            self._progress.join()
        for peer in list(self._agents):
            self.sever(peer)
        self._notices.close()

    def _run(self) -> None:
        """Help to store what comes, where the transport needs that; on a thread of its own."""
        own_device(self._pools.region)
        while not self._closing.wait(_BUSY_S if self._granted else _IDLE_S):
            with self._using:
                for agent in self._agents.values():
                    agent.progress()
