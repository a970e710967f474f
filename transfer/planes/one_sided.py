"""One-sided planes: writers store by themselves, and the reader hears of it by notices alone.

A write is made of runs of bytes (`page_runs`): where each lies in the writer's region, and in the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinpool.cache.memory.head_slices import common
from twinpool.cache.memory.kv_cache_spec import IndexSpace, PoolSetSpec
from twinpool.cache.memory.memory_layout import BufferLayout, PoolSetLayout
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived
from twinpool.transfer.net.zmq_sockets import DisconnectWatch
from twinpool.transfer.planes.data_plane import RoomTarget, said

MAX_COUNT = 2**40


class OneSidedPlane:
    """The part of `transfer.planes.data_plane.RankDataPlane` with nothing to do: no write passes through the reader's
    hands, so none can be permitted, revoked, or missing when its notice comes."""

    revocable = False

    def permit(self, target: RoomTarget) -> None: ...

    def revoke(self, room: RoomId) -> None: ...

    def poll_followers(self) -> None: ...

    def settled(self, rank: int, settled: WriteArrived) -> None: ...

    def take_settled(self) -> list[WriteArrived]:
        return []


def described_layout(kind: str, descriptor: Mapping[str, Any], spec: PoolSetSpec) -> PoolSetLayout:
    """The layout of a reader's memory, from its descriptor's counts. Raises `LayoutMismatch` for counts that can't
    be."""
    counts = said(descriptor, "counts", dict)
    most = {pool.name: counts.get(pool.name) for pool in spec.pools}
    if most != counts or not all(type(count) is int and 0 < count <= MAX_COUNT for count in most.values()):
        raise LayoutMismatch(f"plane {kind}: the reader's counts must be of {sorted(most)}, got {counts!r:.200}")
    return PoolSetLayout(spec, counts)


def _no_notices(data: bytes) -> None:
    raise AssertionError("only leaders give notice, to leaders")


@dataclass(frozen=True, slots=True)
class NoticeLine:
    """The way that notices of a link take to its reader: from leader to leader, there is none between other ranks."""

    send: Callable[[bytes], object] = _no_notices
    watch: DisconnectWatch | None = None
    """The connection's; None where there is no connection."""
    end: Callable[[], object] = lambda: None
    """Called when the link is closed."""

    def cut(self) -> bool:
        """Whether the connection was lost since the last call."""
        return self.watch is not None and self.watch.cut()

    @property
    def up(self) -> bool:
        """Whether it was up at some time."""
        return self.watch is None or self.watch.was_up

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.end()


IntArray = npt.NDArray[np.int64]


def page_runs(
    sources: Sequence[BufferLayout],
    source_pages: Sequence[int],
    targets: Sequence[BufferLayout],
    target_pages: Sequence[int],
    page_tokens: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the runs of a copy of the heads that both sides hold: their offsets here, there, and their lengths.

    `sources` and `targets` have the same buffers in the same order. Runs that follow each other on both sides are one.
    """
    here, there, sizes = list[IntArray](), list[IntArray](), list[IntArray]()
    a, b = np.asarray(source_pages, dtype=np.int64), np.asarray(target_pages, dtype=np.int64)
    for mine, its in zip(sources, targets, strict=True):
        heads = common(mine.spec, its.spec)
        head_bytes = mine.spec.shape_bytes // mine.spec.shape[0]
        whole = mine.spec.shape == its.spec.shape and len(heads) == mine.spec.shape[0]
        tokens = page_tokens if mine.spec.index is IndexSpace.TOKEN else 1
        parts = 1 if whole else tokens
        width = mine.entry_bytes if whole else len(heads) * head_bytes
        sides = []
        for buffer, pages in ((mine, a), (its, b)):
            first = 0 if whole else (heads.start - buffer.spec.first_head) * head_bytes
            layers = np.arange(buffer.spec.layers, dtype=np.int64)[:, None, None] * buffer.layer_stride
            steps = np.arange(parts, dtype=np.int64)[None, None, :] * (buffer.entry_bytes // tokens)
            sides.append((buffer.base + first + layers + pages[None, :, None] * buffer.index_stride + steps).ravel())
        here.append(sides[0])
        there.append(sides[1])
        sizes.append(np.full(len(sides[0]), width, dtype=np.int64))
    return _joined(np.concatenate(here), np.concatenate(there), np.concatenate(sizes))


def packs(sources: Sequence[BufferLayout], targets: Sequence[BufferLayout]) -> bool:
    """Whether pages are to be packed before they are written: of some buffer the target holds only some of the source's
    heads, all of which are written, so that its pages are long runs and the source's aren't."""
    pairs = [(mine.spec, its.spec) for mine, its in zip(sources, targets, strict=True)]
    whole = all(len(common(mine, its)) == its.shape[0] for mine, its in pairs)
    return whole and any(mine.shape != its.shape and mine.index is IndexSpace.TOKEN for mine, its in pairs)


def packed_pages(targets: Sequence[BufferLayout], count: int) -> list[BufferLayout]:
    """The buffers of `count` pages of the target, packed: buffer by buffer, layer by layer, page by page."""
    out, base = [], 0
    for its in targets:
        out.append(BufferLayout(its.spec, base, count * its.entry_bytes, its.entry_bytes, its.entry_bytes))
        base += its.spec.layers * count * its.entry_bytes
    return out


def _joined(here: IntArray, there: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    follows = (here[1:] == here[:-1] + sizes[:-1]) & (there[1:] == there[:-1] + sizes[:-1])
    firsts = np.flatnonzero(np.concatenate([np.ones(1, dtype=bool), ~follows]))
    return here[firsts], there[firsts], np.add.reduceat(sizes, firsts)
