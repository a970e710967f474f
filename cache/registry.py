"""One registry of state: a model declares its pool set here and nothing else enumerates it.

A *pool* is the set of buffers that share one index space and one allocator; a *buffer* is one kind of state. Pools
come in three kinds: full attention (a page for every run of positions), sliding window (a page for the last runs
only) and state (a slot a sequence, whatever its length). Within a page a buffer is laid out token by token, or as one
entry for the whole page; a state buffer has one entry a slot. Moving, clearing, digesting and accounting walk the
registry and name no buffer, so a model with a new buffer gets all of them without a line.

The memory of a pool set is one flat region of bytes, so that a data plane registers it once. An entry of a buffer
lies at `base + layer * layer_stride + index * index_stride`, in one of two orders:

    layer-first   one layer of all pages together: what kernels read
    page-first    all layers of all buffers of a page together: one contiguous read for storage and network
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod

import torch

from contracts.errors import ConfigError

ALIGNMENT = 64
"""Buffers start on multiples of this many bytes: vector loads, DMA and cache lines like it."""


class Index(StrEnum):
    """What one entry of a buffer belongs to."""

    TOKEN = "token"
    PAGE = "page"
    SLOT = "slot"


class Kind(StrEnum):
    """Which part of a sequence a pool holds."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


class Order(StrEnum):
    """How a region is laid out."""

    LAYER_FIRST = "layer-first"
    PAGE_FIRST = "page-first"


@dataclass(frozen=True)
class BufferSpec:
    """One kind of state, `layers` times.

    `shape` is the shape of one entry: of a token, e.g. ``(kv_heads, head_dim)``, of a whole page, or of a slot. Where
    ranks hold slices of the heads, `heads` is their number over all ranks and `first_head` the first one here; axis 0
    of `shape` counts those that are here.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: Index = Index.TOKEN
    heads: int = 0
    """0: not sliced by heads, every rank holds all of it."""
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.shape or min(self.shape) < 1:
            raise ValueError(f"buffer {self.name}: layers and every length of its shape must be 1 or more")
        if self.heads and not 0 <= self.first_head <= self.heads - self.shape[0]:
            raise ValueError(
                f"buffer {self.name}: heads {self.first_head}..{self.first_head + self.shape[0] - 1} aren't among "
                f"{self.heads}"
            )

    @property
    def shape_bytes(self) -> int:
        """Bytes of one `shape` in one layer: of one token, or of the whole page or slot."""
        return prod(self.shape) * self.dtype.itemsize

    def entry_bytes(self, page_tokens: int) -> int:
        """Bytes of one page or slot in one layer."""
        return self.shape_bytes * (page_tokens if self.index is Index.TOKEN else 1)


@dataclass(frozen=True)
class PoolSpec:
    """Buffers that share pages (or slots) and an allocator."""

    name: str
    buffers: tuple[BufferSpec, ...]
    kind: Kind = Kind.FULL
    window_tokens: int = 0
    """Of a window pool: positions that attention sees, the query's own included."""

    def __post_init__(self) -> None:
        names = [b.name for b in self.buffers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"pool {self.name}: it needs buffers with different names, got {names}")
        for buffer in self.buffers:
            if (buffer.index is Index.SLOT) != (self.kind is Kind.STATE):
                raise ValueError(f"pool {self.name}: a {self.kind} pool has no buffer by {buffer.index}: {buffer.name}")
        if (self.window_tokens > 0) != (self.kind is Kind.WINDOW):
            raise ValueError(f"pool {self.name}: window_tokens is for window pools, and they need it")

    @property
    def layers(self) -> int:
        """The most layers that one of its buffers has."""
        return max(b.layers for b in self.buffers)


