"""Latent attention, the indexer and sparse attention on an NVIDIA GPU: shapes, grids and limits.

The kernels are in `latent_kernels`. Under Triton's interpreter they run on CPU tensors. Nothing here waits for the
device: grids come from numbers of the plan that the host has.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from twinpool.contracts.errors import ConfigError
from twinpool.engine.attention.attention_backend import IndexKeys, SparseSelection
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.triton_backend import latent_kernels as kernels
from twinpool.engine.attention.triton_backend import merge_kernels, page_kernels
from twinpool.engine.attention.triton_backend.attend_call import (
    LATENT_SPLIT_TOKENS,
    SCRATCH_BYTES,
    Parts,
    index_tile,
    latent_tile,
    waves,
)
from twinpool.engine.tensors.launch_configs import launch_options

MAX_LATENT = 512
MAX_TURNING = 128
MAX_INDEX_HEADS = 128
_LOG2_E = 1.4426950408889634
_SELECT_BLOCK = 1024


class TritonLatent:
    """Implements `LatentBackend` in Triton kernels.

    `split_tokens` (a power of two) and tiles are the shape of the work: changing one changes the last bits of results.
    Tiles are those of `attend_call` for GPUs of `capability`, but not larger than `tile_rows` by `block_tokens`, and
    `index_queries` by `index_block` for the indexer.
    """

    def __init__(
        self, *, interpreted: bool, tile_rows: int = 64, block_tokens: int = 32,
        split_tokens: int = LATENT_SPLIT_TOKENS, index_block: int = 64, index_queries: int = 8,
        scratch_bytes: int = SCRATCH_BYTES, capability: int = 90,
    ) -> None:  # fmt: skip
        self._interpreted = interpreted
        self._rows, self._block, self._split = tile_rows, block_tokens, split_tokens
        self._index_block, self._index_queries = index_block, index_queries
        self._scratch_bytes, self._capability = scratch_bytes, capability

    def attend(
        self,
        q_thd: Tensor,
        latents: Tensor,
        plan: AttentionPlan,
        scale: float,
        value_dim: int,
        latent_scales: Tensor | None = None,
    ) -> Tensor:
        """As `LatentBackend.attend`. Raises `ConfigError` for shapes that no kernel serves."""
        assert latent_scales is None, "`kernel_choice.check_state` refuses quantised state"
        self._check(q_thd, latents, value_dim)
        return self._attend(q_thd, latents, plan, scale, value_dim)

    def store_keys(self, keys_td: Tensor, into: IndexKeys, plan: AttentionPlan) -> None:
        if plan.muted_t is not None:
            keys_td = keys_td.masked_fill(plan.muted_t.unsqueeze(1), 0.0)
        dim = into.pages.shape[-1]
        if into.scales is None:
            into.pages.view(-1, dim).index_copy_(0, plan.slots_t, keys_td)
        elif len(keys_td):
            page_kernels.store_float8_kernel[(len(keys_td),)](
                keys_td, into.pages, into.scales, plan.slots_t,
                keys_td.stride(0), *into.pages.stride()[:2], into.scales.stride(0),
                PAGE_TOKENS=plan.page_tokens, DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
            )  # fmt: skip

    def select(
        self, q_thd: Tensor, weights_th: Tensor, keys: IndexKeys, plan: AttentionPlan, top_k: int
    ) -> SparseSelection | None:
        """As `LatentBackend.select`. `rows_s` has every query; the scratch says how many positions each reads."""
        count, heads = q_thd.shape[:2]
        width = plan.tables_bp.shape[1] * plan.page_tokens
        if width <= top_k or count == 0:
            return None
        if heads > MAX_INDEX_HEADS:
            raise ConfigError(f"triton attention takes up to {MAX_INDEX_HEADS} index heads, got {heads}")
        columns = triton.cdiv(width, self._index_block) * self._index_block
        rows = torch.arange(count, device=q_thd.device)
        positions_sk = torch.zeros(count, top_k, dtype=torch.int32, device=q_thd.device)
        slots_sk, counts_s = torch.zeros_like(positions_sk), positions_sk.new_empty(count)
        batch, shape = len(plan.starts_b), self._index_shape(q_thd, keys, plan.page_tokens)
        tile = index_tile(q_thd.dtype)
        options = launch_options(kernels.index_score_kernel, q_thd.dtype, shape, tile.warps, tile.stages)
        for first, tokens in waves(count, columns * 4, self._scratch_bytes, self._index_queries):
            scores = torch.empty(tokens, columns, dtype=torch.float32, device=q_thd.device)
            queries = min(plan.max_queries, tokens)
            grid = (columns // shape["BLOCK_N"], triton.cdiv(queries, self._index_queries), batch)
            kernels.index_score_kernel[grid](
                q_thd, weights_th, keys.pages, weights_th if keys.scales is None else keys.scales, scores,
                plan.starts_b, plan.offsets_b, plan.tables_bp,
                *q_thd.stride()[:2], weights_th.stride(0), *keys.pages.stride()[:2],
                0 if keys.scales is None else keys.scales.stride(0), scores.stride(0), plan.tables_bp.stride(0), heads,
                first, tokens, **shape, **options,
            )  # fmt: skip
            kernels.select_kernel[(queries, batch)](
                scores, positions_sk, slots_sk, counts_s, plan.starts_b, plan.offsets_b, plan.tables_bp,
                scores.stride(0), top_k, plan.tables_bp.stride(0), top_k, first, tokens,
                PAGE_TOKENS=plan.page_tokens, BLOCK=min(_SELECT_BLOCK, triton.next_power_of_2(columns)),
            )  # fmt: skip
            del scores  # before those of the next wave are taken
        return SparseSelection(rows, slots_sk, positions_sk, {"counts": counts_s})

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
        assert latent_scales is None, "`kernel_choice.check_state` refuses quantised state"
        self._check(q_thd, latents, value_dim)
        by_token = latents.view(-1, 1, latents.shape[-1])
        return self._attend(q_thd, by_token, self._by_query(selection), scale, value_dim)

    def _by_query(self, selection: SparseSelection) -> AttentionPlan:
        """The plan with each query as a sequence of its own, whose pages of one token are the selected slots."""
        if "plan" not in selection.scratch:
            counts_s = selection.scratch["counts"]
            selection.scratch["plan"] = AttentionPlan(
                starts_b=counts_s - 1,
                offsets_b=torch.arange(len(counts_s) + 1, dtype=torch.int32, device=counts_s.device),
                tables_bp=selection.slots_sk,
                slots_t=torch.empty(0, dtype=torch.int64, device=counts_s.device),
                page_tokens=1,
                max_queries=1,
            )
        plan: AttentionPlan = selection.scratch["plan"]
        return plan

    def _attend(self, q_thd: Tensor, latents: Tensor, plan: AttentionPlan, scale: float, value_dim: int) -> Tensor:
        """Some queries after the others, so many that their parts fit into the scratch. Decode is no other case."""
        out_thd = q_thd.new_empty(*q_thd.shape[:2], value_dim)
        (tokens, heads), batch = q_thd.shape[:2], len(plan.starts_b)
        shape = self._shape(q_thd, latents, value_dim)
        tile = latent_tile(q_thd.dtype, self._capability)
        options = launch_options(kernels.latent_split_kernel, q_thd.dtype, shape, tile.warps, tile.stages)
        per_tile, groups = shape["ROWS"] // shape["GROUP"], triton.cdiv(heads, shape["GROUP"])
        splits = triton.cdiv(plan.tables_bp.shape[1] * plan.page_tokens, self._split)
        a_token = Parts(heads * splits if splits > 1 else 0, shape["BLOCK_L"])
        for first, count in waves(tokens, a_token.nbytes, self._scratch_bytes, per_tile):
            parts = a_token.times(count).tensors(q_thd.device)
            queries = min(plan.max_queries, count + (0 if batch == 1 and first % per_tile == 0 else per_tile - 1))
            kernels.latent_split_kernel[(triton.cdiv(queries, per_tile) * splits, batch, groups)](
                q_thd, latents, out_thd, *parts, plan.starts_b, plan.offsets_b, plan.tables_bp,
                *q_thd.stride()[:2], *latents.stride()[:2], *out_thd.stride()[:2], plan.tables_bp.stride(0),
                heads, splits, first, count, scale * _LOG2_E, **shape, PARTS=splits > 1, **options,
            )  # fmt: skip
            if splits > 1:
                merge_kernels.merge_segments_kernel[(min(plan.max_queries, count), batch, heads)](
                    *parts, out_thd, plan.starts_b, plan.offsets_b, plan.starts_b,
                    *out_thd.stride()[:2], heads, splits, first, count,
                    HEAD_DIM=shape["LATENT"], BLOCK_D=shape["BLOCK_L"], SEGMENT=self._split, PER_TILE=per_tile,
                    WINDOW=0, SINKS=False,
                )  # fmt: skip
            del parts  # before those of the next wave are taken
        return out_thd

    def _index_shape(self, q_thd: Tensor, keys: IndexKeys, page_tokens: int) -> dict[str, int]:
        """The compile-time numbers of an indexer's scores."""
        (_, heads, dim), tile = q_thd.shape, index_tile(q_thd.dtype).within(self._index_queries, self._index_block)
        return {
            "PAGE_TOKENS": page_tokens,
            "DIM": dim,
            "BLOCK_D": max(16, triton.next_power_of_2(dim)),
            "BLOCK_H": max(16, triton.next_power_of_2(heads)),
            "BLOCK_N": tile.block,
            "QUERIES": self._index_queries,
            "FLOAT8": keys.scales is not None,
            "UPCAST": self._interpreted and q_thd.dtype == torch.bfloat16,
        }

    def _shape(self, q_thd: Tensor, latents: Tensor, value_dim: int) -> dict[str, int]:
        """The kernels' compile-time numbers."""
        tile = latent_tile(q_thd.dtype, self._capability).within(self._rows, self._block)
        turning = latents.shape[2] - value_dim
        return {
            "PAGE_TOKENS": latents.shape[1],
            "LATENT": value_dim,
            "TURNING": turning,
            "GROUP": min(tile.rows, triton.next_power_of_2(q_thd.shape[1])),
            "ROWS": tile.rows,
            "BLOCK_L": max(16, triton.next_power_of_2(value_dim)),
            "BLOCK_R": max(16, triton.next_power_of_2(turning)),
            "BLOCK_N": tile.block,
            "SPLIT": self._split,
            "UPCAST": self._interpreted and q_thd.dtype == torch.bfloat16,
        }

    def _check(self, q_thd: Tensor, latents: Tensor, value_dim: int) -> None:
        if q_thd.dtype != latents.dtype or q_thd.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"triton attention takes float32, float16 or bfloat16, the same for queries and latents; got "
                f"{q_thd.dtype} and {latents.dtype}; use engine.attention=torch"
            )
        turning = latents.shape[2] - value_dim
        if value_dim > MAX_LATENT or not 0 < turning <= MAX_TURNING:
            raise ConfigError(
                f"triton attention takes latents of up to {MAX_LATENT} with keys of 1 to {MAX_TURNING} beside them; "
                f"got {value_dim} and {turning}; use engine.attention=torch"
            )
        assert q_thd.shape[2] == latents.shape[2], "queries fit the latents"
        assert q_thd.stride(2) == latents.stride(2) == 1, "a head's elements lie side by side"
