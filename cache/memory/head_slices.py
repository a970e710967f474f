"""Head slices: copies between two ranks' shares of the same pages, of those heads that both ranks hold.

Ranks of a worker hold slices of the heads, and two workers may have different numbers of ranks. Where both hold the
same heads of a buffer, its pages are copied whole, with as few pieces as their layouts allow
(`cache.memory.page_moves`). Elsewhere each token has a run of heads in common, at different places on both sides: a
strided copy, of all layers and tokens of a page at once. On a GPU that is one launch a buffer, and nothing runs on the
other end's GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolSetSpec, copies
from twinpool.cache.memory.memory_layout import BufferLayout, packed, word_dtype
from twinpool.cache.memory.page_moves import blocks, copy_block, copy_inner_rows

HeadSlice = Mapping[str, tuple[str, ...]]
"""By pool, the names of buffers whose common heads one rank writes to another; pools without any are left out."""


def common(one: BufferSpec, other: BufferSpec) -> range:
    """The heads that two ranks' shares of a buffer have in common, by their numbers in the whole model.

    For a buffer without heads, the range of its first axis: both ranks hold all of it.
    """
    if not one.heads:
        return range(one.shape[0])
    first = max(one.first_head, other.first_head)
    return range(first, max(first, min(b.first_head + b.shape[0] for b in (one, other))))


def cuts(whole: PoolSetSpec, sources: int, targets: int) -> dict[tuple[int, int], HeadSlice]:
    """Return which buffers each of `sources` ranks writes to each of `targets` ranks, by (source rank, target rank).

    Every target gets every head that it holds, and every buffer without heads, exactly once. Heads that several sources
    hold come from the one that faces the target, so that all sources have their share of the work.
    """
    shards = [[whole.shard(rank, size) for rank in range(size)] for size in (sources, targets)]
    out: dict[tuple[int, int], HeadSlice] = {}
    for target in range(targets):
        facing = target * sources // targets
        for source in range(sources):
            cut = {}
            for pool in whole.pools:
                theirs = shards[1][target].by_name[pool.name]
                names = [
                    mine.name
                    for mine, its in zip(shards[0][source].by_name[pool.name].buffers, theirs.buffers, strict=True)
                    if common(mine, its) and source == _holder(source, copies(mine, sources), facing)
                ]
                if names:
                    cut[pool.name] = tuple(names)
            if cut:
                out[source, target] = cut
    return out


def _holder(source: int, count: int, facing: int) -> int:
    """Which of the `count` ranks with the same heads as `source` writes them to a target that rank `facing` faces."""
    first = source - source % count
    return facing if first <= facing < first + count else first + facing % count


def chosen(buffers: Sequence[BufferLayout], names: Sequence[str]) -> tuple[BufferLayout, ...]:
    return tuple(b for b in buffers if b.spec.name in names)


def of_layers(buffers: Sequence[BufferLayout], layers: range) -> tuple[BufferLayout, ...]:
    """Those of the buffers that have any of `layers`, as buffers of these layers alone."""
    found = []
    for buffer in buffers:
        mine = range(buffer.spec.layers)[layers.start : layers.stop]
        if mine:
            found.append(
                replace(buffer, spec=replace(buffer.spec, layers=len(mine)), base=buffer.offset(mine.start, 0))
            )
    return tuple(found)


def packed_layouts(
    mine: Sequence[BufferSpec], theirs: Sequence[BufferSpec], page_tokens: int
) -> tuple[BufferLayout, ...]:
    """The canonical layout of the heads that two ranks share."""
    specs = []
    for one, other in zip(mine, theirs, strict=True):
        heads = common(one, other)
        specs.append(replace(one, shape=(len(heads), *one.shape[1:]), first_head=heads.start if one.heads else 0))
    return packed(specs, page_tokens)


def copy_common(
    sources: Sequence[BufferLayout],
    source: torch.Tensor,
    source_pages: tuple[int, Sequence[int]],
    targets: Sequence[BufferLayout],
    target: torch.Tensor,
    target_pages: tuple[int, Sequence[int]],
    page_tokens: int,
    layers: range | None = None,
) -> None:
    """Copy from page to page the heads that the buffers on both sides have in common; with `layers`, of those alone.

    `sources` and `targets` have the same buffers in the same order; regions are uint8. `..._pages`: how many pages (or
    slots) the region has, and which of them are copied, in order.
    """
    whole = [_same(a.spec, b.spec) for a, b in zip(sources, targets, strict=True)]
    alike = tuple(tuple(b for b, same in zip(side, whole, strict=True) if same) for side in (sources, targets))
    for block in blocks(alike[0], alike[1], layers):
        copy_block(block, source, *source_pages, target, *target_pages)
    for mine, its, same in zip(sources, targets, whole, strict=True):
        if not same:
            _copy_heads(mine, source, source_pages, its, target, target_pages, page_tokens, layers)


def _same(one: BufferSpec, other: BufferSpec) -> bool:
    return (one.first_head, one.shape) == (other.first_head, other.shape)


def _copy_heads(
    mine: BufferLayout,
    source: torch.Tensor,
    source_pages: tuple[int, Sequence[int]],
    its: BufferLayout,
    target: torch.Tensor,
    target_pages: tuple[int, Sequence[int]],
    page_tokens: int,
    layers: range | None,
) -> None:
    found = common_heads(mine, source, source_pages[0], its, target, target_pages[0], page_tokens)
    sides = []
    for by_head in found:
        some = (by_head if layers is None else by_head[layers.start : layers.stop]).transpose(1, 2)
        sides.append(some.view(*some.shape[:3], -1))
    copy_inner_rows(sides[0], source_pages[1], sides[1], target_pages[1])


def common_heads(
    mine: BufferLayout,
    source: torch.Tensor,
    source_count: int,
    its: BufferLayout,
    target: torch.Tensor,
    target_count: int,
    page_tokens: int,
) -> list[torch.Tensor]:
    """The heads that two ranks' shares of a buffer have in common, in both uint8 regions of so many pages (or slots):
    two views of integers [layers, pages, tokens, heads, words]."""
    heads, tokens = common(mine.spec, its.spec), page_tokens if mine.spec.index is IndexSpace.TOKEN else 1
    strides = (n for b in (mine, its) for n in (b.base, b.layer_stride, b.index_stride))
    word = word_dtype(mine.spec.shape_bytes // mine.spec.shape[0], *strides)
    views = []
    for buffer, region, count in ((mine, source, source_count), (its, target, target_count)):
        by_head = buffer.stack(region, count, word).view(buffer.spec.layers, count, tokens, buffer.spec.shape[0], -1)
        first = heads.start - buffer.spec.first_head
        views.append(by_head[:, :, :, first : first + len(heads)])
    return views
