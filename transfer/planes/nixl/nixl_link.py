"""The writer's side of plane `nixl`: one-sided writes into the reader's memory, on a thread and an agent of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from twinpool.cache.device.device_copies import device_copies, zeroed
from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.memory.head_slices import HeadSlice, chosen, copy_common, layer_pairs
from twinpool.cache.memory.kv_cache_spec import BufferLayout, PoolSetLayout
from twinpool.cache.memory.page_moves import PoolMove
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.errors import ConfigError, LayoutMismatch, WireError
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageWrite, PostedWrite, RoomTarget, SentCounts, SlotWrite
from twinpool.transfer.planes.nixl.nixl_agent import HOST_MEMORY, MemoryKind, NixlAgent, byte_runs, kind_of, own_device
from twinpool.transfer.planes.one_sided import IntArray, NoticeLine, packed_pages, packs, page_runs

log = logging.getLogger("twinpool.transfer")
_PACKING_BYTES = 4 << 20
"""Bytes of the memory that heads are packed in, or a page where that is more."""
Runs3 = tuple[IntArray, IntArray, IntArray]
"""Offsets here, there, and lengths."""
_NAP_S = 0.0002
"""Seconds until a write that is under way is looked at again."""


@dataclass(frozen=True, slots=True)
class ReaderMemory:
    """The memory of one rank of a reader, as it described it."""

    metadata: bytes
    pages: int
    """Address of its pool region."""
    kind: MemoryKind
    """Where its pool region lies; metadata slots are the host's memory."""
    layout: PoolSetLayout
    slots: int
    """Address of its metadata slots; 0 where it has none."""
    slot_count: int


@dataclass(eq=False)
class _Outgoing:
    write: PageWrite | SlotWrite
    posted: PostedWrite
    at: float = field(default_factory=time.monotonic)


