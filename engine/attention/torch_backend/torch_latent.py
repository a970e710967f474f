"""Latent attention, the indexer and sparse attention in torch operations: the reference for the kernels.

Latent attention is attention with one key head whose values are the first part of its keys, so `TorchAttention`
computes it, with exact rows. Sparse attention is the same with a block table of its own for each query, in which each
selected position is a page of one token.

Index scores are computed as attention's are, by items of neighbouring queries (a *tile*) against blocks of absolute
positions, in batched products whose rows are padded to the numerics' quantum. The sum over heads is a tree of halves:
additions of whole slices, whose rounding doesn't depend on where an element lies. Queries that see no more than top_k
positions are not scored at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine.attention.attention_backend import AttentionBackend, IndexKeys, ScoreOptions, SparseSelection
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.kv_quantization import KVScales
from twinpool.engine.tensors.row_exact_linear import Numerics

INDEX_BLOCK = 128
_TILE_QUERIES = 16
_SCORE_ELEMENTS = 1 << 20
"""Products by head at once: 4 MiB in float32."""
_FLOAT8_MAX = 448.0
_HIDDEN = float("-inf")


@dataclass(frozen=True)
class _Tiles:
    """U tiles of R neighbouring queries each, padded by repeating the last query."""

    query_ur: Tensor
    """[U, R] int64: each query's place on the packed axis."""
    position_ur: Tensor
    sequence_u: Tensor
    end_u: Tensor
    """[U]: positions that the tile's last query sees."""
    real_ur: Tensor
    """[U, R] bool: False for padding."""
    blocks: tuple[int, ...]
    """How many blocks each tile is scored against."""


@dataclass(frozen=True)
class _Parts:
    """A step's queries, cut into dense ones, which see no more than top_k positions, and sparse ones."""

    plan: AttentionPlan | None
    """The plan of the dense queries; its `slots_t` is empty, since nothing is written by it. None: there are none."""
    rows_d: Tensor
    """[D] int64: the dense queries, by their place on the packed axis."""
    tiles: tuple[_Tiles, ...]
    """The sparse queries, tiles of one size together."""


