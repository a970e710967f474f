"""Data planes over the simulated network: implement `transfer.planes.data_plane.DataPlane`.

shm   the writer stores into the reader's memory, the second half of a write some time after the first: a writer that
      is stopped in between stores the rest when it goes on, even if those pages have another owner by then (A5)
zmq   the bytes of a write travel, and the reader stores them if it still permits the room under the write's ticket
nixl  stores travel, and land whatever became of their writer, unless the reader has ended that writer's access; on one
      node those of a writer that lives land all the same, unless it has given them up. Each may fail, be cut off in the
      middle or be overtaken by later ones (`StoreFaults`)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import zmq

from twinpool.cache.device.device_copies import CPU
from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.memory.head_slices import (
    HeadSlice,
    RankCount,
    chosen,
    common,
    copy_common,
    layer_pairs,
    packed_layouts,
)
from twinpool.cache.memory.kv_cache_spec import BufferLayout, PoolSetSpec
from twinpool.cache.memory.page_moves import PageMove, PoolMove, copy_state, gather, scatter
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.errors import LayoutMismatch, WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived
from twinpool.sim.fabric.plane_faults import DelayedStore, FlyingStore, StoreFault, StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimNetwork
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageWrite, RoomTarget, SentCounts, SlotWrite, WriteLink
from twinpool.transfer.planes.one_sided import OrderedNotices
from twinpool.transfer.planes.rank_fan import fan, packed_ranks, rank_cut, unpacked_ranks, writers


@dataclass(frozen=True, slots=True)
class _Notice:
    """A notice of plane zmq, which may have to wait for writes on other connections."""

    room: RoomId
    data: bytes
    writes: int
    sources: int
    """How many ranks its writer has."""


@dataclass(frozen=True, slots=True)
class _Frames:
    """One write of plane zmq on the wire: its room, its ticket and its number, and the writer's rank of how many."""

    room: RoomId
    ticket: int
    parts: Sequence[tuple[str, range, torch.Tensor]] = ()
    slot: bytes | None = None
    source: int = 0
    sources: int = 1
    number: int = 0


WireItem = bytes | _Notice | _Frames


