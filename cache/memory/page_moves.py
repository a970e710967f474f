"""Page moves: copies of pages and slots from region to region, written once over the registry.

A `PageMove` is one value over all pools: which pages and slots of each go from where to where. So no caller moves the
pages of one pool and forgets those of another; a pool may have none to move. The canonical layout, shared by
transfer and storage, is a page's bytes buffer by buffer, layer by layer: `[indices, unit_bytes]`; it is also how a
page-first region holds a page. Source and target may differ in their order and in their numbers of pages; their
specs must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from twinpool.cache.memory.block_copy import copy_block
from twinpool.cache.memory.copy_plan import blocks, packing
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.memory_layout import PoolSetLayout

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
    packed: torch.Tensor, region: torch.Tensor, layout: PoolSetLayout, pool: str, indices: Sequence[int]
) -> None:
    """The inverse of `gather`: write canonical pages or slots [indices, unit_bytes] into `region`."""
    rows = range(len(indices))
    for block in blocks(packing(layout, pool), layout.buffers[pool]):
        copy_block(block, _flat(packed), len(rows), rows, region, layout.counts[pool], indices)


def _flat(packed: torch.Tensor) -> torch.Tensor:
    """Canonical pages as a flat region; raises `RuntimeError` where they aren't contiguous."""
    return packed.view(-1)
