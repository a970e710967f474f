"""The writer's side of plane `zmq`."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import msgpack
import torch
import zmq

from cache.device.device_port import DONE, Completion
from cache.memory.head_slices import HeadSlice, chosen, copy_common, packed_layouts
from cache.memory.kv_cache_spec import PoolSetSpec
from cache.memory.memory_layout import BufferLayout
from cache.memory.page_moves import gather
from cache.pool.pool_set import PoolSet
from contracts.ids import RoomId
from transfer.net.disconnects import DisconnectWatch
from transfer.net.fault_injection import WriteFaults
from transfer.planes.data_plane import PageWrite, RoomTarget, SlotWrite

PAGES_FRAME, SLOT_FRAME, NOTICE_FRAME = b"P", b"S", b"N"


@dataclass(frozen=True, slots=True)
class PoolPacking:
    """The layouts of one pool's part of the frames from one writing rank: of the buffers here that it goes to (`mine`),
    and of the frame that it comes in (`frames`)."""

    pool: str
    mine: tuple[BufferLayout, ...]
    frames: tuple[BufferLayout, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in a frame."""
        return self.frames[0].index_stride


class ZmqLink:
    """The `WriteLink` of plane `zmq`: sends pages, slots and notices down one socket, so they arrive in order. Writes
    may be posted on another thread than notices are sent on."""

    layered = False

    def __init__(
        self,
        source: PoolSet,
        socket: zmq.Socket[bytes],
        watch: DisconnectWatch,
        faults: WriteFaults,
        ranks: tuple[int, int] = (0, 1),
        target: PoolSetSpec | None = None,
        cut: HeadSlice | None = None,
        frame_bytes: int | None = None,
    ) -> None:
        """`ranks`: this writer's rank, and the number of ranks of its worker. `target`: the pools of the reader's rank.
        `cut`: the buffers that are written to it, and of them the heads that both hold; None: all of every page.
        `frame_bytes`: the longest frame that the reader takes in."""
        self.frame_bytes = frame_bytes
        self._ranks, self._target, self._cut = ranks, target, cut
        self._source = source
        self._socket, self._one_message = socket, threading.Lock()
        self._watch = watch
        self._faults = faults

    def admit(self, target: RoomTarget) -> None: ...  # The reader itself looks up what it has granted.

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        target = write.target
        if isinstance(write, SlotWrite):
            with self._one_message:
                self._socket.send_multipart([SLOT_FRAME, msgpack.packb((target.room, target.ticket)), write.data])
            return DONE
        mine = {pool: run for pool, run in write.runs.items() if self._cut is None or pool in self._cut}
        packed = [self._packed(pool, run.indices) for pool, run in mine.items()]
        self._faults.in_write()
        for part in packed:
            self._faults.after_seal(part.view(-1), 0)
        runs = [(pool, run.first, len(run)) for pool, run in mine.items()]
        frames = [memoryview(part.numpy()) for part in packed]  # type: ignore[arg-type]
        head = msgpack.packb((target.room, target.ticket, runs, *self._ranks, write.number))
        with self._one_message:
            self._socket.send_multipart([PAGES_FRAME, head], zmq.SNDMORE if frames else 0)
            if frames:
                self._socket.send_multipart(frames, 0, copy=False)
        return DONE

    def _packed(self, pool: str, indices: tuple[int, ...]) -> torch.Tensor:
        """Return what the reader's rank is to have of these pages: uint8 [pages, bytes], contiguous."""
        region, layout = self._source.region, self._source.layout
        if self._cut is None or self._target is None:
            return gather(region, layout, pool, indices)
        mine = chosen(layout.buffers[pool], self._cut[pool])
        theirs = [b for b in self._target.by_name[pool].buffers if b.name in self._cut[pool]]
        packing = packed_layouts([b.spec for b in mine], theirs, layout.spec.page_tokens)
        out = torch.empty(len(indices), packing[0].index_stride, dtype=torch.uint8)
        ends = (layout.counts[pool], indices), (len(indices), range(len(indices)))
        copy_common(mine, region, ends[0], packing, out.view(-1), ends[1], layout.spec.page_tokens)
        return out

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        with self._one_message:
            self._socket.send_multipart([NOTICE_FRAME, msgpack.packb((room, writes, self._ranks[1])), data])

    def cut(self) -> bool:
        return self._watch.cut()

    @property
    def up(self) -> bool:
        return self._watch.was_up

    def close(self) -> None:
        self._watch.close()
        with self._one_message:
            self._socket.close(linger=0)
