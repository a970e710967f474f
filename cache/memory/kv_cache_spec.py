"""The registry of state: a model declares its pools and buffers as a `PoolSetSpec`, and nothing else lists them.

A *pool* is the set of buffers that share one index space and one allocator; a *buffer* is one kind of state. Pools
come in three kinds: full attention (a page for every run of positions), sliding window (a page for the last runs
only) and state (a slot a sequence, whatever its length). Within a page a buffer is laid out token by token, or as one
entry for the whole page; a state buffer has one entry a slot. Moving, clearing, digesting and accounting walk the
registry and name no buffer, so a new buffer of a model needs no code for any of these.

The memory of a pool set is one flat region of bytes, so that a data plane registers it once. An entry of a buffer
lies at `base + layer * layer_stride + index * index_stride`, in one of two orders (`PoolSetLayout`):

    layer-first   one layer of all pages together: what kernels read
    page-first    all layers of all buffers of a page together: one contiguous read for storage and network

A pool's kind says which numbers of pages and slots a sequence needs to go on from a position (`due`). State is numbered
along the sequence: page n holds positions n * page_tokens up to the next page, in full and window pools alike. A state
slot that is the state after all positions has the number of the last page, whose block hash it shares. For a prompt of
27 positions, pages of 4 and a window of 9 (the query's own position and 8 before it):

    page       |  0 |  1 |  2 |  3 |  4 |  5 | 6 .|       the 28th position is computed next
    full       [==================================)       range(0, 7)   every page, the last one partly filled
    window      . . . . . . . . . . [=============)       range(4, 7)   pages with one of positions 19 .. 26
    state       . . . . . . . . . . . . . . . . [=)       range(6, 7)   one slot, after position 26

At zero positions nothing is due, and of a window of one position nothing ever is: it reaches back to no page. *Missing*
pages are due and not held: subtracted pool by pool, as each pool is lost and found on its own (hazard A12).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from math import gcd, prod

import torch

from twinpool.contracts.errors import ConfigError


class IndexSpace(StrEnum):
    """What one entry of a buffer belongs to."""

    TOKEN = "token"
    PAGE = "page"
    SLOT = "slot"


class PoolKind(StrEnum):
    """Which part of a sequence a pool holds."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


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
    index: IndexSpace = IndexSpace.TOKEN
    heads: int = 0
    """0: not sliced by heads, every rank holds all of it."""
    first_head: int = 0
    depths: tuple[int, ...] = ()
    """The layers of the model, ascending, that keep their state in this buffer, on all ranks; empty: its layers can't
    be divided into stages."""
    first_layer: int = 0
    """The first layer here, of those on all ranks: where ranks are stages, each has its own layers alone."""

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.shape or min(self.shape) < 1:
            raise ValueError(f"buffer {self.name}: layers and every length of its shape must be 1 or more")
        if self.heads and not 0 <= self.first_head <= self.heads - self.shape[0]:
            raise ValueError(
                f"buffer {self.name}: heads {self.first_head}..{self.first_head + self.shape[0] - 1} aren't among "
                f"{self.heads}"
            )
        if self.depths and not 0 <= self.first_layer <= len(self.depths) - self.layers:
            raise ValueError(
                f"buffer {self.name}: layers {self.first_layer}..{self.first_layer + self.layers - 1} aren't among "
                f"{len(self.depths)}"
            )

    @property
    def here(self) -> range:
        """The layers that are here, by their numbers on all ranks."""
        return range(self.first_layer, self.first_layer + self.layers)

    @property
    def all_layers(self) -> int:
        """The layers on all ranks."""
        return len(self.depths) or self.layers

    @property
    def shape_bytes(self) -> int:
        """Bytes of one `shape` in one layer: of one token, or of the whole page or slot."""
        return prod(self.shape) * self.dtype.itemsize

    def entry_bytes(self, page_tokens: int) -> int:
        """Bytes of one page or slot in one layer."""
        return self.shape_bytes * (page_tokens if self.index is IndexSpace.TOKEN else 1)


