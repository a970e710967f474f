"""Attention over paged keys and values on an NVIDIA GPU: shapes, grids and limits of `attention_kernels`.

`attention_kernels` says how the order of reduction is fixed. With Triton's interpreter (``TRITON_INTERPRET=1``) the
same kernels run on CPU tensors, slowly: so they are tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from contracts.errors import ConfigError
from engine.attention.triton_backend import attention_kernels as kernels
from engine.attention.triton_backend.triton_latent import TritonLatent
from engine.attention.triton_backend.triton_recurrence import TritonRecurrence

if TYPE_CHECKING:
    from engine.attention.attention_backend import ScoreOptions
    from engine.attention.attention_plan import AttentionPlan, BackendPlan


MAX_HEAD_DIM = 512
_WIDE = 256
"""Heads above this get tiles that still fit a multiprocessor's shared memory, and twice the warps to hold them."""
MAX_HEADS_PER_KV = 64
_EPOCHS_AT_ONCE = 1024
_LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of `attend`."""

    q_thd: Tensor
    k_pages: Tensor
    v_pages: Tensor
    out_thd: Tensor
    plan: AttentionPlan
    scores: ScoreOptions

    @property
    def scale_log2(self) -> float:
        return self.scores.scale * _LOG2_E

    @property
    def cap_log2(self) -> float:
        return self.scores.softcap * _LOG2_E

    @property
    def firsts(self) -> Tensor:
        """The first pages, or any tensor where there are none: the kernel doesn't read it then."""
        return self.plan.starts_b if self.plan.firsts_b is None else self.plan.firsts_b

    @property
    def sinks(self) -> Tensor:
        """The sinks, or any tensor where there are none."""
        return self.plan.starts_b if self.scores.sinks_h is None else self.scores.sinks_h

    @property
    def kind(self) -> dict[str, int]:
        """The compile-time numbers of the kernels that depend on the call."""
        return {"WINDOW": self.scores.window, "FIRSTS": self.plan.firsts_b is not None, "CAPPED": self.cap_log2 > 0}


