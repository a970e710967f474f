"""Paged attention in plain torch, the reference for every kernel; and by the C++ kernels (engine/native/attention.h),
for CPUs where they can be compiled.

This is how a result comes to depend on positions alone. The keys of a sequence are cut into blocks of `BLOCK_TOKENS`
*absolute* positions, whatever the page size. Queries are cut into *tiles* of neighbouring positions; an *item* is one
tile against one block. All items of a step have one shape, so they share a gather, a product for the scores and a
product for the values, and the products of a row are the same calls with the same inner length in every step:

    scores of an item    q · kᵀ over head_dim, masked to positions up to the query's own
    softmax and values   over the positions of one block, always BLOCK_TOKENS long
    row maximum          over all items of the tile: a maximum is exact in any order
    weight of a block    its sum times exp(its maximum - row maximum); exactly 0 where all is masked
    sum over blocks      weighted, in block order, one after the other; then divided by the sum of weights

A block beyond a query's position, or before its window, contributes zeros, and adding zeros is exact; so it doesn't
matter which queries share a tile, which blocks their neighbours need, or whether the query came alone. Blocks before
the window of a tile's first query are no items at all. Rows of a product are padded to the quantum that
`row_exact_linear` found. Positions that none of a tile's queries sees are read from the null page: bytes that another
owner left in a page's tail are never read, not even to be multiplied by zero. A sink, which is a score without a value,
takes part in the row maximum and is added last to the sum of weights.

Keys, values and queries are raised to float32, and quantised ones dequantised in it (both exact); the result is rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.engine.attention.attention_backend import RecurrenceBackend, ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS, AttentionPlan, BackendPlan, PictureSpan
from twinpool.engine.attention.kv_quantization import KVRows, KVScales
from twinpool.engine.attention.torch_backend.torch_latent import TorchLatent
from twinpool.engine.attention.torch_backend.torch_recurrence import NativeRecurrence, TorchRecurrence
from twinpool.engine.native.native_kernels import AttentionShape, NativeKernels
from twinpool.engine.tensors.row_exact_linear import TILE_ROWS, Numerics, tanh

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
    end: int
    """The position behind the last one that any of them sees."""

    @property
    def first_block(self) -> int:
        return self.low // BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        return -(-self.end // BLOCK_TOKENS) - self.first_block


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
    end_u = torch.tensor([tile.end for tile in tiles], device=device)

    step_r = torch.arange(size, device=device)
    real_ur = step_r < count_u[:, None]
    query_ur = first_u[:, None] + torch.where(real_ur, step_r, 0)
    position_ur = start_u[:, None] + torch.minimum(step_r, count_u[:, None] - 1)

    block_w = low_u[tile_w] // BLOCK_TOKENS + nth_w
    position_wn = block_w[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
    visible_wn = (position_wn < end_u[tile_w][:, None]) & (position_wn >= low_u[tile_w][:, None])
    page_wn = position_wn // plan.page_tokens
    if plan.firsts_b is not None:
        page_wn = page_wn - plan.firsts_b[sequence_u[tile_w]][:, None]
    page_wn = torch.where(visible_wn, page_wn, 0)
    table_wp = plan.tables_bp[sequence_u[tile_w]].long()
    slot_wn = table_wp.gather(1, page_wn) * plan.page_tokens + position_wn % plan.page_tokens
    slot_wn = torch.where(visible_wn, slot_wn, 0)
    slots = slot_wn[:, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None]

    seen_wrn = position_ur[tile_w][:, :, None]
    last_wrn = (end_u[tile_w] - 1)[:, None, None].expand_as(seen_wrn) if plan.whole else seen_wrn
    hidden_wrn = position_wn[:, None] > last_wrn
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


class TorchAttention:
    """Implements `AttentionBackend` in torch operations; with `FAST` numerics rows are not padded."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics
        self.latent = TorchLatent(numerics, self)
        self.recurrence: RecurrenceBackend = TorchRecurrence(numerics)

    def attend(
        self,
        q_thd: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: AttentionPlan,
        scores: ScoreOptions,
        scales: KVScales | None = None,
    ) -> Tensor:
        """As `AttentionBackend.attend`; values may have another width than keys."""
        heads, kv_heads, dim = q_thd.shape[1], k_pages.shape[2], k_pages.shape[3]
        key = f"torch attention {heads} {kv_heads} {dim} {scores.window}"
        batches: list[TileBatch] | None = plan.scratch.get(key)
        if batches is None:
            batches = plan.scratch[key] = self._split(plan, heads, kv_heads, dim, scores.window)
        q_scaled = q_thd.float() * scores.scale
        out_thd = q_thd.new_empty(*q_thd.shape[:2], v_pages.shape[3])
        keys = KVRows.of(k_pages, None if scales is None else scales.keys)
        values = KVRows.of(v_pages, None if scales is None else scales.values)
        for batch in batches:
            self._attend_batch(batch, q_scaled, keys, values, kv_heads, out_thd, scores)
        return out_thd

    def stale(self, plan: BackendPlan, epochs_e: Tensor) -> Tensor:
        assert plan.epochs_bp is not None, "the plan has epochs"
        if plan.tables_bp.is_cpu:
            # numpy has less overhead for small operations, and this runs in every step.
            found = epochs_e.numpy().take(plan.tables_bp.numpy()) != plan.epochs_bp.numpy()
            return torch.from_numpy(found.any(1))
        return epochs_e[plan.tables_bp.long()].ne(plan.epochs_bp).any(1)

    def _attend_batch(
        self,
        batch: TileBatch,
        q_thd: Tensor,
        keys: KVRows,
        values: KVRows,
        kv_heads: int,
        out_thd: Tensor,
        scores: ScoreOptions,
    ) -> None:
        tiles, items = len(batch.query_ur), len(batch.tile_w)
        (heads, dim), value_dim = q_thd.shape[1:], values.rows.shape[1]
        group = heads // kv_heads
        used = batch.queries * group
        rows = self._numerics.padded(used)
        q_ukrd = q_thd.new_zeros(tiles, kv_heads, rows, dim)
        q_view = q_thd[batch.query_ur].view(tiles, batch.queries, kv_heads, group, dim).transpose(1, 2)
        q_ukrd[:, :, :used].view(tiles, kv_heads, batch.queries, group, dim).copy_(q_view)
        q_wrd = (q_ukrd if items == tiles else q_ukrd[batch.tile_w]).view(items * kv_heads, rows, dim)

        s_wrn = q_thd.new_empty(items * kv_heads, rows, BLOCK_TOKENS)
        for part, slots in batch.chunks:
            k_wnd = keys.read(slots).view(-1, BLOCK_TOKENS, dim)
            self._numerics.bmm(q_wrd[part], k_wnd.transpose(1, 2), s_wrn[part])
        if softcap := scores.softcap:
            tanh(s_wrn.div_(softcap)).mul_(softcap)
        s_wkrn = s_wrn.view(items, kv_heads, rows, BLOCK_TOKENS).add_(_expanded(batch.mask_wrn, group, rows))

        sinks_h = scores.sinks_h
        sink_kr = None if sinks_h is None else _sinks_of_rows(sinks_h, kv_heads, batch.queries, rows)
        weight_wkr, sink_ukr = _weights(batch, s_wkrn, sink_kr)
        p_wrn = s_wrn.softmax(-1)
        # The largest weight of a block is exp(0) over the block's sum, so its inverse is that sum.
        weight_wkr /= p_wrn.amax(-1).view_as(weight_wkr)
        o_wrd = q_thd.new_empty(items * kv_heads, rows, value_dim)
        for part, slots in batch.chunks:
            v_wnd = values.read(slots).view(-1, BLOCK_TOKENS, value_dim)
            self._numerics.bmm(p_wrn[part], v_wnd, o_wrd[part])
        o_wkrd = o_wrd.view(items, kv_heads, rows, value_dim).mul_(weight_wkr.unsqueeze(-1))

        out_ukrd, sums_ukr = o_wkrd[:tiles], weight_wkr[:tiles]
        begin = tiles
        for width in batch.widths[1:]:
            out_ukrd[:width] += o_wkrd[begin : begin + width]
            sums_ukr[:width] += weight_wkr[begin : begin + width]
            begin += width
        if sink_ukr is not None:
            sums_ukr += sink_ukr
        result = out_ukrd.div_(sums_ukr.unsqueeze(-1))[:, :, :used]
        result = result.view(tiles, kv_heads, batch.queries, group, value_dim).transpose(1, 2)
        result = result.reshape(tiles * batch.queries, heads, value_dim)
        out_thd.index_copy_(0, batch.out_queries, result.index_select(0, batch.out_rows).to(out_thd.dtype))

    def _split(self, plan: AttentionPlan, heads: int, kv_heads: int, dim: int, window: int) -> list[TileBatch]:
        """Cut the step's queries into tiles and the tiles into batches of bounded size."""
        offsets, starts = plan.offsets_b.tolist(), plan.starts_b.tolist()
        by_size: dict[int, list[QueryTile]] = {}
        for sequence, start in enumerate(starts):
            row, end = offsets[sequence], offsets[sequence + 1]
            size = tile_queries(end - row, start + end - row, heads, window)
            made = by_size.setdefault(size, [])
            for at in range(row, end, size):
                count, first = min(size, end - at), start + at - row
                stop = start + end - row if plan.whole else first + count
                made.append(QueryTile(at, sequence, first, count, lowest_seen(first, window), stop))
        batches = []
        for size, tiles in by_size.items():
            tiles.sort(key=lambda tile: -tile.blocks)
            item_rows = heads // kv_heads * size
            limit = SCORE_ELEMENTS // (self._numerics.padded(item_rows) * kv_heads * BLOCK_TOKENS)
            chunk = max(1, GATHER_ELEMENTS // (kv_heads * dim * BLOCK_TOKENS))
            for part in split_tiles(tiles, limit):
                batches.append(batch_tiles(plan, part, size, kv_heads, chunk, window))
        return batches


def _expanded(mask_wrn: Tensor, group: int, rows: int) -> Tensor:
    """The mask by query as a mask by row: each query repeated `group` times, padding rows not masked."""
    if mask_wrn.shape[2] == 1:
        return mask_wrn
    mask = mask_wrn.repeat_interleave(group, dim=2) if group > 1 else mask_wrn
    return F.pad(mask, (0, 0, 0, rows - mask.shape[2])) if rows > mask.shape[2] else mask


def _weights(batch: TileBatch, s_wkrn: Tensor, sink_kr: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """exp(block maximum - row maximum) of each item's rows, [W, kv_heads, rows]: exactly 0 where all is masked.

    With sinks, also exp(sink - row maximum), [U, kv_heads, rows]; else None.
    """
    high_wkr = s_wkrn.amax(-1)
    tiles, blocks = len(batch.query_ur), len(batch.widths)
    if blocks == 1 and sink_kr is None:
        return torch.ones_like(high_wkr), None
    table = high_wkr.new_full((blocks * tiles, *high_wkr.shape[1:]), MASKED)
    high_ukr = table.index_copy_(0, batch.cell_w, high_wkr).view(blocks, tiles, *high_wkr.shape[1:]).amax(0)
    if sink_kr is None:
        return high_wkr.sub_(high_ukr[batch.tile_w]).exp_(), None
    high_ukr = torch.maximum(high_ukr, sink_kr)
    return high_wkr.sub_(high_ukr[batch.tile_w]).exp_(), (sink_kr - high_ukr).exp_()


def _sinks_of_rows(sinks_h: Tensor, kv_heads: int, queries: int, rows: int) -> Tensor:
    """The sink of each row of a tile, [kv_heads, rows]. A row is a query and a head; padding rows get 0."""
    sink_kg = sinks_h.view(kv_heads, -1)
    sink_kr = sink_kg.repeat(1, queries)
    return F.pad(sink_kr, (0, rows - sink_kr.shape[1]))


_OF_SPANS = TorchAttention(Numerics(TILE_ROWS, tiled=True))
"""Its rows are exact whatever else is computed, so nothing has to be probed for it."""


def attend_spans(
    spans: Sequence[PictureSpan],
    out_thd: Tensor,
    q_thd: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    scores: ScoreOptions,
    scales: KVScales | None = None,
) -> None:
    """Compute the results of positions that see each other again, those behind them included, into `out_thd`; all
    other arguments are those of `AttentionBackend.attend`, `pages` of keys and of values."""
    made: tuple[AttentionPlan, Tensor] | None = plan.scratch.get("spans")
    if made is None:
        device = plan.tables_bp.device
        counts = [span.positions for span in spans]
        rows = [row for span in spans for row in range(span.first, span.first + span.positions)]
        rows_n, sequences_b = (torch.tensor(each, device=device) for each in (rows, [span.sequence for span in spans]))
        starts_b = plan.starts_b[sequences_b] + torch.tensor([span.place for span in spans], device=device)
        offsets = [0, *accumulate(counts)]
        mine = AttentionPlan(
            starts_b=starts_b.int(),
            offsets_b=torch.tensor(offsets, dtype=torch.int32, device=device),
            tables_bp=plan.tables_bp[sequences_b],
            slots_t=plan.slots_t[rows_n],
            page_tokens=plan.page_tokens,
            max_queries=max(counts),
            firsts_b=None if plan.firsts_b is None else plan.firsts_b[sequences_b],
            whole=True,
        )
        made = plan.scratch["spans"] = mine, rows_n
    of_spans, rows_n = made
    out_thd[rows_n] = _OF_SPANS.attend(q_thd[rows_n], *pages, of_spans, scores, scales)


class NativeAttention(TorchAttention):
    """Attention by the C++ kernels, the rest in torch operations. Attention is row-exact whatever the numerics: a row
    is computed by itself, in the order of absolute positions."""

    def __init__(self, numerics: Numerics, kernels: NativeKernels) -> None:
        super().__init__(numerics)
        self.recurrence = NativeRecurrence(kernels)
        self._kernels = kernels

    def attend(
        self,
        q_thd: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: AttentionPlan,
        scores: ScoreOptions,
        scales: KVScales | None = None,
    ) -> Tensor:
        assert k_pages.is_contiguous() and v_pages.stride() == k_pages.stride(), "pages follow each other"  # noqa: PT018
        assert scales is None or all(each.is_contiguous() for each in scales), "so do their scales"
        heads, (page_tokens, kv_heads, dim) = q_thd.shape[1], k_pages.shape[1:]
        shape = AttentionShape(
            heads,
            kv_heads,
            dim,
            page_tokens,
            v_pages.shape[3],
            plan.tables_bp.stride(0),
            scores.scale,
            scores.softcap,
            scores.window,
        )
        sinks = None if scores.sinks_h is None else scores.sinks_h.to(torch.float32).contiguous()
        return self._kernels.attend(
            shape,
            q_thd.contiguous(),
            k_pages,
            v_pages,
            plan.tables_bp,
            plan.firsts_b,
            plan.starts_b,
            plan.offsets_b,
            sinks,
            scales,
        )