@dataclass(frozen=True)
class PoolSpec:
    """Buffers that share pages (or slots) and an allocator."""

    name: str
    buffers: tuple[BufferSpec, ...]
    kind: PoolKind = PoolKind.FULL
    window_tokens: int = 0
    """Positions that attention sees in a window pool, the query's own included; 0 for other kinds."""

    def __post_init__(self) -> None:
        names = [b.name for b in self.buffers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"pool {self.name}: it needs buffers with different names, got {names}")
        for buffer in self.buffers:
            if (buffer.index is IndexSpace.SLOT) != (self.kind is PoolKind.STATE):
                raise ValueError(f"pool {self.name}: a {self.kind} pool has no buffer by {buffer.index}: {buffer.name}")
        if (self.window_tokens > 0) != (self.kind is PoolKind.WINDOW):
            raise ValueError(f"pool {self.name}: window_tokens is for window pools, and they need it")

    @property
    def layers(self) -> int:
        """The largest number of layers of any of its buffers, on all ranks."""
        return max(b.all_layers for b in self.buffers)

    @property
    def even(self) -> bool:
        """Whether each of its layers is of the same layer of the model in all buffers: GLM-5 keeps index keys in fewer
        layers than latents."""
        return len({b.depths for b in self.buffers if b.depths}) < 2


