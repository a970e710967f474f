"""Copy plans: a copy between two layouts of one spec, in as few blocks as the layouts allow.

A buffer of a pool is `layers` entries a page. Most often the buffers of a pool follow each other so evenly, on both
sides, that a page of several buffers can be copied as one block of equal rows; a page-first page, to another page-first
region, is one row. Fewer pieces are fewer calls on a CPU and fewer launches on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from twinpool.cache.memory.memory_layout import BufferLayout, PoolSetLayout, word_dtype

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopySide:
    """Where the rows of a block lie in one region, in bytes."""

    base: int
    row_stride: int
    index_stride: int

    def stack(self, region: torch.Tensor, rows: int, count: int, width: int, word: torch.dtype) -> torch.Tensor:
        """The rows of all pages as integers, [rows, count, words], sharing memory with the uint8 `region`."""
        size = word.itemsize
        words = region.view(word)
        strides = (self.row_stride // size, self.index_stride // size, 1)
        return words.as_strided((rows, count, width // size), strides, words.storage_offset() + self.base // size)


@dataclass(frozen=True)
class CopyBlock:
    """`rows` runs of `width` bytes a page, at even distances on both sides."""

    rows: int
    width: int
    source: CopySide
    target: CopySide

    @property
    def page_bytes(self) -> int:
        return self.rows * self.width

    @cached_property
    def word(self) -> torch.dtype:
        """The widest integer type whose size divides the runs' width and all their offsets, on both sides."""
        a, b = self.source, self.target
        return word_dtype(self.width, a.base, a.row_stride, a.index_stride, b.base, b.row_stride, b.index_stride)

    def joined(self, following: CopyBlock) -> CopyBlock | None:
        """Both as one block where their rows are evenly spaced, else None."""
        if (self.source.index_stride, self.target.index_stride) != (
            following.source.index_stride,
            following.target.index_stride,
        ):
            return None
        sides = ((self.source, following.source), (self.target, following.target))
        if self.rows == following.rows == 1 and all(b.base == a.base + self.width for a, b in sides):
            return CopyBlock(1, self.width + following.width, self.source, self.target)
        if self.width != following.width:
            return None
        strides = []
        for mine, its in sides:
            known = {side.row_stride for side, rows in ((mine, self.rows), (its, following.rows)) if rows > 1}
            stride = its.base - (mine.base + (self.rows - 1) * mine.row_stride)
            if known - {stride} or stride <= 0:
                return None
            strides.append(stride)
        source, target = (
            CopySide(mine.base, stride, mine.index_stride) for (mine, _), stride in zip(sides, strides, strict=True)
        )
        return CopyBlock(self.rows + following.rows, self.width, source, target)

    def flattened(self) -> CopyBlock:
        """The same block as one row, if its rows follow each other without gaps on both sides."""
        if self.rows > 1 and self.source.row_stride == self.target.row_stride == self.width:
            return CopyBlock(1, self.rows * self.width, self.source, self.target)
        return self


@lru_cache(maxsize=1024)
def blocks(
    sources: tuple[BufferLayout, ...], targets: tuple[BufferLayout, ...], layers: range | None = None
) -> tuple[CopyBlock, ...]:
    """The blocks of a copy of a pool's buffers from one layout to another; with `layers`, of those layers only."""
    out: list[CopyBlock] = []
    for source, target in zip(sources, targets, strict=True):
        first, rows = 0, source.spec.layers
        if layers is not None:
            first = min(layers.start, rows)
            rows = max(0, min(layers.stop, rows) - first)
        if not rows:
            continue
        sides = (CopySide(b.offset(first, 0), b.layer_stride, b.index_stride) for b in (source, target))
        block = CopyBlock(rows, source.entry_bytes, *sides).flattened()
        joined = out[-1].joined(block) if out else None
        if joined is None:
            out.append(block)
        else:
            out[-1] = joined.flattened()
    return tuple(out)


def packing(layout: PoolSetLayout, pool: str) -> tuple[BufferLayout, ...]:
    """The canonical layout of a pool: page after page, each with its buffers and their layers in order."""
    unit, base, out = layout.spec.unit_bytes(pool), 0, []
    for buffer in layout.buffers[pool]:
        out.append(BufferLayout(buffer.spec, base, buffer.entry_bytes, unit, buffer.entry_bytes))
        base += buffer.spec.layers * buffer.entry_bytes
    return tuple(out)


@dataclass(frozen=True, slots=True)
class IndexRuns:
    """A list of pages (or of pairs of pages), divided into long runs and the rest, by place in the list."""

    long: list[tuple[int, int]]
    """Half-open ranges of places at which the pages count upwards by one."""
    rest: IntArray
    """The other places."""


def runs(*lists: Sequence[int], at_least: int) -> IndexRuns:
    """Find runs of `at_least` pages or more in which all `lists`, of equal lengths, count upwards by one."""
    count = len(lists[0])
    if count < at_least:
        return IndexRuns([], np.arange(count))
    broken = np.zeros(count + 1, dtype=bool)
    broken[0] = broken[count] = True
    for pages in lists:
        broken[1:count] |= np.diff(np.asarray(pages)) != 1
    cuts = np.flatnonzero(broken)
    lengths = np.diff(cuts)
    is_long = lengths >= at_least
    rest = np.flatnonzero(~np.repeat(is_long, lengths))
    return IndexRuns(list(zip(cuts[:-1][is_long].tolist(), cuts[1:][is_long].tolist(), strict=True)), rest)


def index_tensor(indices: Sequence[int] | IntArray, device: torch.device) -> torch.Tensor:
    """Indices where kernels read them, int64 [indices]; the host doesn't wait for the device."""
    tensor = torch.as_tensor(np.asarray(indices, dtype=np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