class TritonAttention:
    """Implements `AttentionBackend` in Triton kernels.

    `tile_rows`, `block_tokens` and `split_tokens` (powers of two) are the shape of the work: changing one changes the
    last bits of results, so all workers of a cluster use the same. The defaults are for GPUs of Ampere and later.
    """

    def __init__(self, tile_rows: int = 64, block_tokens: int = 64, split_tokens: int = 256) -> None:
        """Raises `ConfigError` for a size that is no power of two or below 16, and where no kernel could run."""
        for name, size in (("tile_rows", tile_rows), ("block_tokens", block_tokens), ("split_tokens", split_tokens)):
            if size < 16 or size & (size - 1):
                raise ConfigError(f"triton attention: {name} must be a power of two of 16 or more; got {size}")
        if split_tokens % block_tokens:
            raise ConfigError(f"triton attention: split_tokens {split_tokens} must hold whole blocks of {block_tokens}")
        self._interpreted = bool(triton.knobs.runtime.interpret)
        if not self._interpreted and not torch.cuda.is_available():
            raise ConfigError("triton attention needs an NVIDIA GPU and none is visible; use engine.attention=torch")
        self.latent = TritonLatent(interpreted=self._interpreted)
        self.recurrence = TritonRecurrence()
        self._rows = tile_rows
        self._block = block_tokens
        self._split = split_tokens

    def attend(
        self, q_thd: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, scores: ScoreOptions
    ) -> Tensor:
        """Attend each query to the positions up to its own that it sees.

        q_thd: [T, heads, head_dim] float32, float16 or bfloat16, packed by `plan.offsets_b`; k_pages and v_pages:
        [pages, page_tokens, kv_heads, head_dim] of the same dtype, the new tokens' entries already stored.
        Returns [T, heads, head_dim] in q's dtype, freshly allocated. Raises `ConfigError` for shapes
        that it can't serve.
        """
        self._check(q_thd, k_pages, v_pages, plan)
        assert scores.sinks_h is None or scores.sinks_h.dtype == torch.float32, "sinks are float32"
        out_thd = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
        if q_thd.shape[0] == 0:
            return out_thd
        call = _Call(q_thd, k_pages, v_pages, out_thd, plan, scores)
        if plan.max_queries == 1:
            self._decode(call)
        else:
            self._extend(call)
        return out_thd

    def stale(self, plan: BackendPlan, epochs_e: Tensor) -> Tensor:
        """Flag sequences whose table names a page whose epoch in `epochs_e` ([pages] int32) has changed: [B] bool."""
        assert plan.epochs_bp is not None, "the plan has epochs"
        batch, width = plan.tables_bp.shape
        stale_b = torch.empty(batch, dtype=torch.int8, device=epochs_e.device)
        kernels.epoch_check_kernel[(batch,)](
            plan.tables_bp, plan.epochs_bp, epochs_e, stale_b,
            plan.tables_bp.stride(0), plan.epochs_bp.stride(0), width,
            BLOCK=min(_EPOCHS_AT_ONCE, triton.next_power_of_2(width)),
        )  # fmt: skip
        return stale_b.bool()

    def store(self, k_thd: Tensor, v_thd: Tensor, k_pages: Tensor, v_pages: Tensor, slots_t: Tensor) -> None:
        """Write new tokens' keys and values [T, kv_heads, head_dim] into their slots.

        slots_t: [T] int32 or int64, ``page * page_tokens + offset`` in the pages; no slot twice.
        """
        tokens, kv_heads, head_dim = k_thd.shape
        width = kv_heads * head_dim
        if tokens == 0:
            return
        k_td, v_td = k_thd.reshape(tokens, width), v_thd.reshape(tokens, width)
        assert k_pages.stride(2) == v_pages.stride(2) == head_dim, "a token's heads lie side by side"
        kernels.store_kernel[(tokens,)](
            k_td, v_td, k_pages, v_pages, slots_t,
            k_td.stride(0), v_td.stride(0), k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1),
            PAGE_TOKENS=k_pages.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip

    def _extend(self, call: _Call) -> None:
        q_thd, k_pages, v_pages, out_thd, plan = call.q_thd, call.k_pages, call.v_pages, call.out_thd, call.plan
        shape = self._shape(q_thd, k_pages)
        tiles = triton.cdiv(plan.max_queries, shape["ROWS"] // shape["GROUP"])
        kernels.extend_kernel[(tiles, plan.starts_b.shape[0], k_pages.shape[2])](
            q_thd, k_pages, v_pages, out_thd, plan.starts_b, plan.offsets_b, plan.tables_bp, call.firsts, call.sinks,
            q_thd.stride(0), q_thd.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            out_thd.stride(0), out_thd.stride(1), plan.tables_bp.stride(0), call.scale_log2, call.cap_log2,
            **shape, **call.kind, SINKS=call.scores.sinks_h is not None,
        )  # fmt: skip

    def _decode(self, call: _Call) -> None:
        q_thd, k_pages, v_pages, out_thd, plan = call.q_thd, call.k_pages, call.v_pages, call.out_thd, call.plan
        batch, heads = plan.starts_b.shape[0], q_thd.shape[1]
        shape = self._shape(q_thd, k_pages)
        # The table's width bounds every length without asking the device; programs past a length end at once. A table
        # that begins later may begin in the midst of a split.
        splits = triton.cdiv(plan.tables_bp.shape[1] * plan.page_tokens, self._split) + (plan.firsts_b is not None)
        if window := call.scores.window:
            splits = min(splits, triton.cdiv(window, self._split) + 1)
        count = batch * heads * splits
        parts = torch.empty(count * (shape["BLOCK_D"] + 2), dtype=torch.float32, device=q_thd.device)
        acc_bhsd, m_bhs, total_bhs = torch.split(parts, [count * shape["BLOCK_D"], count, count])
        kernels.decode_split_kernel[(splits, batch, k_pages.shape[2])](
            q_thd, k_pages, v_pages, m_bhs, total_bhs, acc_bhsd, plan.starts_b, plan.offsets_b, plan.tables_bp,
            call.firsts,
            q_thd.stride(0), q_thd.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            plan.tables_bp.stride(0), heads, splits, call.scale_log2, call.cap_log2,
            **shape, **call.kind,
        )  # fmt: skip
        kernels.decode_merge_kernel[(batch, heads)](
            m_bhs, total_bhs, acc_bhsd, out_thd, plan.starts_b, plan.offsets_b, call.sinks,
            out_thd.stride(0), out_thd.stride(1), heads, splits,
            HEAD_DIM=shape["HEAD_DIM"], BLOCK_D=shape["BLOCK_D"], SPLIT=self._split,
            WINDOW=call.scores.window, SINKS=call.scores.sinks_h is not None,
        )  # fmt: skip

    def _shape(self, q_thd: Tensor, k_pages: Tensor) -> dict[str, int]:
        """The kernels' compile-time numbers."""
        head_dim = q_thd.shape[2]
        per_kv = q_thd.shape[1] // k_pages.shape[2]
        group = triton.next_power_of_2(per_kv)
        rows, block, warps = self._tile(head_dim, q_thd.dtype)
        return {
            "PAGE_TOKENS": k_pages.shape[1],
            "HEAD_DIM": head_dim,
            "HEADS_PER_KV": per_kv,
            "GROUP": group,
            "ROWS": max(rows, group),
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_N": block,
            "SPLIT": self._split,
            "UPCAST": self._interpreted and q_thd.dtype == torch.bfloat16,
            "num_warps": warps,
        }

    def _tile(self, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
        """Rows of a tile, keys of a block, and warps."""
        if head_dim <= _WIDE:
            return self._rows, self._block, 4
        if dtype.itemsize == 2:
            return self._rows, max(16, self._block // 2), 8
        return max(16, self._rows // 4), max(16, self._block // 4), 8

    def _check(self, q_thd: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan) -> None:
        _, heads, head_dim = q_thd.shape
        kv_heads = k_pages.shape[2]
        if q_thd.dtype not in _DTYPES or k_pages.dtype != q_thd.dtype or v_pages.dtype != q_thd.dtype:
            raise ConfigError(
                f"triton attention takes float32, float16 or bfloat16, the same for queries, keys and values; got "
                f"{q_thd.dtype}, {k_pages.dtype} and {v_pages.dtype}; use engine.attention=torch"
            )
        if heads % kv_heads or heads // kv_heads > MAX_HEADS_PER_KV or head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"triton attention takes up to {MAX_HEADS_PER_KV} heads a key head and heads of up to {MAX_HEAD_DIM}; "
                f"got {heads} heads of {head_dim} over {kv_heads} key heads; use engine.attention=torch"
            )
        assert k_pages.shape == v_pages.shape, "keys and values lie alike"
        assert k_pages.shape[3] == head_dim, "keys fit the queries"
        assert k_pages.shape[1] == plan.page_tokens, "the plan was made for other pages"
        assert q_thd.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1, "a head's elements lie side by side"
        assert plan.offsets_b.shape[0] == plan.starts_b.shape[0] + 1 == plan.tables_bp.shape[0] + 1
        assert plan.tables_bp.stride(1) == 1, "a block table is a row"
