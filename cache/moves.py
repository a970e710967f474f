"""Moving state, written once over the registry.

A `Move` is one value over all pools: which pages and slots of each go from where to where. Nothing moves the pages
of one pool and forgets those of another, and a pool with nothing to do is ordinary. The canonical layout, shared by
transfer and storage, is a page's bytes buffer by buffer, layer by layer: `[indices, unit_bytes]`; it is also how a
page-first region holds a page. Source and target may differ in their order and in their numbers of pages; their
specs must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from cache.registry import BufferLayout, PoolSetLayout, PoolSetSpec, word_dtype

Indices = Mapping[str, Sequence[int]]
"""Pages and slots by pool name."""

_SINGLE_ENTRY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """One pool's share of a move: `sources[i]` goes to `targets[i]`."""

    pool: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise ValueError(f"{self.pool}: {len(self.sources)} sources for {len(self.targets)} targets")


@dataclass(frozen=True, slots=True)
class Move:
    """What goes from where to where, in every pool. Built from copies: it changes with nobody's bookkeeping."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, sources: Indices, targets: Indices) -> Move:
        """Pairs what both name; raises `ValueError` where pools or numbers differ."""
        if {p for p, i in sources.items() if i} != {p for p, i in targets.items() if i}:
            raise ValueError(f"a move from pools {sorted(sources)} to pools {sorted(targets)}")
        return cls(tuple(Part(pool, tuple(i), tuple(targets[pool])) for pool, i in sources.items() if i))

    def __len__(self) -> int:
        """Pages and slots that it moves; 0 is a move too."""
        return sum(len(p.sources) for p in self.parts)

    def nbytes(self, spec: PoolSetSpec) -> int:
        return sum(len(p.sources) * spec.unit_bytes(p.pool) for p in self.parts)

    def chunks(self, spec: PoolSetSpec, max_bytes: int) -> Iterator[Move]:
        """The same move in pieces of at most `max_bytes` (or of one page, where that is more), in order."""
        for part in self.parts:
            step = max(1, max_bytes // spec.unit_bytes(part.pool))
            for at in range(0, len(part.sources), step):
                yield Move((Part(part.pool, part.sources[at : at + step], part.targets[at : at + step]),))


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
    move: Move,
    source: torch.Tensor,
    source_layout: PoolSetLayout,
    target: torch.Tensor,
    target_layout: PoolSetLayout,
    layers: range | None = None,
) -> None:
    """Copy what `move` names, all buffers, from region to region (uint8); with `layers`, those layers only."""
    for part in move.parts:
        pairs = zip(source_layout.buffers[part.pool], target_layout.buffers[part.pool], strict=True)
        counts = source_layout.counts[part.pool], target_layout.counts[part.pool]
        for ours, theirs in pairs:
            word = _common_word(ours, theirs)
            from_lpw, to_lpw = ours.stack(source, counts[0], word), theirs.stack(target, counts[1], word)
            if layers is not None:
                chosen = slice(layers.start, layers.stop)
                from_lpw, to_lpw = from_lpw[chosen], to_lpw[chosen]
            _copy(from_lpw, part.sources, to_lpw, part.targets)


def gather(region: torch.Tensor, layout: PoolSetLayout, pool: str, indices: Sequence[int]) -> torch.Tensor:
    """Copy pages or slots into the canonical layout: uint8 [indices, unit_bytes], contiguous."""
    out = torch.empty(len(indices), layout.spec.unit_bytes(pool), dtype=torch.uint8)
    _canonical(out, region, layout, pool, indices, into_region=False)
    return out


def scatter(
    packed: torch.Tensor, region: torch.Tensor, layout: PoolSetLayout, pool: str, indices: Sequence[int]
) -> None:
    """The inverse of `gather`: write canonical pages or slots [indices, unit_bytes] into `region`."""
    _canonical(packed, region, layout, pool, indices, into_region=True)


def _canonical(
    packed: torch.Tensor,
    region: torch.Tensor,
    layout: PoolSetLayout,
    pool: str,
    indices: Sequence[int],
    *,
    into_region: bool,
) -> None:
    rows, at = list(range(len(indices))), 0
    unit = layout.spec.unit_bytes(pool)
    flat = packed.reshape(-1)
    for buffer in layout.buffers[pool]:
        packing = BufferLayout(buffer.spec, at, buffer.entry_bytes, unit, buffer.entry_bytes)
        word = _common_word(buffer, packing)
        there, here = packing.stack(flat, len(rows), word), buffer.stack(region, layout.counts[pool], word)
        if into_region:
            _copy(there, rows, here, indices)
        else:
            _copy(here, indices, there, rows)
        at += buffer.spec.layers * buffer.entry_bytes


def _common_word(a: BufferLayout, b: BufferLayout) -> torch.dtype:
    return word_dtype(a.base, a.layer_stride, a.index_stride, b.base, b.layer_stride, b.index_stride, a.entry_bytes)


def _copy(from_lpw: torch.Tensor, sources: Sequence[int], to_lpw: torch.Tensor, targets: Sequence[int]) -> None:
    """Copy pages between two stacks [layers, pages, words].

    On a CPU pages go one by one, straight to their places: two to three times as fast as an indexed copy, unless
    they are so small that the calls weigh more than the bytes.
    """
    entry = from_lpw.shape[0] * from_lpw.shape[2] * from_lpw.element_size()
    if from_lpw.device.type == "cpu" and to_lpw.device.type == "cpu" and entry >= _SINGLE_ENTRY_BYTES:
        source, target = from_lpw.numpy(), to_lpw.numpy()
        for a, b in zip(sources, targets, strict=True):
            target[:, b] = source[:, a]
        return
    src = torch.tensor(sources, dtype=torch.int64, device=from_lpw.device)
    dst = torch.tensor(targets, dtype=torch.int64, device=to_lpw.device)
    for layer in range(from_lpw.shape[0]):
        to_lpw[layer].index_copy_(0, dst, from_lpw[layer].index_select(0, src).to(to_lpw.device))