class SimPlane:
    """One rank's end of a data plane: implements `transfer.planes.data_plane.RankDataPlane`."""

    def __init__(
        self,
        kind: str,
        network: SimNetwork,
        process: SimProcess,
        planes: dict[str, SimPlane],
        rng: random.Random,
        damage: WireDamage,
        wake: Callable[[], None],
        rank: int = 0,
        size: int = 1,
        store_faults: StoreFaults | None = None,
    ) -> None:
        self.kind, self.revocable, self.by_peer = kind, kind == "zmq", kind == "nixl"
        self.network, self.process, self.rng, self.damage = network, process, rng, damage
        self.rank, self.size = rank, size
        self.store_faults = store_faults or StoreFaults(random.Random(0), 0.0)
        self.dropped = 0
        self.closed = False
        self.halt: Callable[[], None] | None = None
        """Called once, in the middle of the next write of pages."""
        self._planes, self._wake, self._label = planes, wake, f"{process.label} rank {rank}"
        self._access: dict[str, int] = {}
        """Numbers of the access that writers were given, by writer."""
        self._numbers = count(1)
        self._arrived: deque[WireItem] = deque()
        self._permitted: dict[RoomId, RoomTarget] = {}
        self._held = OrderedNotices(size, lambda sources, at: writers(self.pools.spec, sources, at, size))
        self._due: list[bytes] = []
        self._settled: list[WriteArrived] = []
        planes[self._label] = self

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        self.pools, self.slots = pools, slots

    def describe(self, peer: str = "") -> dict[str, Any]:
        if peer not in self._access:
            self._access[peer] = next(self._numbers)
        access = self._access[peer]
        return {"ranks": [{"of": self._label, "node": self.process.node, "access": access}]}

    @property
    def packed_ranks(self) -> int:
        return packed_ranks(RankCount(self.size, self.pools.spec.stages))

    def open_to(self, access: int) -> bool:
        """Whether access of this number, as a descriptor named it, has not been ended."""
        return access in self._access.values()

    def sever(self, peer: str) -> None:
        self._access.pop(peer, None)

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        return fan(self.pools.spec, self.rank, self.size, descriptor, self._link)

    def _link(self, part: dict[str, Any], spec: PoolSetSpec, cut: HeadSlice | None) -> WriteLink:
        reader = self._planes[part["of"]]
        if self.kind == "zmq":
            return SentLink(self, reader, cut)
        if self.kind == "nixl":
            return OneSidedLink(self, reader, cut, part["access"])
        if part["node"] != self.process.node or reader.closed or not reader.process.alive:
            raise LayoutMismatch(f"plane shm: the reader {reader.process} can't be reached from {self.process}")
        return StoredLink(self, reader, cut)

    def permit(self, target: RoomTarget) -> None:
        self._permitted[target.room] = target
        self._held.open(target.room)

    def revoke(self, room: RoomId) -> None:
        self._permitted.pop(room, None)
        self._due += self._held.close(room)

    def settled(self, rank: int, settled: WriteArrived) -> None:
        self._held.settled(rank, RoomId(settled.room), settled.source, settled.number)

    def take_settled(self) -> list[WriteArrived]:
        settled, self._settled = self._settled, []
        return settled

    def arrive(self, item: WireItem) -> None:
        """Take in what has come; nobody does once the plane is closed, though its process may go on."""
        if self.closed:
            return
        self._arrived.append(item)
        self._wake()

    def poll_followers(self) -> None: ...

    def poll(self) -> list[bytes]:
        notices = [*self._due, *self._held.due()]
        self._due.clear()
        while self._arrived:
            item = self._arrived.popleft()
            if isinstance(item, bytes):
                notices.append(item)
            elif isinstance(item, _Notice):
                notices += self._held.add(item.room, item.data, item.writes, item.sources)
            elif not self._store(item):
                self.dropped += 1
        return notices

    def _store(self, frames: _Frames) -> bool:
        target = self._permitted.get(frames.room)
        if target is None or target.ticket != frames.ticket:
            return False
        if frames.slot is not None:
            if self.slots is None or len(frames.slot) > SLOT_BYTES:
                return False
            self.slots[target.slot, : len(frames.slot)] = torch.frombuffer(bytearray(frames.slot), dtype=torch.uint8)
            return True
        try:
            places = [target.at(pool, numbers) for pool, numbers, _ in frames.parts]
        except IndexError:
            return False
        for (pool, _, packed), indices in zip(frames.parts, places, strict=True):
            self._unpack(frames, pool, indices, packed)
        settled = WriteArrived(frames.room, frames.source, frames.number)
        self._held.settled(self.rank, frames.room, frames.source, frames.number)
        if self.rank:
            self._settled.append(settled)
        return True

    def _unpack(self, frames: _Frames, pool: str, indices: tuple[int, ...], packed: torch.Tensor) -> None:
        """Store the head slices of these pages that the writer's rank and this one have in common."""
        layout = self.pools.layout
        if self.size == frames.sources == 1:
            scatter(packed, self.pools.region, layout, pool, indices)
            return
        whole, writer = self.pools.spec.whole, unpacked_ranks(frames.sources)
        reader = RankCount(self.size, self.pools.spec.stages)
        names = rank_cut(whole, (frames.source, writer), (self.rank, reader))[pool]
        mine = chosen(layout.buffers[pool], names)
        theirs = [b for b in whole.shard(frames.source, *writer).by_name[pool].buffers if b.name in names]
        lies = packed_layouts(theirs, [b.spec for b in mine], layout.spec.page_tokens)
        ends = (len(indices), range(len(indices))), (layout.counts[pool], indices)
        copy_common(lies, packed.view(-1), ends[0], mine, self.pools.region, ends[1], layout.spec.page_tokens)

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return ()

    def close(self) -> None:
        self.closed = True


