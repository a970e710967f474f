"""The writer's side of planes `local`, `shm` and `cuda_ipc`, which stores straight into the reader's memory; and plane
`local`, whose reader and writer are in one process.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import zmq

from twinpool.cache.device.device_copies import CPU, device_copies, zeroed
from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.memory.head_slices import HeadSlice, chosen, common, copy_common, layer_pairs
from twinpool.cache.memory.kv_cache_spec import BufferLayout, PoolSetLayout, PoolSetSpec
from twinpool.cache.memory.page_moves import PageMove, PoolMove, copy_state
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.errors import LayoutMismatch, WireError
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.planes.data_plane import (
    PageWrite,
    RoomTarget,
    SentCounts,
    SlotWrite,
    WakeCallback,
    WriteLink,
    said,
)
from twinpool.transfer.planes.one_sided import AT_ONCE, NoticeLine, OneSidedPlane
from twinpool.transfer.planes.rank_fan import fan

HEAD = 64
"""Bytes in front of a segment: a nonce, by which a writer knows that it mapped the memory that was described."""


class DirectLink:
    """The `WriteLink` of planes `local`, `shm` and `cuda_ipc`: writes into a reader's memory that is mapped here. A
    write is over when `post` returns, on a device too: it waits for its copies."""

    frame_bytes: int | None = None
    layered = True
    ranked = False

    def __init__(
        self,
        source: PoolSet,
        region: torch.Tensor,
        layout: PoolSetLayout,
        slots: torch.Tensor | None,
        notices: NoticeLine,
        faults: WriteFaults,
        cut: HeadSlice | None = None,
    ) -> None:
        """`region` and `layout`: the memory of the reader's rank. `slots` and `notices`: of the reader's leader. `cut`:
        the buffers to write, and of them the heads that both hold; None: all of every page."""
        self._source = source
        self._cut = cut
        self._region = region
        self._copies = device_copies(source.region.device)
        self._layout = layout
        self._slots = slots
        self._notices = notices
        self._faults = faults
        self.sent = SentCounts()

    def admit(self, target: RoomTarget) -> None:
        for pool, run in target.runs.items():
            count = self._layout.counts.get(pool, 0)
            if not all(0 < index < count for index in run.indices):
                raise WireError(f"room {target.room} was granted places of {pool} beyond the reader's {count}")
        if self._slots is not None and not 0 <= target.slot < len(self._slots):
            raise WireError(f"room {target.room} was granted slot {target.slot} of {len(self._slots)}")

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            assert self._slots is not None, "metadata goes to the reader's leader"
            data = torch.frombuffer(bytearray(write.data), dtype=torch.uint8)
            self._slots[write.target.slot, : len(write.data)] = data
            return DONE
        start, move = time.monotonic(), write.move
        first, rest = _halves(move)
        self._copies.begin(lambda: self._copy(first, write.layers)).wait()
        self._faults.in_write()
        self._copies.begin(lambda: self._copy(rest, write.layers)).wait()
        self._faults.slow(write.nbytes(self._source.spec))
        for part in move.parts:
            for mine, its in [*self._written(write, part.pool)][:1]:
                self._faults.after_seal(self._region, its.offset(0, part.targets[0]) + _first_byte(mine, its))
        took = time.monotonic() - start
        self.sent.writes += 1
        self.sent.nbytes += sum(
            len(part.targets) * its.spec.layers * _common_bytes(mine, its)
            for part in move.parts
            for mine, its in self._written(write, part.pool)
        )
        self.sent.busy_s += took
        self.sent.waited_s += took
        return DONE

    def _copy(self, move: PageMove, layers: Mapping[str, range] | None) -> None:
        ours, theirs = self._source.layout, self._layout
        if self._cut is None and layers is None:
            copy_state(move, self._source.region, ours, self._region, theirs)
            return
        for part in move.parts:
            some = None if layers is None else layers[part.pool]
            if self._cut is None:
                copy_state(PageMove((part,)), self._source.region, ours, self._region, theirs, some)
                continue
            copy_common(
                self._chosen(ours, part.pool),
                self._source.region,
                (ours.counts[part.pool], part.sources),
                self._chosen(theirs, part.pool),
                self._region,
                (theirs.counts[part.pool], part.targets),
                ours.spec.page_tokens,
                some,
            )

    def _chosen(self, layout: PoolSetLayout, pool: str) -> tuple[BufferLayout, ...]:
        return layout.buffers[pool] if self._cut is None else chosen(layout.buffers[pool], self._cut.get(pool, ()))

    def _written(self, write: PageWrite, pool: str) -> Iterator[tuple[BufferLayout, BufferLayout]]:
        """The buffers of `pool` that a write writes, ours and the reader's, of the layers that it writes."""
        mine, its = self._chosen(self._source.layout, pool), self._chosen(self._layout, pool)
        layers = None if write.layers is None else write.layers[pool]
        return zip(*layer_pairs(mine, its, layers), strict=True)

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._notices.send(data)

    def cut(self) -> bool:
        cut = self._notices.cut()
        if self._notices.watch is not None:
            self.sent.opened = self._notices.watch.opened
        return cut

    @property
    def up(self) -> bool:
        return self._notices.up

    def sever(self) -> None: ...  # Every write is done when `post` returns.

    def close(self) -> None:
        self._notices.close()


def _first_byte(mine: BufferLayout, its: BufferLayout) -> int:
    """Return the offset, in bytes, at which a link writes first in an entry of the reader's buffer."""
    spec = its.spec
    if not spec.heads:
        return 0
    return (common(mine.spec, spec).start - spec.first_head) * (spec.shape_bytes // spec.shape[0])


def _common_bytes(mine: BufferLayout, its: BufferLayout) -> int:
    """Return how many bytes of an entry both ends hold: those of the heads that they have in common."""
    if not its.spec.heads:
        return its.entry_bytes
    return its.entry_bytes // its.spec.shape[0] * len(common(mine.spec, its.spec))


def _halves(move: PageMove) -> tuple[PageMove, PageMove]:
    """Split a move into the first half of the pages of each pool, and the rest."""
    cuts = [(part, (len(part.sources) + 1) // 2) for part in move.parts]
    first = tuple(PoolMove(p.pool, p.sources[:cut], p.targets[:cut]) for p, cut in cuts)
    rest = tuple(PoolMove(p.pool, p.sources[cut:], p.targets[cut:]) for p, cut in cuts if len(p.sources) > cut)
    return PageMove(first), PageMove(rest)


# ------------------------------------------------------------ plane local


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
