"""The tiles of queries, and their items of one shape, that the torch backend cuts a step into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine.attention.attention_plan import BLOCK_TOKENS, AttentionPlan

_TILE_QUERIES = 128
SCORE_ELEMENTS = 1 << 20
"""Scores of one batch of tiles at most, unless a single tile needs more: 4 MiB in float32, which stay in the cache and
in memory that the allocator reuses."""
_TILE_SCORES = 1 << 22
"""Scores of a single tile at most, unless one query needs more."""
GATHER_ELEMENTS = 1 << 18
"""Elements of keys gathered at once, so that they are still in the cache when they are multiplied."""
MASKED = -1e30
"""The score of a hidden position. Finite, so that the softmax of a row that sees nothing of a block is defined; its
weight of 0 then removes it."""


@dataclass(frozen=True)
class QueryTile:
    """Neighbouring queries of one sequence."""

    row: int
    """Index of the first query on the packed axis."""
    sequence: int
    start: int
    """Absolute position of the first query."""
    count: int
    low: int
    """The first position that any of these queries sees."""

    @property
    def first_block(self) -> int:
        return self.low // BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        return -(-(self.start + self.count) // BLOCK_TOKENS) - self.first_block


@dataclass(frozen=True)
class TileBatch:
    """Tiles of one shape and their items. U tiles of R queries, W items ordered by block, then tile.

    Tiles are ordered by falling number of blocks, so the items of each tile's block j, counted from the first that it
    sees, belong to the first `widths[j]` tiles.
    """

    queries: int
    query_ur: Tensor
    """[U, R] int64: the tile's queries on the packed axis; padding repeats the first."""
    out_rows: Tensor
    """[n] int64: the places, among U * R, of queries that are no padding."""
    out_queries: Tensor
    """[n] int64: these queries' places on the packed axis."""
    tile_w: Tensor
    """[W] int64: the tile of each item."""
    cell_w: Tensor
    """[W] int64: the place of each item in a full table of blocks by tiles."""
    chunks: tuple[tuple[slice, Tensor], ...]
    """Items in runs whose keys fit a cache: a run's slice of the W * kv_heads products, and the (slot, kv head) rows of
    keys and values that it reads, [w * kv_heads * BLOCK_TOKENS] int64."""
    mask_wrn: Tensor
    """[W, 1, rows, BLOCK_TOKENS] float32: 0 or `MASKED`; rows is 1 where all queries of a tile are one position."""
    widths: tuple[int, ...]
    """How many tiles, from the first on, have a j-th block."""


def lowest_seen(position: int, window: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, position - window + 1) if window else 0


def tile_queries(count: int, length: int, heads: int, window: int) -> int:
    """How many queries a tile of a sequence with `count` queries has: the next power of two, fewer in a long context.

    Any choice gives the same bits; this one keeps padding low, and the scores of one tile within their bound.
    """
    size = 1 << (count - 1).bit_length()
    seen = min(length, window + _TILE_QUERIES) if window else length
    blocks = -(-seen // BLOCK_TOKENS)
    while size > 1 and (size > _TILE_QUERIES or size * heads * blocks * BLOCK_TOKENS > _TILE_SCORES):
        size //= 2
    return size


def split_tiles(tiles: list[QueryTile], limit: int) -> list[list[QueryTile]]:
    """Cut tiles into runs with at most `limit` items each; a tile with more is a run by itself."""
    parts: list[list[QueryTile]] = []
    items = 0
    for tile in tiles:
        if not parts or items + tile.blocks > limit:
            parts.append([])
            items = 0
        parts[-1].append(tile)
        items += tile.blocks
    return parts


def batch_tiles(
    plan: AttentionPlan, tiles: list[QueryTile], size: int, kv_heads: int, chunk: int, window: int
) -> TileBatch:
    device = plan.tables_bp.device
    widths = tuple(sum(tile.blocks > block for tile in tiles) for block in range(tiles[0].blocks))
    nth_w = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths)).to(device)
    tile_w = torch.cat([torch.arange(width) for width in widths]).to(device)
    first_u = torch.tensor([tile.row for tile in tiles], device=device)
    start_u = torch.tensor([tile.start for tile in tiles], device=device)
    count_u = torch.tensor([tile.count for tile in tiles], device=device)
    sequence_u = torch.tensor([tile.sequence for tile in tiles], device=device)
    low_u = torch.tensor([tile.low for tile in tiles], device=device)

    step_r = torch.arange(size, device=device)
    real_ur = step_r < count_u[:, None]
    query_ur = first_u[:, None] + torch.where(real_ur, step_r, 0)
    position_ur = start_u[:, None] + torch.minimum(step_r, count_u[:, None] - 1)

    block_w = low_u[tile_w] // BLOCK_TOKENS + nth_w
    position_wn = block_w[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
    visible_wn = (position_wn < (start_u + count_u)[tile_w][:, None]) & (position_wn >= low_u[tile_w][:, None])
    page_wn = position_wn // plan.page_tokens
    if plan.firsts_b is not None:
        page_wn = page_wn - plan.firsts_b[sequence_u[tile_w]][:, None]
    page_wn = torch.where(visible_wn, page_wn, 0)
    table_wp = plan.tables_bp[sequence_u[tile_w]].long()
    slot_wn = table_wp.gather(1, page_wn) * plan.page_tokens + position_wn % plan.page_tokens
    slot_wn = torch.where(visible_wn, slot_wn, 0)
    slots = slot_wn[:, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None]

    seen_wrn = position_ur[tile_w][:, :, None]
    hidden_wrn = position_wn[:, None] > seen_wrn
    if window:
        hidden_wrn |= position_wn[:, None] <= seen_wrn - window
    mask_wrn = torch.zeros(hidden_wrn.shape, device=device).masked_fill_(hidden_wrn, MASKED)
    out_rows = real_ur.flatten().nonzero().flatten()
    return TileBatch(
        queries=size,
        query_ur=query_ur,
        out_rows=out_rows,
        out_queries=query_ur.flatten()[out_rows],
        tile_w=tile_w,
        cell_w=nth_w * len(tiles) + tile_w,
        chunks=tuple(
            (slice(at * kv_heads, min(at + chunk, len(slots)) * kv_heads), slots[at : at + chunk].flatten())
            for at in range(0, len(slots), chunk)
        ),
        mask_wrn=mask_wrn.unsqueeze(1),
        widths=widths,
    )
