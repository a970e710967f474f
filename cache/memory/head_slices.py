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
from typing import NamedTuple

import torch

from twinpool.cache.memory.kv_cache_spec import (
    BufferLayout,
    BufferSpec,
    IndexSpace,
    PoolSetSpec,
    copies,
    overlap,
    packed,
    word_dtype,
)
from twinpool.cache.memory.page_moves import blocks, copy_block, copy_inner_rows

HeadSlice = Mapping[str, tuple[str, ...]]
"""By pool, the names of buffers of whose common layers one rank writes the common heads to another; pools without any
are left out."""


class RankCount(NamedTuple):
    """How many ranks a worker has, and in how many stages they are."""

    size: int
    stages: int = 1


def common(one: BufferSpec, other: BufferSpec) -> range:
    """The heads that two ranks' shares of a buffer have in common, by their numbers in the whole model.

    For a buffer without heads, the range of its first axis: both ranks hold all of it.
    """
    if not one.heads:
        return range(one.shape[0])
    first = max(one.first_head, other.first_head)
    return range(first, max(first, min(b.first_head + b.shape[0] for b in (one, other))))


def cuts(whole: PoolSetSpec, sources: RankCount, targets: RankCount) -> dict[tuple[int, int], HeadSlice]:
    """Return which buffers each rank of a writer writes to each rank of a reader, by (source rank, target rank).

    Every target gets every head of every layer that it holds, and every buffer without heads, exactly once. Heads that
    several sources hold come from the one that faces the target, so that all sources have their share of the work.
    """
    shards = [[whole.shard(rank, *ranks) for rank in range(ranks.size)] for ranks in (sources, targets)]
    widths = [ranks.size // ranks.stages for ranks in (sources, targets)]
    out: dict[tuple[int, int], HeadSlice] = {}
    for target in range(targets.size):
        facing = target % widths[1] * widths[0] // widths[1]
        for source in range(sources.size):
            cut = {}
            for pool in whole.pools:
                theirs = shards[1][target].by_name[pool.name]
                names = [
                    mine.name
                    for mine, its in zip(shards[0][source].by_name[pool.name].buffers, theirs.buffers, strict=True)
                    if common(mine, its)
                    and overlap(mine.here, its.here)
                    and source % widths[0] == _holder(source % widths[0], copies(mine, widths[0]), facing)
                ]
                if names:
                    cut[pool.name] = tuple(names)
            if cut:
                out[source, target] = cut
    return out


def _holder(source: int, count: int, facing: int) -> int:
    """Which of the `count` ranks of a stage with the same heads as `source` writes them to a target that rank `facing`
    of the stage faces."""
    first = source - source % count
    return facing if first <= facing < first + count else first + facing % count


def chosen(buffers: Sequence[BufferLayout], names: Sequence[str]) -> tuple[BufferLayout, ...]:
    return tuple(b for b in buffers if b.spec.name in names)


def of_layers(buffers: Sequence[BufferLayout], layers: range) -> tuple[BufferLayout, ...]:
    """Those of the buffers that have any of `layers`, as buffers of these layers alone."""
    found = ((buffer, overlap(buffer.spec.here, layers)) for buffer in buffers)
    return tuple(_cut_to(buffer, here) for buffer, here in found if here)


def _cut_to(buffer: BufferLayout, layers: range) -> BufferLayout:
    """The buffer with these of its layers alone."""
    spec = buffer.spec
    if layers == spec.here:
        return buffer
    base = buffer.offset(layers.start - spec.first_layer, 0)
    return replace(buffer, spec=replace(spec, layers=len(layers), first_layer=layers.start), base=base)


class LayerPairs(NamedTuple):
    """The same layers of the same buffers, in two ranks' regions."""

    mine: tuple[BufferLayout, ...]
    its: tuple[BufferLayout, ...]


def layer_pairs(mine: Sequence[BufferLayout], its: Sequence[BufferLayout], layers: range | None = None) -> LayerPairs:
    """The layers that both sides have of each buffer, and of these those of `layers`; buffers without any are left out.
    Both sides have the same buffers in the same order."""
    pairs = []
    for one, other in zip(mine, its, strict=True):
        both = overlap(one.spec.here, other.spec.here)
        both = both if layers is None else overlap(both, layers)
        if both:
            pairs.append((_cut_to(one, both), _cut_to(other, both)))
    return LayerPairs(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def packed_layouts(
    mine: Sequence[BufferSpec], theirs: Sequence[BufferSpec], page_tokens: int
) -> tuple[BufferLayout, ...]:
    """The canonical layout of the heads and layers that two ranks share."""
    return packed([shared_spec(one, other) for one, other in zip(mine, theirs, strict=True)], page_tokens)


def shared_spec(one: BufferSpec, other: BufferSpec) -> BufferSpec:
    """A buffer of the heads and layers that two ranks share of one; they share some."""
    heads, layers = common(one, other), overlap(one.here, other.here)
    first = heads.start if one.heads else 0
    shape = (len(heads), *one.shape[1:])
    return replace(one, shape=shape, first_head=first, layers=len(layers), first_layer=layers.start)


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
    """Copy from page to page the heads and layers that the buffers on both sides have in common; with `layers`, of
    those alone.

    `sources` and `targets` have the same buffers in the same order; regions are uint8. `..._pages`: how many pages (or
    slots) the region has, and which of them are copied, in order.
    """
    sources, targets = layer_pairs(sources, targets, layers)
    whole = [_same(a.spec, b.spec) for a, b in zip(sources, targets, strict=True)]
    alike = tuple(tuple(b for b, same in zip(side, whole, strict=True) if same) for side in (sources, targets))
    for block in blocks(alike[0], alike[1]):
        copy_block(block, source, *source_pages, target, *target_pages)
    for mine, its, same in zip(sources, targets, whole, strict=True):
        if not same:
            _copy_heads(mine, source, source_pages, its, target, target_pages, page_tokens)


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
) -> None:
    found = common_heads(mine, source, source_pages[0], its, target, target_pages[0], page_tokens)
    sides = []
    for by_head in found:
        some = by_head.transpose(1, 2)
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
    two views of integers [layers, pages, tokens, heads, words]. Both have the same layers (`layer_pairs`)."""
    heads, tokens = common(mine.spec, its.spec), page_tokens if mine.spec.index is IndexSpace.TOKEN else 1
    strides = (n for b in (mine, its) for n in (b.base, b.layer_stride, b.index_stride))
    word = word_dtype(mine.spec.shape_bytes // mine.spec.shape[0], *strides)
    views = []
    for buffer, region, count in ((mine, source, source_count), (its, target, target_count)):
        by_head = buffer.stack(region, count, word).view(buffer.spec.layers, count, tokens, buffer.spec.shape[0], -1)
        first = heads.start - buffer.spec.first_head
        views.append(by_head[:, :, :, first : first + len(heads)])
    return views
