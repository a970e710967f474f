"""Plane `local`: reader and writer in one process. Not revocable, like plane `shm`."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import zmq

from twinpool.cache.device.device_copies import CPU, zeroed
from twinpool.cache.memory.head_slices import HeadSlice
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.errors import LayoutMismatch
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.planes.data_plane import WakeCallback, WriteLink, said
from twinpool.transfer.planes.direct.direct_link import DirectLink
from twinpool.transfer.planes.notice_inbox import AT_ONCE
from twinpool.transfer.planes.one_sided import NoticeLine, OneSidedPlane
from twinpool.transfer.planes.rank_fan import fan


class LocalPlane(OneSidedPlane):
    """The data plane of reader and writer in one process: for tests, and for trying things out without a cluster."""

    kind = "local"
    by_peer = False
    _readers: ClassVar[dict[str, LocalPlane]] = {}

    def __init__(self, faults: FaultsConfig, wake: WakeCallback, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size
        self._token = secrets.token_hex(16)
        self._arrived: deque[bytes] = deque()
        self._wake = wake
        self._faults = WriteFaults(faults)
        self.dropped = 0
        self._readers[self._token] = self

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        return zeroed(nbytes, device)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self._pools, self._slots = pools, slots

    def describe(self, peer: str = "") -> dict[str, Any]:
        return {"ranks": [{"token": self._token}]}

    def sever(self, peer: str) -> None: ...

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        return fan(self._pools.spec, self._rank, self._size, descriptor, self._link)

    def _link(self, descriptor: dict[str, Any], spec: PoolSetSpec, cut: HeadSlice | None) -> WriteLink:
        reader = self._readers.get(said(descriptor, "token", str))
        if reader is None:
            raise LayoutMismatch("plane local: the reader isn't in this process, or is closed")

        def notify(data: bytes) -> None:
            reader._arrived.append(data)
            reader._wake()

        pools, slots = reader._pools, reader._slots
        if slots is None and reader._rank == 0:
            raise LayoutMismatch("plane local: the reader has no metadata slots")
        here, there = self._pools.region.device, pools.region.device
        if here != there:
            raise LayoutMismatch(f"plane local: the reader's pools lie on {there}, the writer's on {here}")
        return DirectLink(self._pools, pools.region, pools.layout, slots, NoticeLine(notify), self._faults, cut)

    def poll(self) -> list[bytes]:
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), AT_ONCE))]

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return ()

    def close(self) -> None:
        self._readers.pop(self._token, None)
