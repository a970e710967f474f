"""Planes `shm` and `cuda_ipc`: a writer on the same host stores straight into the reader's memory.

It is not revocable: a stopped writer that comes back finishes its store, whatever happened meanwhile. The reader's
memory is an anonymous memfd, which the writer opens through the reader's `/proc/PID/fd`; it has no name, so
nothing stays behind when processes die. Notices go over a ZMQ socket, after the stores they tell of.

On plane `cuda_ipc` the pages are a GPU's memory, which the writer opens by a handle (`transfer.planes.direct.cuda_ipc`)
and copies to by its own GPU: the same one, or one that reaches it. Metadata slots are host memory as on `shm`. A
writer's copy is over when its write is; what a dead process had begun ends with its context, before its pidfd says that
it is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import zmq

from twinpool.cache.device.device_copies import CPU
from twinpool.cache.memory.head_slices import HeadSlice
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import LayoutMismatch
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.net.zmq_sockets import CurveKeys, dial
from twinpool.transfer.planes.data_plane import SLOT_BYTES, WriteLink, refuse_device_memory, said
from twinpool.transfer.planes.direct.cuda_ipc import DeviceSharing, MappedRegion
from twinpool.transfer.planes.direct.direct_link import HEAD, DirectLink
from twinpool.transfer.planes.one_sided import NoticeInbox, NoticeLine, OneSidedPlane, described_layout
from twinpool.transfer.planes.rank_fan import described_ranks, fan

LINK_TIMEOUT_S = TransferConfig().link_timeout_s
FRAME_BYTES = TransferConfig().control_frame_bytes
PAGES = "pages"
"""The name of the memory that pages lie in (`allocate`)."""
_SEGMENT = "twinpool-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ShmPlane(OneSidedPlane):
    """The data plane of a writer and a reader on one host, in two processes."""

    by_peer = False

    def __init__(
        self,
        faults: FaultsConfig,
        host: str,
        curve: CurveKeys | None,
        rank: int = 0,
        size: int = 1,
        link_timeout_s: float = LINK_TIMEOUT_S,
        frame_bytes: int = FRAME_BYTES,
        sharing: DeviceSharing | None = None,
    ) -> None:
        """`frame_bytes`: the longest notice that is taken in. `sharing`: of the device that pages lie on; None: plane
        `shm`, whose pages lie in host memory."""
        self.kind = "shm" if sharing is None else "cuda_ipc"
        self._sharing = sharing
        self._rank, self._size = rank, size
        self._link_timeout_s = link_timeout_s
        self._nonce = secrets.token_bytes(HEAD)
        self._segments: dict[str, tuple[int, int]] = {}
        self._maps: list[mmap.mmap] = []
        self._faults = WriteFaults(faults)
        self._curve = curve
        self._notices = NoticeInbox(host, curve, link_timeout_s, frame_bytes, faults.proxy)
        self.dropped = 0

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        if self._sharing is not None and name == PAGES:
            return self._sharing.allocate(nbytes, device)
        refuse_device_memory(self.kind, device)
        fd = os.memfd_create(f"{_SEGMENT}{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, HEAD + nbytes)
        # A writer that has the segment mapped would die if it shrank.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        self._segments[name] = (fd, nbytes)
        memory = mmap.mmap(fd, HEAD + nbytes)
        memory[:HEAD] = self._nonce
        self._maps.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools = pools

    def describe(self, peer: str = "") -> dict[str, Any]:
        mine = {
            "namespace": process.namespace(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "segments": {name: list(segment) for name, segment in self._segments.items()},
            "counts": dict(self._pools.layout.counts),
            "endpoint": self._notices.endpoint,
        }
        if self._sharing is not None:
            mine["shared"] = self._sharing.describe(self._pools.region)
        return {"ranks": [mine]}

    def sever(self, peer: str) -> None: ...

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        parts, _ = described_ranks(descriptor)
        counts = [said(part, "counts", dict) for part in parts]
        if any(other != counts[0] for other in counts):
            raise LayoutMismatch(f"plane {self.kind}: the reader's ranks have different counts: {counts!r:.200}")
        return fan(self._pools.spec, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: HeadSlice | None) -> WriteLink:
        here, there = process.namespace(), said(descriptor, "namespace", str)
        if there != here:
            other = "zmq" if self._sharing is None else "staged"
            raise LayoutMismatch(
                f"plane {self.kind}: the reader is on host {there:.200}, the writer on {here}; "
                f"use transfer.plane={other}"
            )
        segments, layout = said(descriptor, "segments", dict), described_layout(self.kind, descriptor, spec)
        slots = self._map(descriptor, "slots").view(-1, SLOT_BYTES) if "slots" in segments else None
        endpoint = said(descriptor, "endpoint", str)
        pages = self._pages(descriptor, layout.nbytes)
        region, faults = pages.region, self._faults
        if self._rank or slots is None:
            # Notices go from leader to leader: between other ranks there is nothing that a connection could lose.
            return DirectLink(self._pools, region, layout, None, NoticeLine(end=pages.close), faults, cut)
        try:
            socket, watch = dial(zmq.Context.instance(), endpoint, self._curve, self._link_timeout_s)
        except BaseException:
            pages.close()
            raise

        def close() -> None:
            socket.close()
            pages.close()

        return DirectLink(self._pools, region, layout, slots, NoticeLine(socket.send, watch, close), faults, cut)

    def _pages(self, descriptor: dict[str, Any], nbytes: int) -> MappedRegion:
        """Map the reader's pages."""
        if self._sharing is None:
            return MappedRegion(self._map(descriptor, PAGES, nbytes), lambda: None)
        return self._sharing.open(said(descriptor, "shared", dict), nbytes, self._pools.region.device)

    def _map(self, descriptor: dict[str, Any], name: str, wanted: int | None = None) -> torch.Tensor:
        """Map segment `name` of the reader, of `wanted` bytes; None: of any whole number of metadata slots.

        Only a segment that a `ShmPlane` has made is mapped, of the right size and sealed so that it can't shrink.
        Raises `LayoutMismatch` for anything else that a descriptor may name. Returns uint8 [bytes], without the head.
        """
        pid, segment = said(descriptor, "pid", int), said(descriptor, "segments", dict).get(name)
        where = f"plane {self.kind}: {name} of process {pid}"
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
                if os.fstat(mine).st_size != HEAD + nbytes or fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    raise LayoutMismatch(f"{where} is not sealed at {nbytes} bytes")
                memory = mmap.mmap(mine, HEAD + nbytes)
            finally:
                os.close(mine)
        except (OSError, ValueError, OverflowError) as error:
            raise LayoutMismatch(f"{where} can't be mapped: {error}") from None
        if memory[:HEAD] != said(descriptor, "nonce", bytes):
            raise LayoutMismatch(f"plane {self.kind}: process {pid} isn't the one that described its memory")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD)

    def poll(self) -> list[bytes]:
        return self._notices.poll()

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return self._notices.waitable

    def close(self) -> None:
        self._notices.close()
        for fd, _ in self._segments.values():
            os.close(fd)
        self._segments.clear()
