"""Page moves: copies of pages and slots from region to region, written once over the registry.

A `PageMove` is one value over all pools: which pages and slots of each go from where to where. So no caller moves the
pages of one pool and forgets those of another; a pool may have none to move. The canonical layout, shared by transfer
and storage, is a page's bytes buffer by buffer, layer by layer: `[indices, unit_bytes]`; it is also how a page-first
region holds a page. Source and target may differ in their order and in their numbers of pages; their specs must be
equal.

A move is copied in as few blocks as the two layouts allow. A buffer of a pool is `layers` entries a page. Most often
the buffers of a pool follow each other so evenly, on both sides, that a page of several buffers can be copied as one
block of equal rows; a page-first page, to another page-first region, is one row. Fewer pieces are fewer calls on a CPU
and fewer launches on a GPU.

On a CPU three things cost more than the bytes: a call a page, a temporary, and the C library's memcpy of about two
KiB. Measured (see docs/benchmarks.md), best is

    runs of pages that follow each other on both sides    one strided copy by torch, on all of torch's threads
    single pages of some KiB                              numpy, page by page, straight to their places
    single pages of some hundred bytes                    numpy, all pages of a row at once, through a temporary
    some heads of each token of a page                    numpy, page by page, all layers and tokens at once

On a GPU, and between a GPU and pinned host memory, a block is one launch of a kernel that reads the indices on the
device. Memory that isn't pinned goes through a temporary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twinpool.cache.memory.kv_cache_spec import BufferLayout, PoolSetLayout, PoolSetSpec, overlap, packed, word_dtype

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
            here = overlap(source.spec.here, layers)
            first, rows = here.start - source.spec.first_layer, len(here)
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
    """The canonical layout of a pool."""
    return packed([b.spec for b in layout.buffers[pool]], layout.spec.page_tokens)


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


_RUN_PAGES = 4
"""Shorter runs aren't worth torch's overhead: their pages count as single."""
_SINGLE_BYTES = 4096
"""Pages with smaller rows are copied together."""
_FEW = 8
"""Up to so many pages are copied one by one, whatever their size."""
_TEMPORARY_BYTES = 512 * 1024
"""Small pages are copied in portions that stay in the second-level cache."""


def copy_block(
    block: CopyBlock,
    source: torch.Tensor,
    source_count: int,
    sources: Sequence[int],
    target: torch.Tensor,
    target_count: int,
    targets: Sequence[int],
) -> None:
    """Copy one block of pages `sources` in the uint8 region `source` to pages `targets` in `target`.

    `..._count` is how many pages (or slots) each region has.
    """
    if not len(sources):
        return
    word = block.word
    from_rpw = block.source.stack(source, block.rows, source_count, block.width, word)
    to_rpw = block.target.stack(target, block.rows, target_count, block.width, word)
    if not from_rpw.is_cuda and not to_rpw.is_cuda:
        _copy_on_cpu(block, from_rpw, sources, to_rpw, targets)
        return
    copy_on_gpu(from_rpw, sources, to_rpw, targets)


def copy_on_gpu(from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]) -> None:
    """Copy pages between stacks of integers [rows, pages, words] or [rows, inner, pages, words], at least one of them
    on a GPU.

    From one GPU to another's memory it is the source's that copies, on its current stream.
    """
    from twinpool.cache.memory.triton_pages import copy_rows, reachable

    if reachable(from_rpw) and reachable(to_rpw):
        copy_rows(from_rpw, sources, to_rpw, targets)
    else:
        copy_indexed(from_rpw, sources, to_rpw, targets)


def copy_inner_rows(
    from_ripw: torch.Tensor, sources: Sequence[int], to_ripw: torch.Tensor, targets: Sequence[int]
) -> None:
    """Copy pages `sources` to pages `targets` between stacks [rows, inner, pages, words]: each row of a page is `inner`
    runs of words, such as some heads of its tokens."""
    if not from_ripw.is_cuda and not to_ripw.is_cuda:
        source, target = from_ripw.numpy(), to_ripw.numpy()
        for a, b in zip(sources, targets, strict=True):
            target[:, :, b] = source[:, :, a]
        return
    copy_on_gpu(from_ripw, sources, to_ripw, targets)


def copy_indexed(from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]) -> None:
    """Copy pages between stacks [rows, pages, words] or [rows, inner, pages, words] wherever they are: by plain torch,
    through a temporary."""
    a, b = index_tensor(sources, from_rpw.device), index_tensor(targets, to_rpw.device)
    for row in range(from_rpw.shape[0]):
        to_rpw[row].index_copy_(-2, b, from_rpw[row].index_select(-2, a).to(to_rpw.device))


def _copy_on_cpu(
    block: CopyBlock, from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]
) -> None:
    found = runs(sources, targets, at_least=_RUN_PAGES)
    for start, stop in found.long:
        a, b, pages = sources[start], targets[start], stop - start
        to_rpw[:, b : b + pages].copy_(from_rpw[:, a : a + pages])
    if not len(found.rest):
        return
    source, target = from_rpw.numpy(), to_rpw.numpy()
    from_p, to_p = np.asarray(sources)[found.rest], np.asarray(targets)[found.rest]
    if block.width < _SINGLE_BYTES and len(from_p) > _FEW:
        _copy_small(source, from_p, target, to_p)
        return
    for a, b in zip(from_p.tolist(), to_p.tolist(), strict=True):
        target[:, b] = source[:, a]


def _copy_small(source: Any, sources: Any, target: Any, targets: Any) -> None:
    """Copy many small pages: each run of a row is one opaque item, so that numpy copies items, not words."""
    width = source.shape[2] * source.itemsize
    step = max(1, _TEMPORARY_BYTES // width)
    for row in range(source.shape[0]):
        from_p, to_p = _items(source[row], width), _items(target[row], width)
        for at in range(0, len(sources), step):
            to_p[targets[at : at + step]] = from_p[sources[at : at + step]]


def _items(pages: Any, width: int) -> Any:
    return pages.view(np.dtype(f"V{width}"))[:, 0]


PoolIndices = Mapping[str, Sequence[int]]
"""Pages and slots by pool name."""


@dataclass(frozen=True, slots=True)
class PoolMove:
    """One pool's share of a move: `sources[i]` goes to `targets[i]`."""

    pool: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise ValueError(f"{self.pool}: {len(self.sources)} sources for {len(self.targets)} targets")