@dataclass(frozen=True)
class PoolSetSpec:
    """All state of one worker, as its model declares it: one full pool, and any number of others."""

    page_tokens: int
    pools: tuple[PoolSpec, ...]
    depth: int = 0
    """Layers of the model, those without state too; 0: they can't be divided into stages."""
    stages: int = 1
    stage: int = 0
    """Into how many stages a worker divides its layers, and which of them this is."""

    def __post_init__(self) -> None:
        names = [p.name for p in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools need different names, got {names}")
        if sum(p.kind is PoolKind.FULL for p in self.pools) != 1:
            raise ValueError("a pool set has exactly one full pool: it says which prefixes there are")

    @cached_property
    def by_name(self) -> dict[str, PoolSpec]:
        return {p.name: p for p in self.pools}

    @cached_property
    def full(self) -> PoolSpec:
        return next(p for p in self.pools if p.kind is PoolKind.FULL)

    @cached_property
    def whole(self) -> PoolSetSpec:
        """This spec with the heads and layers of all ranks."""
        pools = [
            replace(
                pool,
                buffers=tuple(
                    replace(
                        b, shape=(b.heads or b.shape[0], *b.shape[1:]), first_head=0, layers=b.all_layers, first_layer=0
                    )
                    for b in pool.buffers
                ),
            )
            for pool in self.pools
        ]
        return PoolSetSpec(self.page_tokens, tuple(pools), self.depth)

    def shard(self, rank: int, size: int, stages: int = 1) -> PoolSetSpec:
        """The spec of rank `rank` of `size`, which are in `stages`: the ranks of a stage, which follow each other, have
        its layers, and each its share of the heads of every buffer that has any.

        Where the ranks of a stage divide the number of heads, each gets a slice; where that number divides theirs, each
        head goes to several ranks. Raises `ConfigError` where neither is so, and where layers can't be divided.
        """
        assert 0 <= rank < size
        if stages < 1 or size % stages:
            raise ConfigError(f"{size} ranks can't be in {stages} stages of as many each")
        here, width = self.staged(rank * stages // size, stages), size // stages
        pools = tuple(replace(p, buffers=tuple(_share(b, rank % width, width) for b in p.buffers)) for p in here.pools)
        return replace(here, pools=pools)

    def staged(self, stage: int, stages: int) -> PoolSetSpec:
        """The spec of one of `stages` stages: the same pools, each with the layers of that stage alone. Raises
        `ConfigError` where layers can't be divided so that every stage has some of every buffer."""
        if stages == 1:
            return self
        if not self.depth:
            raise ConfigError("the layers of this model can't be divided into stages")
        layers = stage_layers(self.depth, stage, stages)
        pools = []
        for pool in self.pools:
            buffers = []
            for buffer in pool.buffers:
                mine = [at for at, depth in enumerate(buffer.depths) if depth in layers]
                if not mine:
                    raise ConfigError(
                        f"stage {stage} of {stages}, layers {layers.start} to {layers.stop - 1} of {self.depth}, would "
                        f"have none of the {len(buffer.depths)} layers that keep {buffer.name} in pool {pool.name}"
                    )
                buffers.append(replace(buffer, layers=len(mine), first_layer=mine[0]))
            pools.append(replace(pool, buffers=tuple(buffers)))
        return replace(self, pools=tuple(pools), stages=stages, stage=stage)

    def unit_bytes(self, pool: str, layers: range | None = None) -> int:
        """Bytes of one page (or slot) of `pool`, all its buffers; all layers that are here, or those of `layers`."""
        return sum(
            len(b.here if layers is None else overlap(b.here, layers)) * b.entry_bytes(self.page_tokens)
            for b in self.by_name[pool].buffers
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the full pool."""
        return self.unit_bytes(self.full.name)

    def window_pages(self, pool: str) -> int:
        """How many pages before a page boundary the window of `pool` reaches back into."""
        return -(-(self.by_name[pool].window_tokens - 1) // self.page_tokens)

    def window_hold(self, pool: str, stride: int) -> int:
        """The most pages of a window pool that a request holds, if steps write up to `stride` positions beyond the
        committed length: those that the window reaches back into from the last page boundary, and those of the steps.
        """
        return self.window_pages(pool) + 1 + (self.page_tokens - 2 + stride) // self.page_tokens

    def even(self, count: int) -> dict[str, int]:
        """`count` indices for every pool, by name."""
        return {p.name: count for p in self.pools}


def overlap(one: range, other: range) -> range:
    """The numbers that two ranges have in common; an empty range where there are none."""
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a model of `layers` that stage `stage` of `stages` has: as equal parts as there can be, and the
    later stages have those that are left over, as the first has the embedding and the head too. Raises `ConfigError`
    where there are fewer layers than stages."""
    if not 0 < stages <= layers:
        raise ConfigError(f"{layers} layers can't be divided into {stages} stages")
    return range(stage * layers // stages, (stage + 1) * layers // stages)


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


def copies(buffer: BufferSpec, size: int) -> int:
    """How many of `size` ranks, consecutive ones, hold the same heads of a buffer; all hold a buffer without heads."""
    return size // gcd(buffer.heads, size) if buffer.heads else size


def groups(pool: PoolSpec, size: int) -> tuple[int, ...]:
    """The different numbers of `copies` of a pool's buffers, ascending; each is digested on its own."""
    return tuple(sorted({copies(buffer, size) for buffer in pool.buffers}))


# ------------------------------------------------------------ the pages that a sequence needs


HeldPages = Mapping[str, Collection[int]]
"""By pool: the numbers of pages and slots that the sequence already has in place and keeps."""
NOTHING: HeldPages = {}


def due(spec: PoolSetSpec, positions: int) -> dict[str, range]:
    """The page (or slot) numbers due in each pool after `positions` positions, for the next one to be computed."""
    return {pool.name: _due(pool, positions, spec.page_tokens) for pool in spec.pools}


def missing(wanted: Mapping[str, range], held: HeldPages) -> dict[str, range]:
    """By pool, the range from the first to the last number of `wanted` that isn't held, held ones between included."""
    out = {}
    for pool, numbers in wanted.items():
        there = held.get(pool, ())
        if isinstance(there, range) and there.step == 1 and numbers.start in there:
            # The held range covers the start without a gap, as in the full pool: no need to look at each number.
            out[pool] = range(min(there.stop, numbers.stop), numbers.stop)
            continue
        lacking = set(numbers).difference(there)
        out[pool] = range(min(lacking), max(lacking) + 1) if lacking else range(numbers.stop, numbers.stop)
    return out


def extents(spec: PoolSetSpec, pool: str, numbers: range, positions: int) -> tuple[list[int], list[int]]:
    """First positions and ends of pages `numbers` of a sequence of `positions`, as `PageDigester.digest` takes them.

    A state slot counts as the one position that comes after its state.
    """
    if spec.by_name[pool].kind is PoolKind.STATE:
        return [positions] * len(numbers), [positions + 1] * len(numbers)
    firsts = [n * spec.page_tokens for n in numbers]
    return firsts, [min(first + spec.page_tokens, positions) for first in firsts]


def _due(pool: PoolSpec, positions: int, page_tokens: int) -> range:
    pages = -(-positions // page_tokens)
    if pool.kind is PoolKind.FULL:
        return range(pages)
    if pool.kind is PoolKind.STATE:
        return range(max(0, pages - 1), pages)
    first = max(0, positions - (pool.window_tokens - 1))
    return range(first // page_tokens if first < positions else pages, pages)


# ------------------------------------------------------------ where each entry lies


ALIGNMENT = 64
"""Buffers start on multiples of this many bytes: vector loads, DMA and cache lines like it."""


class LayoutOrder(StrEnum):
    """The order of a region, see the prose of the module."""

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
