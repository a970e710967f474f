"""One registry of state: a model declares its pool set here and nothing else enumerates it.

A *pool* is the set of buffers that share one index space and one allocator; a *buffer* is one kind of state. The
memory of a pool set is one flat region of bytes (so that a data plane registers it once); a buffer lies in it
layer-first: `base + layer * layer_stride + page * page_stride`. Moving, clearing, digesting and accounting walk the
registry and name no buffer, so a model with a new buffer gets all of them without a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

ALIGNMENT = 64
"""Buffers start on multiples of this many bytes: vector loads, DMA and cache lines like it."""


@dataclass(frozen=True)
class BufferSpec:
    """One kind of state, `layers` times, indexed by token position within pages.

    `shape` is the shape of one token's entry, e.g. ``(kv_heads, head_dim)``.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PoolSpec:
    """Buffers that share pages and an allocator."""

    name: str
    buffers: tuple[BufferSpec, ...]


@dataclass(frozen=True)
class PoolSetSpec:
    """All state of one seat, as its model declares it."""

    page_tokens: int
    pools: tuple[PoolSpec, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers of all buffers."""
        return sum(b.layers * b.token_bytes for p in self.pools for b in p.buffers)

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.token_bytes


@dataclass(frozen=True)
class BufferLayout:
    """Where one buffer lies in the region, in bytes."""

    spec: BufferSpec
    base: int
    layer_stride: int
    page_stride: int

    def offset(self, layer: int, page: int) -> int:
        return self.base + layer * self.layer_stride + page * self.page_stride


@dataclass(frozen=True)
class PoolSetLayout:
    """A pool set with its number of pages: every byte has an address. The null page is page 0 and counted."""

    spec: PoolSetSpec
    pages: int

    @cached_property
    def buffers(self) -> dict[str, tuple[BufferLayout, ...]]:
        """Layouts by pool name, in the order of the registry."""
        out: dict[str, tuple[BufferLayout, ...]] = {}
        base = 0
        for pool in self.spec.pools:
            layouts = []
            for buffer in pool.buffers:
                page_stride = buffer.token_bytes * self.spec.page_tokens
                layer_stride = _aligned(page_stride * self.pages)
                layouts.append(BufferLayout(buffer, base, layer_stride, page_stride))
                base += layer_stride * buffer.layers
            out[pool.name] = tuple(layouts)
        return out

    @cached_property
    def nbytes(self) -> int:
        return sum(b.layer_stride * b.spec.layers for bs in self.buffers.values() for b in bs)

    def view(self, region: torch.Tensor, buffer: BufferLayout, layer: int) -> torch.Tensor:
        """The buffer's pages in `layer`: [pages, page_tokens, *shape], sharing memory with the uint8 `region`."""
        size = self.pages * buffer.page_stride
        start = buffer.offset(layer, 0)
        flat = region[start : start + size].view(buffer.spec.dtype)
        return flat.view(self.pages, self.spec.page_tokens, *buffer.spec.shape)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