@dataclass(frozen=True, slots=True)
class PageMove:
    """The source and target indices of a move, in every pool. They are copies: later changes of tables don't show."""

    parts: tuple[PoolMove, ...]

    @classmethod
    def of(cls, sources: PoolIndices, targets: PoolIndices) -> PageMove:
        """Pair sources and targets, pool by pool; raises `ValueError` where their pools or numbers differ."""
        if {p for p, i in sources.items() if i} != {p for p, i in targets.items() if i}:
            raise ValueError(f"a move from pools {sorted(sources)} to pools {sorted(targets)}")
        return cls(tuple(PoolMove(pool, tuple(i), tuple(targets[pool])) for pool, i in sources.items() if i))

    def __len__(self) -> int:
        """How many pages and slots it moves; a move of none is valid."""
        return sum(len(p.sources) for p in self.parts)

    def nbytes(self, spec: PoolSetSpec) -> int:
        return sum(len(p.sources) * spec.unit_bytes(p.pool) for p in self.parts)

    def chunks(self, spec: PoolSetSpec, max_bytes: int) -> Iterator[PageMove]:
        """The same move in pieces of at most `max_bytes` (or of one page, where that is more), in order."""
        for part in self.parts:
            step = max(1, max_bytes // spec.unit_bytes(part.pool))
            for at in range(0, len(part.sources), step):
                yield PageMove((PoolMove(part.pool, part.sources[at : at + step], part.targets[at : at + step]),))


def describe_spec(spec: PoolSetSpec) -> dict[str, object]:
    """The spec as plain values, for a peer to compare with its own."""
    return {
        "page_tokens": spec.page_tokens,
        "pools": {
            pool.name: {
                "kind": str(pool.kind),
                "window_tokens": pool.window_tokens,
                "buffers": {
                    buffer.name: {
                        "index": str(buffer.index),
                        "layers": buffer.layers,
                        "shape": list(buffer.shape),
                        "dtype": str(buffer.dtype).removeprefix("torch."),
                        "heads": [buffer.first_head, buffer.heads],
                    }
                    for buffer in pool.buffers
                },
            }
            for pool in spec.pools
        },
    }


def copy_state(
    move: PageMove,
    source: torch.Tensor,
    source_layout: PoolSetLayout,
    target: torch.Tensor,
    target_layout: PoolSetLayout,
    layers: range | None = None,
) -> None:
    """Copy the pages and slots of `move`, all buffers, between uint8 regions; with `layers`, those layers only."""
    for part in move.parts:
        for block in blocks(source_layout.buffers[part.pool], target_layout.buffers[part.pool], layers):
            counts = source_layout.counts[part.pool], target_layout.counts[part.pool]
            copy_block(block, source, counts[0], part.sources, target, counts[1], part.targets)


def gather(
    region: torch.Tensor, layout: PoolSetLayout, pool: str, indices: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy pages or slots into the canonical layout: uint8 [indices, unit_bytes], contiguous.

    `out`, of that shape, may be given: memory that has been used before is several times as fast as new memory.
    """
    if out is None:
        out = torch.empty(len(indices), layout.spec.unit_bytes(pool), dtype=torch.uint8, device=region.device)
    rows = range(len(indices))
    for block in blocks(layout.buffers[pool], packing(layout, pool)):
        copy_block(block, region, layout.counts[pool], indices, _flat(out), len(rows), rows)
    return out


def scatter(
    pages: torch.Tensor, region: torch.Tensor, layout: PoolSetLayout, pool: str, indices: Sequence[int]
) -> None:
    """The inverse of `gather`: write canonical pages or slots [indices, unit_bytes] into `region`."""
    rows = range(len(indices))
    for block in blocks(packing(layout, pool), layout.buffers[pool]):
        copy_block(block, _flat(pages), len(rows), rows, region, layout.counts[pool], indices)


def _flat(pages: torch.Tensor) -> torch.Tensor:
    """Canonical pages as a flat region; raises `RuntimeError` where they aren't contiguous."""
    return pages.view(-1)