class _SimLink:
    """The base of both kinds of write links."""

    frame_bytes: int | None = None
    layered = False
    ranked = False
    up = True

    def __init__(self, writer: SimPlane, reader: SimPlane, cut: HeadSlice | None) -> None:
        """`cut`: the head slice that both ranks hold, which this link writes; None: all of every page."""
        self._writer, self._reader, self._parts = writer, reader, cut
        self._cut, self.sent = False, SentCounts()
        self._pipe = writer.network.pipe(writer.process, reader.process, self._reset)

    def _send(self, item: WireItem) -> None:
        reader = self._reader
        self._pipe.send(lambda: reader.arrive(item))

    def _struck(self, kind: str, data: bytes) -> bytes:
        return self._writer.damage.struck(kind, data, self._writer.rng)

    def _chosen(self, pools: PoolSet, pool: str) -> tuple[BufferLayout, ...]:
        buffers = pools.layout.buffers[pool]
        return buffers if self._parts is None else chosen(buffers, self._parts.get(pool, ()))

    def _reset(self) -> None:
        self._cut = True

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def cut(self) -> bool:
        cut, self._cut = self._cut, False
        return cut

    def sever(self) -> None: ...

    def close(self) -> None: ...


class SentLink(_SimLink):
    """Implements `transfer.planes.data_plane.WriteLink` for plane zmq."""

    def admit(self, target: RoomTarget) -> None: ...

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        room, ticket, mine = write.target.room, write.target.ticket, self._writer
        if isinstance(write, SlotWrite):
            self._send(_Frames(room, ticket, slot=self._struck("metadata", write.data)))
            return DONE
        runs = {pool: run for pool, run in write.runs.items() if self._parts is None or pool in self._parts}
        parts = [(pool, run.numbers, self._packed(pool, run.indices)) for pool, run in runs.items()]
        for _, _, packed in parts:
            mine.damage.strike(packed.view(-1), 0)
        self._send(_Frames(room, ticket, parts, None, mine.rank, mine.packed_ranks, write.number))
        return DONE

    def _packed(self, pool: str, indices: tuple[int, ...]) -> torch.Tensor:
        """Pack the part of these pages that the reader's rank holds: uint8 [pages, bytes], contiguous."""
        pools, size = self._writer.pools, self._writer.pools.spec.page_tokens
        if self._parts is None:
            return gather(pools.region, pools.layout, pool, indices)
        mine, theirs = self._chosen(pools, pool), self._chosen(self._reader.pools, pool)
        lies = packed_layouts([b.spec for b in mine], [b.spec for b in theirs], size)
        out = torch.empty(len(indices), lies[0].index_stride, dtype=torch.uint8)
        ends = (pools.layout.counts[pool], indices), (len(indices), range(len(indices)))
        copy_common(mine, pools.region, ends[0], lies, out.view(-1), ends[1], size)
        return out

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._send(_Notice(room, self._struck("notice", data), writes, self._writer.packed_ranks))


