"""Latent attention, the indexer and sparse attention on an NVIDIA GPU: shapes, grids and limits.

The kernels are in `latent_kernels`. Under Triton's interpreter they run on CPU tensors. Nothing here waits for the
device: grids come from numbers of the plan that the host has.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from contracts.errors import ConfigError
from engine.attention.attention_plan import AttentionPlan
from engine.attention.latent_backend import IndexKeys, SparseSelection
from engine.attention.triton_backend import attention_kernels as triton_kernels
from engine.attention.triton_backend import latent_kernels as kernels

MAX_LATENT = 512
MAX_TURNING = 128
MAX_INDEX_HEADS = 128
_LOG2_E = 1.4426950408889634
_SELECT_BLOCK = 1024


class TritonLatent:
    """Implements `LatentBackend` in Triton kernels.

    `tile_rows`, `block_tokens` and `split_tokens` (powers of two) are the shape of the work: changing one changes the
    last bits of results. In float32 tiles and blocks are at most 16, so that they fit into shared memory.
    """

    def __init__(
        self, *, interpreted: bool, tile_rows: int = 64, block_tokens: int = 32, split_tokens: int = 1024,
        index_block: int = 64, index_queries: int = 8,
    ) -> None:  # fmt: skip
        self._interpreted = interpreted
        self._rows, self._block, self._split = tile_rows, block_tokens, split_tokens
        self._index_block, self._index_queries = index_block, index_queries

    def attend(self, q_thd: Tensor, latents: Tensor, plan: AttentionPlan, scale: float, value_dim: int) -> Tensor:
        """As `LatentBackend.attend`. Raises `ConfigError` for shapes that no kernel serves."""
        self._check(q_thd, latents, value_dim)
        out_thd = q_thd.new_empty(*q_thd.shape[:2], value_dim)
        if len(q_thd) == 0:
            return out_thd
        if plan.max_queries == 1:
            self._decode(q_thd, latents, out_thd, plan, scale)
        else:
            self._extend(q_thd, latents, out_thd, plan, scale)
        return out_thd

    def store_keys(self, keys_td: Tensor, into: IndexKeys, plan: AttentionPlan) -> None:
        if plan.muted_t is not None:
            keys_td = keys_td.masked_fill(plan.muted_t.unsqueeze(1), 0.0)
        dim = into.pages.shape[-1]
        if into.scales is None:
            into.pages.view(-1, dim).index_copy_(0, plan.slots_t, keys_td)
        elif len(keys_td):
            kernels.store_float8_kernel[(len(keys_td),)](
                keys_td, into.pages, into.scales, plan.slots_t,
                keys_td.stride(0), *into.pages.stride()[:2], into.scales.stride(0),
                PAGE_TOKENS=plan.page_tokens, DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
            )  # fmt: skip

    def select(
        self, q_thd: Tensor, weights_th: Tensor, keys: IndexKeys, plan: AttentionPlan, top_k: int
    ) -> SparseSelection | None:
        """As `LatentBackend.select`. `rows_s` has every query; the scratch says how many positions each reads."""
        count, heads, dim = q_thd.shape
        width = plan.tables_bp.shape[1] * plan.page_tokens
        if width <= top_k or count == 0:
            return None
        if heads > MAX_INDEX_HEADS:
            raise ConfigError(f"triton attention takes up to {MAX_INDEX_HEADS} index heads, got {heads}")
        columns = triton.cdiv(width, self._index_block) * self._index_block
        rows = torch.arange(count, device=q_thd.device)
        positions_sk = torch.zeros(count, top_k, dtype=torch.int32, device=q_thd.device)
        slots_sk, counts_s = torch.zeros_like(positions_sk), positions_sk.new_empty(count)
        scores = torch.empty(count, columns, dtype=torch.float32, device=q_thd.device)
        batch, queries = len(plan.starts_b), plan.max_queries
        kernels.index_score_kernel[(columns // self._index_block, triton.cdiv(queries, self._index_queries), batch)](
            q_thd, weights_th, keys.pages, weights_th if keys.scales is None else keys.scales, scores,
            plan.starts_b, plan.offsets_b, plan.tables_bp,
            *q_thd.stride()[:2], weights_th.stride(0), *keys.pages.stride()[:2],
            0 if keys.scales is None else keys.scales.stride(0), scores.stride(0), plan.tables_bp.stride(0), heads,
            PAGE_TOKENS=plan.page_tokens, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_H=max(16, triton.next_power_of_2(heads)), BLOCK_N=self._index_block, QUERIES=self._index_queries,
            FLOAT8=keys.scales is not None, UPCAST=self._interpreted and q_thd.dtype == torch.bfloat16,
        )  # fmt: skip
        kernels.select_kernel[(queries, batch)](
            scores, positions_sk, slots_sk, counts_s, plan.starts_b, plan.offsets_b, plan.tables_bp,
            scores.stride(0), top_k, plan.tables_bp.stride(0), top_k,
            PAGE_TOKENS=plan.page_tokens, BLOCK=min(_SELECT_BLOCK, triton.next_power_of_2(columns)),
        )  # fmt: skip
        return SparseSelection(rows, slots_sk, positions_sk, {"counts": counts_s})

    def attend_selected(
        self,
        q_thd: Tensor,
        latents: Tensor,
        plan: AttentionPlan,
        selection: SparseSelection | None,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        if selection is None:
            return self.attend(q_thd, latents, plan, scale, value_dim)
        self._check(q_thd, latents, value_dim)
        out_thd = q_thd.new_empty(*q_thd.shape[:2], value_dim)
        by_token = latents.view(-1, 1, latents.shape[-1])
        by_query = self._by_query(selection)
        # Few queries need many programs each; many are enough as they are. The bits are the same.
        if plan.max_queries == 1:
            self._decode(q_thd, by_token, out_thd, by_query, scale)
        else:
            self._extend(q_thd, by_token, out_thd, by_query, scale)
        return out_thd

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

    def _extend(self, q_thd: Tensor, latents: Tensor, out_thd: Tensor, plan: AttentionPlan, scale: float) -> None:
        heads = q_thd.shape[1]
        shape = self._shape(q_thd, latents, out_thd.shape[2])
        tiles = triton.cdiv(plan.max_queries, shape["ROWS"] // shape["GROUP"])
        kernels.latent_extend_kernel[(tiles, len(plan.starts_b), triton.cdiv(heads, shape["GROUP"]))](
            q_thd, latents, out_thd, plan.starts_b, plan.offsets_b, plan.tables_bp,
            *q_thd.stride()[:2], *latents.stride()[:2], *out_thd.stride()[:2], plan.tables_bp.stride(0),
            heads, scale * _LOG2_E, **shape, num_warps=8, num_stages=1,
        )  # fmt: skip

    def _decode(self, q_thd: Tensor, latents: Tensor, out_thd: Tensor, plan: AttentionPlan, scale: float) -> None:
        batch, heads = len(plan.starts_b), q_thd.shape[1]
        shape = self._shape(q_thd, latents, out_thd.shape[2])
        splits = triton.cdiv(plan.tables_bp.shape[1] * plan.page_tokens, self._split)
        count = batch * heads * splits
        parts = torch.empty(count * (shape["BLOCK_L"] + 2), dtype=torch.float32, device=q_thd.device)
        acc_bhsl, m_bhs, total_bhs = torch.split(parts, [count * shape["BLOCK_L"], count, count])
        kernels.latent_split_kernel[(splits, batch, triton.cdiv(heads, shape["GROUP"]))](
            q_thd, latents, m_bhs, total_bhs, acc_bhsl, plan.starts_b, plan.offsets_b, plan.tables_bp,
            *q_thd.stride()[:2], *latents.stride()[:2], plan.tables_bp.stride(0), heads, splits, scale * _LOG2_E,
            **shape, num_warps=8, num_stages=1,
        )  # fmt: skip
        triton_kernels.decode_merge_kernel[(batch, heads)](
            m_bhs, total_bhs, acc_bhsl, out_thd, plan.starts_b, plan.offsets_b, plan.starts_b,
            *out_thd.stride()[:2], heads, splits,
            HEAD_DIM=shape["LATENT"], BLOCK_D=shape["BLOCK_L"], SPLIT=self._split, WINDOW=0, SINKS=False,
        )  # fmt: skip

    def _shape(self, q_thd: Tensor, latents: Tensor, value_dim: int) -> dict[str, int]:
        """The kernels' compile-time numbers."""
        small = q_thd.dtype == torch.float32
        rows = 16 if small else self._rows
        turning = latents.shape[2] - value_dim
        return {
            "PAGE_TOKENS": latents.shape[1],
            "LATENT": value_dim,
            "TURNING": turning,
            "GROUP": min(rows, triton.next_power_of_2(q_thd.shape[1])),
            "ROWS": rows,
            "BLOCK_L": max(16, triton.next_power_of_2(value_dim)),
            "BLOCK_R": max(16, triton.next_power_of_2(turning)),
            "BLOCK_N": 16 if small else self._block,
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