@dataclass(frozen=True)
class PoolSetSpec:
    """All state of one seat, as its model declares it: one full pool, and any number of others."""

    page_tokens: int
    pools: tuple[PoolSpec, ...]

    def __post_init__(self) -> None:
        names = [p.name for p in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools need different names, got {names}")
        if sum(p.kind is Kind.FULL for p in self.pools) != 1:
            raise ValueError("a pool set has exactly one full pool: it says which prefixes there are")

    @cached_property
    def by_name(self) -> dict[str, PoolSpec]:
        return {p.name: p for p in self.pools}

    @cached_property
    def full(self) -> PoolSpec:
        return next(p for p in self.pools if p.kind is Kind.FULL)

    @cached_property
    def whole(self) -> PoolSetSpec:
        """The same with the heads of all ranks."""
        pools = [
            replace(
                pool,
                buffers=tuple(
                    replace(b, shape=(b.heads or b.shape[0], *b.shape[1:]), first_head=0) for b in pool.buffers
                ),
            )
            for pool in self.pools
        ]
        return PoolSetSpec(self.page_tokens, tuple(pools))

    def shard(self, rank: int, size: int) -> PoolSetSpec:
        """What rank `rank` of `size` holds of this whole pool set: its share of the heads of every buffer that has any.

        Heads are sliced where the ranks divide them, and each goes to several ranks where they divide the ranks.
        Raises `ConfigError` where neither is so.
        """
        assert 0 <= rank < size
        pools = tuple(replace(p, buffers=tuple(_share(b, rank, size) for b in p.buffers)) for p in self.pools)
        return PoolSetSpec(self.page_tokens, pools)

    def unit_bytes(self, pool: str) -> int:
        """Bytes of one page (or slot) of `pool`, all layers of all its buffers."""
        return sum(b.layers * b.entry_bytes(self.page_tokens) for b in self.by_name[pool].buffers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the full pool."""
        return self.unit_bytes(self.full.name)

    def window_pages(self, pool: str) -> int:
        """Pages before a page boundary that a window reaches back into."""
        return -(-(self.by_name[pool].window_tokens - 1) // self.page_tokens)

    def window_hold(self, pool: str, stride: int) -> int:
        """Pages of a window pool that a request holds at most, where steps write up to `stride` positions beyond
        what is committed: those that the window reaches back into from the last page boundary, and those of the steps.
        """
        return self.window_pages(pool) + 1 + (self.page_tokens - 2 + stride) // self.page_tokens

    def even(self, count: int) -> dict[str, int]:
        """The same number of indices for every pool."""
        return {p.name: count for p in self.pools}


def _share(buffer: BufferSpec, rank: int, size: int) -> BufferSpec:
    if not buffer.heads:
        return buffer
    if buffer.heads % size and size % buffer.heads:
        good = [n for n in (1, 2, 4, 8, 16) if not buffer.heads % n or not n % buffer.heads]
        raise ConfigError(
            f"{size} ranks can't share the {buffer.heads} heads of {buffer.name}: tp can be {', '.join(map(str, good))}"
        )
    count, first = max(1, buffer.heads // size), rank * buffer.heads // size
    return replace(buffer, shape=(count, *buffer.shape[1:]), first_head=first)


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
        """The widest integers that every entry is made of and starts on a multiple of."""
        return word_dtype(self.base, self.layer_stride, self.index_stride, self.entry_bytes)

    def stack(self, region: torch.Tensor, count: int, word: torch.dtype | None = None) -> torch.Tensor:
        """All of it as integers: [layers, count, words], sharing memory with the uint8 `region`."""
        word = word or self.word
        size = word.itemsize
        shape = (self.spec.layers, count, self.entry_bytes // size)
        strides = (self.layer_stride // size, self.index_stride // size, 1)
        flat = region[self.base :]
        flat = flat[: len(flat) // size * size].view(word)
        return flat.as_strided(shape, strides, flat.storage_offset())


@dataclass(frozen=True)
class PoolSetLayout:
    """A pool set with its number of pages and slots: every byte has an address. Index 0 of each pool, the null page
    or slot, is counted."""

    spec: PoolSetSpec
    counts: Mapping[str, int]
    order: Order = Order.LAYER_FIRST

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
                if self.order is Order.LAYER_FIRST:
                    layer_stride = _aligned(entry * count)
                    layouts.append(BufferLayout(buffer, base, layer_stride, entry, entry))
                    base += layer_stride * buffer.layers
                else:
                    layouts.append(BufferLayout(buffer, base, entry, unit, entry))
                    base += entry * buffer.layers
            if self.order is Order.PAGE_FIRST:
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
        inner = (self.spec.page_tokens, *spec.shape) if spec.index is Index.TOKEN else spec.shape
        strides = [prod(inner[i + 1 :]) for i in range(len(inner))]
        return flat.as_strided(
            (self.counts[pool], *inner), (buffer.index_stride // size, *strides), flat.storage_offset()
        )

    def page(self, region: torch.Tensor, pool: str, index: int) -> torch.Tensor:
        """One page or slot of a page-first region: uint8 [unit_bytes], contiguous, sharing its memory."""
        assert self.order is Order.PAGE_FIRST, "only a page-first page is contiguous"
        start = self.buffers[pool][0].offset(0, index)
        return region[start : start + self.spec.unit_bytes(pool)]


def word_dtype(*nbytes: int) -> torch.dtype:
    """The widest integer type whose size divides all of `nbytes`."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(n % dtype.itemsize == 0 for n in nbytes):
            return dtype
    return torch.uint8


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