class StoredLink(_SimLink):
    """Implements `transfer.planes.data_plane.WriteLink` for plane shm."""

    layered = True

    def admit(self, target: RoomTarget) -> None:
        counts = self._reader.pools.layout.counts
        if any(max(run.indices) >= counts[pool] for pool, run in target.runs.items()):
            raise WireError(f"room {target.room} was granted places beyond {dict(counts)}")

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        reader = self._reader
        if isinstance(write, SlotWrite):
            assert reader.slots is not None
            assert len(write.data) <= SLOT_BYTES
            slot = torch.frombuffer(bytearray(self._struck("metadata", write.data)), dtype=torch.uint8)
            reader.slots[write.target.slot, : len(write.data)] = slot
            return DONE
        first, rest = _halves(write.move)
        self._copy(first, write.layers)
        store = DelayedStore(lambda: self._copy(rest, write.layers))
        halt, self._writer.halt = self._writer.halt, None
        if halt is not None:
            halt()
        self._writer.process.later(self._writer.rng.random() * 0.004, store.wait)
        return store

    def _copy(self, move: PageMove, layers: Mapping[str, range] | None) -> None:
        ours, theirs = self._writer.pools, self._reader.pools
        for part in move.parts:
            some = None if layers is None else layers[part.pool]
            if self._parts is None:
                copy_state(PageMove((part,)), ours.region, ours.layout, theirs.region, theirs.layout, some)
            mine, its = self._chosen(ours, part.pool), self._chosen(theirs, part.pool)
            if self._parts is not None:
                ends = (ours.layout.counts[part.pool], part.sources), (theirs.layout.counts[part.pool], part.targets)
                copy_common(mine, ours.region, ends[0], its, theirs.region, ends[1], ours.spec.page_tokens, some)
            mine, its = layer_pairs(mine, its, some)
            if its:
                self._writer.damage.strike(theirs.region, self._first_byte(mine[0], its[0], part.targets[0]))

    @staticmethod
    def _first_byte(mine: BufferLayout, its: BufferLayout, index: int) -> int:
        """The offset, in the reader's region, of the first byte of a page that this link writes."""
        spec = its.spec
        ahead = (common(mine.spec, spec).start - spec.first_head) * (spec.shape_bytes // spec.shape[0])
        return its.offset(0, index) + (ahead if spec.heads else 0)

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._send(self._struck("notice", data))


class OneSidedLink(StoredLink):
    """Implements `transfer.planes.data_plane.WriteLink` for plane nixl: stores travel, those of a dead or severed
    writer as well, and land unless the reader has ended the access that they came by. A living writer of the reader's
    node stores by a system call that asks nobody there."""

    def __init__(self, writer: SimPlane, reader: SimPlane, cut: HeadSlice | None, access: int) -> None:
        super().__init__(writer, reader, cut)
        self._access = access
        self._flying: list[FlyingStore] = []

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        faults, fault = self._writer.store_faults, self._writer.store_faults.draw()
        flying = FlyingStore(self._stores(write, fault is StoreFault.TRUNCATED), self._lets_in, self._reaches_in)
        if fault is StoreFault.TRUNCATED:
            flying.add(partial(self._break, flying, "the transfer was cut off"))
        self._flying = [f for f in self._flying if not f.done] + [flying]
        halt, self._writer.halt = self._writer.halt, None
        held = [faults.delay() if fault is StoreFault.REORDERED else 0.0 for _ in range(flying.parts)]
        self._send_part(flying, held[0])
        if halt is not None and isinstance(write, PageWrite):
            halt()
        elif halt is not None:
            self._writer.halt = halt
        if flying.parts > 1:
            later = self._writer.rng.random() * 0.004
            self._writer.process.later(later, lambda: self._send_part(flying, held[1]))
        if fault is StoreFault.FAILED:
            self._break(flying, "the transfer failed")
        return flying

    def _stores(self, write: PageWrite | SlotWrite, truncated: bool) -> list[Callable[[], None]]:
        """The parts of a write; of one that is cut off, the first."""
        if isinstance(write, PageWrite):
            return [partial(self._copy, half, write.layers) for half in _halves(write.move)[: 1 if truncated else 2]]
        data = self._struck("metadata", write.data)
        return [partial(self._slot, write, data[: len(data) // 2] if truncated else data)]

    def _send_part(self, flying: FlyingStore, held_s: float) -> None:
        """Send the next part of a write, which is held up for so many seconds where it arrives."""
        reader, agenda = self._reader.process, self._writer.network.agenda

        def land() -> None:
            if reader.alive:
                flying.land()

        def hold() -> None:
            agenda.after(held_s, land)

        self._pipe.send(hold if held_s else flying.land)

    def _break(self, flying: FlyingStore, reason: str) -> None:
        """Fail a write, and the connection with it, as an agent that has failed at one is ended."""
        flying.fail(reason)
        self._cut = True

    def _lets_in(self) -> bool:
        """Whether the reader takes in what comes by this link's access."""
        return self._reader.open_to(self._access)

    def _reaches_in(self) -> bool:
        """Whether the writer can store without the reader's help."""
        writer = self._writer.process
        return writer.alive and not self._writer.closed and writer.node == self._reader.process.node

    def _slot(self, write: SlotWrite, data: bytes) -> None:
        assert self._reader.slots is not None
        slot = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._reader.slots[write.target.slot, : len(data)] = slot

    def _reset(self) -> None:
        super()._reset()
        self.sever()

    def sever(self) -> None:
        for flying in self._flying:
            flying.fail("the connection was cut")
        self._flying.clear()


def _halves(move: PageMove) -> tuple[PageMove, PageMove]:
    """Split a move into the first half of each pool's pages, and the rest."""
    cuts = [(part, (len(part.sources) + 1) // 2) for part in move.parts]
    first = tuple(PoolMove(p.pool, p.sources[:cut], p.targets[:cut]) for p, cut in cuts)
    rest = tuple(PoolMove(p.pool, p.sources[cut:], p.targets[cut:]) for p, cut in cuts if len(p.sources) > cut)
    return PageMove(first), PageMove(rest)
