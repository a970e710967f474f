"""The memory layout: where each entry of each buffer lies in a pool set's region of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolSetSpec, PoolSpec

ALIGNMENT = 64
"""Buffers start on multiples of this many bytes: vector loads, DMA and cache lines like it."""


class LayoutOrder(StrEnum):
    """The order of a region, see `cache.memory.kv_cache_spec`."""

    LAYER_FIRST = "layer-first"
    PAGE_FIRST = "page-first"


@dataclass(frozen=True)
class BufferLayout:
    """Where one buffer lies in the region, in bytes."""

    spec: BufferSpec
    base: int
    layer_stride: int
    index_stride: int
    entry_bytes: int

    def offset(self, layer: int, index: int) -> int:
        return self.base + layer * self.layer_stride + index * self.index_stride

    @property
    def word(self) -> torch.dtype:
        """The widest integer type whose size divides the entries' length and all their offsets."""
        return word_dtype(self.base, self.layer_stride, self.index_stride, self.entry_bytes)

    def stack(self, region: torch.Tensor, count: int, word: torch.dtype | None = None) -> torch.Tensor:
        """All entries of the buffer as integers: [layers, count, words], sharing memory with the uint8 `region`."""
        word = word or self.word
        size = word.itemsize
        shape = (self.spec.layers, count, self.entry_bytes // size)
        strides = (self.layer_stride // size, self.index_stride // size, 1)
        flat = region[self.base :]
        flat = flat[: len(flat) // size * size].view(word)
        return flat.as_strided(shape, strides, flat.storage_offset())


@dataclass(frozen=True)
class PoolSetLayout:
    """The layout of a pool set with `counts` pages or slots in each pool, index 0 (the null page or slot) included."""

    spec: PoolSetSpec
    counts: Mapping[str, int]
    order: LayoutOrder = LayoutOrder.LAYER_FIRST

    def __post_init__(self) -> None:
        if set(self.counts) != set(self.spec.by_name):
            raise ValueError(f"counts are for pools {sorted(self.counts)}, the spec has {sorted(self.spec.by_name)}")

    @cached_property
    def buffers(self) -> dict[str, tuple[BufferLayout, ...]]:
        """Layouts by pool name, in the order of the registry."""
        out: dict[str, tuple[BufferLayout, ...]] = {}
        base = 0
        for pool in self.spec.pools:
            count, unit = self.counts[pool.name], self.spec.unit_bytes(pool.name)
            layouts = []
            for buffer in pool.buffers:
                entry = buffer.entry_bytes(self.spec.page_tokens)
                if self.order is LayoutOrder.LAYER_FIRST:
                    layer_stride = _aligned(entry * count)
                    layouts.append(BufferLayout(buffer, base, layer_stride, entry, entry))
                    base += layer_stride * buffer.layers
                else:
                    layouts.append(BufferLayout(buffer, base, entry, unit, entry))
                    base += entry * buffer.layers
            if self.order is LayoutOrder.PAGE_FIRST:
                base = _aligned(base + unit * (count - 1))
            out[pool.name] = tuple(layouts)
        return out

    @cached_property
    def nbytes(self) -> int:
        ends = [
            b.offset(b.spec.layers - 1, self.counts[pool] - 1) + b.entry_bytes
            for pool, buffers in self.buffers.items()
            for b in buffers
        ]
        return _aligned(max(ends))

    def each(self) -> Iterator[tuple[PoolSpec, BufferLayout]]:
        """Every buffer with its pool, in the order of the registry."""
        for pool in self.spec.pools:
            for buffer in self.buffers[pool.name]:
                yield pool, buffer

    def view(self, region: torch.Tensor, pool: str, buffer: BufferLayout, layer: int) -> torch.Tensor:
        """The buffer's entries in `layer`, sharing memory with the uint8 `region`.

        Shape [pages, page_tokens, *shape] for a buffer by token, [pages or slots, *shape] for the others.
        """
        spec, size = buffer.spec, buffer.spec.dtype.itemsize
        start = buffer.offset(layer, 0)
        stop = start + (self.counts[pool] - 1) * buffer.index_stride + buffer.entry_bytes
        flat = region[start:stop].view(spec.dtype)
        inner = (self.spec.page_tokens, *spec.shape) if spec.index is IndexSpace.TOKEN else spec.shape
        strides = [prod(inner[i + 1 :]) for i in range(len(inner))]
        return flat.as_strided(
            (self.counts[pool], *inner), (buffer.index_stride // size, *strides), flat.storage_offset()
        )

    def page(self, region: torch.Tensor, pool: str, index: int) -> torch.Tensor:
        """One page or slot of a page-first region: uint8 [unit_bytes], contiguous, sharing its memory."""
        assert self.order is LayoutOrder.PAGE_FIRST, "only a page-first page is contiguous"
        start = self.buffers[pool][0].offset(0, index)
        return region[start : start + self.spec.unit_bytes(pool)]


def packed(specs: Sequence[BufferSpec], page_tokens: int) -> tuple[BufferLayout, ...]:
    """The canonical layout of pages with these buffers: page after page, each with its buffers and their layers in
    order."""
    entries = [spec.entry_bytes(page_tokens) for spec in specs]
    bases = [0, *accumulate(spec.layers * entry for spec, entry in zip(specs, entries, strict=True))]
    return tuple(
        BufferLayout(spec, base, entry, bases[-1], entry)
        for spec, base, entry in zip(specs, bases, entries, strict=False)
    )


def word_dtype(*nbytes: int) -> torch.dtype:
    """The widest integer type whose size divides all of `nbytes`."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(n % dtype.itemsize == 0 for n in nbytes):
            return dtype
    return torch.uint8


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