class TorchLatent:
    """Implements `LatentBackend` in torch operations, over the torch attention."""

    def __init__(self, numerics: Numerics, attention: AttentionBackend) -> None:
        self._numerics, self._attention = numerics, attention

    def attend(
        self,
        q_thd: Tensor,
        latents: Tensor,
        plan: AttentionPlan,
        scale: float,
        value_dim: int,
        latent_scales: Tensor | None = None,
    ) -> Tensor:
        k_pages = latents.unsqueeze(2)
        scales = None if latent_scales is None else KVScales(latent_scales, latent_scales)
        return self._attention.attend(q_thd, k_pages, k_pages[..., :value_dim], plan, ScoreOptions(scale), scales)

    def store_keys(self, keys_td: Tensor, into: IndexKeys, plan: AttentionPlan) -> None:
        if plan.muted_t is not None:
            keys_td = keys_td.masked_fill(plan.muted_t.unsqueeze(1), 0.0)
        rows = into.pages.view(-1, into.pages.shape[-1])
        if into.scales is None:
            rows.index_copy_(0, plan.slots_t, keys_td)
            return
        scale_t = keys_td.float().abs().amax(1) / _FLOAT8_MAX
        whole_t1 = torch.where(scale_t > 0, scale_t, 1.0).unsqueeze(1)
        rounded_td = (keys_td.float() / whole_t1).clamp_(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn)
        rows.view(torch.uint8).index_copy_(0, plan.slots_t, rounded_td.view(torch.uint8))
        into.scales.view(-1).index_copy_(0, plan.slots_t, scale_t)

    def select(
        self, q_thd: Tensor, weights_th: Tensor, keys: IndexKeys, plan: AttentionPlan, top_k: int
    ) -> SparseSelection | None:
        parts = _parts(plan, top_k)
        if not parts.tiles:
            return None
        q_thd, weights_th = q_thd.float(), weights_th.float()
        found = [self._choose(tiles, q_thd, weights_th, keys, plan, top_k) for tiles in parts.tiles]
        rows_s, slots_sk, positions_sk = (torch.cat(each) for each in zip(*found, strict=True))
        return SparseSelection(rows_s, slots_sk, positions_sk)

    def attend_selected(
        self,
        q_thd: Tensor,
        latents: Tensor,
        plan: AttentionPlan,
        selection: SparseSelection | None,
        scale: float,
        value_dim: int,
        latent_scales: Tensor | None = None,
    ) -> Tensor:
        if selection is None:
            return self.attend(q_thd, latents, plan, scale, value_dim, latent_scales)
        out_thd = q_thd.new_empty(*q_thd.shape[:2], value_dim)
        parts = _parts(plan, selection.slots_sk.shape[1])
        if parts.plan is not None:
            whole = self.attend(q_thd[parts.rows_d], latents, parts.plan, scale, value_dim, latent_scales)
            out_thd.index_copy_(0, parts.rows_d, whole)
        if "plan" not in selection.scratch:
            selection.scratch["plan"] = _single_token_plan(selection.slots_sk)
        by_token = latents.view(-1, 1, latents.shape[-1])
        scales = None if latent_scales is None else latent_scales.view(-1, 1, 1)
        sparse = self.attend(q_thd[selection.rows_s], by_token, selection.scratch["plan"], scale, value_dim, scales)
        return out_thd.index_copy_(0, selection.rows_s, sparse)

    def _choose(
        self, tiles: _Tiles, q_thd: Tensor, weights_th: Tensor, keys: IndexKeys, plan: AttentionPlan, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select for the tiles' queries: [S] queries, and [S, top_k] slots and positions that each reads."""
        scores_urn = self._scores(tiles, q_thd, weights_th, keys, plan)
        position_n = torch.arange(scores_urn.shape[2], device=q_thd.device)
        scores_urn.masked_fill_(position_n > tiles.position_ur.unsqueeze(2), _HIDDEN)
        positions_sk = best(scores_urn[tiles.real_ur], top_k)
        table_sp = plan.tables_bp[tiles.sequence_u[:, None].expand_as(tiles.real_ur)[tiles.real_ur]].long()
        page_sk = table_sp.gather(1, positions_sk // plan.page_tokens)
        slots_sk = page_sk * plan.page_tokens + positions_sk % plan.page_tokens
        return tiles.query_ur[tiles.real_ur], slots_sk.int(), positions_sk.int()

    def _scores(self, tiles: _Tiles, q_thd: Tensor, weights_th: Tensor, keys: IndexKeys, plan: AttentionPlan) -> Tensor:
        """[U, R, n] float32: scores of positions 0 to n, a whole number of blocks."""
        device, (heads, dim), per_tile = q_thd.device, q_thd.shape[1:], tiles.query_ur.shape[1]
        used = per_tile * heads
        rows = self._numerics.padded(used)
        q_urd = q_thd.new_zeros(len(tiles.query_ur), rows, dim)
        q_urd[:, :used] = q_thd[tiles.query_ur].view(-1, used, dim)
        weights_urh = weights_th[tiles.query_ur].unsqueeze(3)
        blocks_u = torch.tensor(tiles.blocks, device=device)
        tile_w = torch.repeat_interleave(blocks_u, output_size=sum(tiles.blocks))
        block_w = torch.arange(len(tile_w), device=device) - (blocks_u.cumsum(0) - blocks_u)[tile_w]
        scores_urjn = q_thd.new_full((len(q_urd), per_tile, max(tiles.blocks), INDEX_BLOCK), _HIDDEN)
        at_once = max(1, _SCORE_ELEMENTS // (rows * INDEX_BLOCK))
        for tile, block in zip(torch.split(tile_w, at_once), torch.split(block_w, at_once), strict=True):
            k_wnd = _block_keys(tiles, tile, block, keys, plan)
            products_wrn = q_thd.new_empty(len(tile), rows, INDEX_BLOCK)
            self._numerics.bmm(q_urd[tile], k_wnd.transpose(1, 2), products_wrn)
            by_head = products_wrn[:, :used].view(len(tile), per_tile, heads, INDEX_BLOCK).relu_()
            scores_urjn[tile, :, block] = sum_of_heads(by_head.mul_(weights_urh[tile]))
        return scores_urjn.view(len(q_urd), per_tile, -1)


def sum_of_heads(x_wrhn: Tensor) -> Tensor:
    """Sum over axis 2 by halves: [W, R, n]. `x_wrhn` is overwritten."""
    count = x_wrhn.shape[2]
    while count > 1:
        half = count // 2
        x_wrhn[:, :, :half] += x_wrhn[:, :, count - half : count]
        count -= half
    return x_wrhn[:, :, 0]


def best(scores_rn: Tensor, count: int) -> Tensor:
    """Find the positions of each row's `count` highest scores, rising: [R, count] int64. Earlier ones win ties."""
    scores_rn = scores_rn.masked_fill(scores_rn.isnan(), _HIDDEN)
    least_r1 = scores_rn.topk(count, sorted=False).values.amin(1, keepdim=True)
    above_rn, tied_rn = scores_rn > least_r1, scores_rn == least_r1
    room_r1 = count - above_rn.sum(1, keepdim=True)
    chosen_rn = above_rn | (tied_rn & (tied_rn.cumsum(1) <= room_r1))
    return chosen_rn.nonzero()[:, 1].view(len(scores_rn), count)


def _block_keys(tiles: _Tiles, tile_w: Tensor, block_w: Tensor, keys: IndexKeys, plan: AttentionPlan) -> Tensor:
    """The keys of items, [w, INDEX_BLOCK, dim] float32; positions that a tile doesn't see have the null page's."""
    position_wn = block_w[:, None] * INDEX_BLOCK + torch.arange(INDEX_BLOCK, device=block_w.device)
    seen_wn = position_wn < tiles.end_u[tile_w][:, None]
    page_wn = torch.where(seen_wn, position_wn // plan.page_tokens, 0)
    slot_wn = plan.tables_bp[tiles.sequence_u[tile_w]].long().gather(1, page_wn) * plan.page_tokens
    slots = torch.where(seen_wn, slot_wn + position_wn % plan.page_tokens, 0).flatten()
    rows = keys.pages.view(-1, keys.pages.shape[-1])
    if keys.scales is None:
        found = rows.index_select(0, slots).float()
    else:
        found = rows.view(torch.uint8).index_select(0, slots).view(rows.dtype).float()
        found *= keys.scales.view(-1).index_select(0, slots).unsqueeze(1)
    return found.view(*slot_wn.shape, -1)


def _parts(plan: AttentionPlan, top_k: int) -> _Parts:
    """The cut of a step's queries; worked out once a step."""
    key = f"sparse parts {top_k}"
    if key not in plan.scratch:
        plan.scratch[key] = _cut(plan, top_k)
    found: _Parts = plan.scratch[key]
    return found


def _cut(plan: AttentionPlan, top_k: int) -> _Parts:
    device = plan.tables_bp.device
    offsets, starts = plan.offsets_b.tolist(), plan.starts_b.tolist()
    whole: list[tuple[int, int, int, int]] = []
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}
    for sequence, start in enumerate(starts):
        row, count = offsets[sequence], offsets[sequence + 1] - offsets[sequence]
        few = min(max(top_k - start, 0), count)
        if few:
            whole.append((sequence, row, start, few))
        size = min(_TILE_QUERIES, 1 << max(count - few - 1, 0).bit_length())
        by_size.setdefault(size, []).extend(
            (sequence, row + at, start + at, min(size, count - at)) for at in range(few, count, size)
        )
    dense = _subplan(plan, whole) if whole else None
    rows = [row + at for _, row, _, few in whole for at in range(few)]
    tiles = tuple(_tiles(size, some, device) for size, some in by_size.items() if some)
    return _Parts(dense, torch.tensor(rows, dtype=torch.int64, device=device), tiles)


def _tiles(size: int, tiles: list[tuple[int, int, int, int]], device: torch.device) -> _Tiles:
    sequence_u, row_u, start_u, count_u = (torch.tensor(each, device=device) for each in zip(*tiles, strict=True))
    step_r = torch.arange(size, device=device)
    within_ur = torch.minimum(step_r, count_u[:, None] - 1)
    return _Tiles(
        query_ur=row_u[:, None] + within_ur,
        position_ur=start_u[:, None] + within_ur,
        sequence_u=sequence_u,
        end_u=start_u + count_u,
        real_ur=step_r < count_u[:, None],
        blocks=tuple(-(-(start + count) // INDEX_BLOCK) for _, _, start, count in tiles),
    )


def _subplan(plan: AttentionPlan, parts: list[tuple[int, int, int, int]]) -> AttentionPlan:
    """The plan of runs of queries (sequence, row, start, count), packed anew, for reading only."""
    device = plan.tables_bp.device
    counts = [count for *_, count in parts]
    starts_b = torch.tensor([start for _, _, start, _ in parts], dtype=torch.int32, device=device)
    counts_b = torch.tensor(counts, dtype=torch.int32, device=device)
    return AttentionPlan(
        starts_b=starts_b,
        offsets_b=torch.cat((counts_b.new_zeros(1), counts_b.cumsum(0, dtype=torch.int32))),
        tables_bp=plan.tables_bp[torch.tensor([sequence for sequence, *_ in parts], device=device)],
        slots_t=torch.empty(0, dtype=torch.int64, device=device),
        page_tokens=plan.page_tokens,
        max_queries=max(counts),
    )


def _single_token_plan(slots_sk: Tensor) -> AttentionPlan:
    """The plan with each query as a sequence of its own, whose pages of one token are the selected slots."""
    count, top_k = slots_sk.shape
    device = slots_sk.device
    return AttentionPlan(
        starts_b=torch.full((count,), top_k - 1, dtype=torch.int32, device=device),
        offsets_b=torch.arange(count + 1, dtype=torch.int32, device=device),
        tables_bp=slots_sk,
        slots_t=torch.empty(0, dtype=torch.int64, device=device),
        page_tokens=1,
        max_queries=1,
    )