class NixlLink:
    """The `WriteLink` of plane `nixl`."""

    frame_bytes: int | None = None
    layered = True
    ranked = False

    def __init__(
        self,
        source: PoolSet,
        reader: ReaderMemory,
        notices: NoticeLine,
        faults: WriteFaults,
        cut: HeadSlice | None,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`cut`: the buffers to write, and of them the heads that both hold; None: all of every page. `wake` is called
        when a write has ended. Raises `LayoutMismatch` where the reader can't be reached."""
        self.sent = SentCounts()
        self._source, self._reader, self._slice, self._faults = source, reader, cut, faults
        self._notices, self._wake = notices, wake
        self._timeout_s = timeout_s
        self._scratch = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        self._packing: torch.Tensor | None = None
        """Memory beside the pages, for heads that are packed; made when some are."""
        self._copies = device_copies(source.region.device)
        self._waiting: deque[_Outgoing] = deque()
        self._work = threading.Condition()
        """Held to queue a write, and to end the link or its writes."""
        self._closed = self._severed = self._cut = False
        self._agent: NixlAgent | None = self._opened()
        self._thread = threading.Thread(target=self._run, name="kv-send", daemon=True)
        self._thread.start()

    def _opened(self) -> NixlAgent:
        try:
            agent = NixlAgent()
            agent.register(self._source.region)
            agent.register(self._scratch)
            if self._packing is not None:
                agent.register(self._packing)
        except ConfigError as error:
            raise LayoutMismatch(str(error)) from None
        agent.meet(self._reader.metadata)
        self.sent.opened += 1
        return agent

    def admit(self, target: RoomTarget) -> None:
        for pool, run in target.runs.items():
            count = self._reader.layout.counts.get(pool, 0)
            if not all(0 < index < count for index in run.indices):
                raise WireError(f"room {target.room} was granted places of {pool} beyond the reader's {count}")
        if self._reader.slots and not 0 <= target.slot < self._reader.slot_count:
            raise WireError(f"room {target.room} was granted slot {target.slot} of {self._reader.slot_count}")

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, PageWrite):
            _ = write.move  # Raises for numbers that were not granted.
        outgoing = _Outgoing(write, PostedWrite(self._wake))
        with self._work:
            self._severed = False
            self._waiting.append(outgoing)
            self._work.notify()
        return outgoing.posted

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        self._notices.send(data)

    def cut(self) -> bool:
        cut, self._cut = self._cut, False
        return self._notices.cut() or cut

    @property
    def up(self) -> bool:
        return self._notices.up

    def sever(self) -> None:
        with self._work:
            self._severed = True
            left = list(self._waiting)
            self._waiting.clear()
        for outgoing in left:
            outgoing.posted.end(RuntimeError("the link was severed"))

    def close(self) -> None:
        self.sever()
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()
        self._notices.close()

    # ------------------------------------------------------------ on its thread

    def _run(self) -> None:
        own_device(self._source.region)
        while True:
            with self._work:
                self._work.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    break
                outgoing = self._waiting.popleft()
            start, error = time.monotonic(), None
            try:
                nbytes = self._written(outgoing.write)
            except Exception as failure:
                if not isinstance(failure, RuntimeError | ConfigError | LayoutMismatch):
                    log.exception("a write by NIXL failed")  # Whoever waits for it is told all the same.
                # What an agent has failed at may still be under way in it: it ends with the agent.
                error = RuntimeError(f"a write by NIXL failed: {failure}")
                self._drop_agent()
                self._cut = True
            else:
                now = time.monotonic()
                self.sent.writes += 1
                self.sent.nbytes += nbytes
                self.sent.busy_s += now - start
                self.sent.waited_s += now - outgoing.at
            outgoing.posted.end(error)
        self._drop_agent()

    def _drop_agent(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _written(self, write: PageWrite | SlotWrite) -> int:
        """Carry a write out; returns its bytes. Raises `RuntimeError` where it has failed."""
        if isinstance(write, SlotWrite):
            size = len(write.data)
            self._scratch[:size] = torch.frombuffer(bytearray(write.data), dtype=torch.uint8)
            self._from_scratch(self._reader.slots + write.target.slot * SLOT_BYTES, size, HOST_MEMORY)
            return size
        total = 0
        for part in write.move.parts:
            mine, its = self._chosen(self._source.layout, part.pool), self._chosen(self._reader.layout, part.pool)
            mine, its = layer_pairs(mine, its, None if write.layers is None else write.layers[part.pool])
            if not mine:
                continue
            loads = self._packed_loads if packs(mine, its) else self._plain_loads
            for number, (base, runs) in enumerate(loads(part, mine, its)):
                total += int(runs[2].sum())
                half = len(runs[0]) // 2 if self._faults.stops and not number else 0
                if half:
                    self._move(base, *(side[:half] for side in runs))
                if not number:
                    self._faults.in_write()
                self._move(base, *(side[half:] for side in runs))
                if not number:
                    self._damage(base, int(runs[0][0]), int(runs[1][0]))
        return total

    def _plain_loads(
        self, part: PoolMove, mine: Sequence[BufferLayout], its: Sequence[BufferLayout]
    ) -> Iterator[tuple[torch.Tensor, Runs3]]:
        """One load: the pages as they lie."""
        yield self._source.region, page_runs(mine, part.sources, its, part.targets, self._source.spec.page_tokens)

    def _packed_loads(
        self, part: PoolMove, mine: Sequence[BufferLayout], its: Sequence[BufferLayout]
    ) -> Iterator[tuple[torch.Tensor, Runs3]]:
        """Loads of pages of which the reader's rank holds some heads alone, packed one after the other: its pages are
        long runs then on both sides. A load lies in the packing until the next is asked for."""
        packing, tokens = self._packing_memory(), self._source.spec.page_tokens
        step = len(packing) // sum(b.spec.layers * b.entry_bytes for b in its)
        for at in range(0, len(part.sources), step):
            sources, targets = part.sources[at : at + step], part.targets[at : at + step]
            packed, count = packed_pages(its, len(sources)), self._source.layout.counts[part.pool]
            ends = (count, sources), (len(sources), range(len(sources)))
            copy = partial(copy_common, mine, self._source.region, ends[0], packed, packing, ends[1], tokens)
            self._copies.begin(copy).wait()
            yield packing, page_runs(packed, range(len(sources)), its, targets, tokens)

    def _chosen(self, layout: PoolSetLayout, pool: str) -> tuple[BufferLayout, ...]:
        buffers = layout.buffers[pool]
        return buffers if self._slice is None else chosen(buffers, self._slice.get(pool, ()))

    def _packing_memory(self) -> torch.Tensor:
        if self._packing is None:
            spec = self._reader.layout.spec
            page_bytes = max(spec.unit_bytes(pool.name) for pool in spec.pools)
            self._packing = zeroed(max(_PACKING_BYTES, page_bytes), self._source.region.device)
            if self._agent is not None:  # A later one has it registered as it is opened.
                self._agent.register(self._packing)
        return self._packing

    def _move(self, base: torch.Tensor, here: IntArray, there: IntArray, sizes: IntArray) -> None:
        reader, mine = self._reader, kind_of(base)
        sources = byte_runs(base.data_ptr(), here, sizes, mine)
        self._transfer(sources, mine, byte_runs(reader.pages, there, sizes, reader.kind), reader.kind)

    def _damage(self, base: torch.Tensor, here: int, there: int) -> None:
        """Flip a bit of the first byte that was written, where a fault on purpose is due."""
        if self._faults.corrupts:
            right = int(base[here])
            self._scratch[0] = right
            self._faults.after_seal(self._scratch, 0)
            if int(self._scratch[0]) != right:
                self._from_scratch(self._reader.pages + there, 1, self._reader.kind)

    def _from_scratch(self, address: int, size: int, there: MemoryKind) -> None:
        zero, length = np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64)
        source = byte_runs(self._scratch.data_ptr(), zero, length, HOST_MEMORY)
        self._transfer(source, HOST_MEMORY, byte_runs(address, zero, length, there), there)

    def _transfer(self, sources: IntArray, here: MemoryKind, targets: IntArray, there: MemoryKind) -> None:
        """Carry out one transfer. Raises `RuntimeError` where it fails, or makes no end within the time-out."""
        if self._agent is None:
            self._agent = self._opened()
        handle, until = self._agent.post(sources, here, targets, there), time.monotonic() + self._timeout_s
        try:
            while not self._agent.over(handle):
                if self._severed or time.monotonic() >= until:
                    raise RuntimeError("it was given up" if self._severed else f"no end within {self._timeout_s:g} s")
                time.sleep(_NAP_S)
        finally:
            self._agent.release(handle)
