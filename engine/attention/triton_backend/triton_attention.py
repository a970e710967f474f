"""Attention over paged keys and values on an NVIDIA GPU: shapes, grids and limits of `attention_kernels`.

`attention_kernels` says how the order of reduction is fixed. With Triton's interpreter (``TRITON_INTERPRET=1``) the
same kernels run on CPU tensors, slowly: so they are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from contracts.errors import ConfigError
from engine.attention.triton_backend import attention_kernels as kernels
from engine.attention.triton_backend import merge_kernels, page_kernels
from engine.attention.triton_backend.softmax_parts import SCRATCH_BYTES, Parts, waves
from engine.attention.triton_backend.tile_shapes import device_capability, head_tile
from engine.attention.triton_backend.triton_latent import TritonLatent
from engine.attention.triton_backend.triton_recurrence import TritonRecurrence
from engine.tensors.tuned_options import launch_options

if TYPE_CHECKING:
    from engine.attention.attention_backend import ScoreOptions
    from engine.attention.attention_plan import AttentionPlan, BackendPlan


MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV = 64
SPLIT_BELOW = 1024
"""Decode gives each split a program of its own where segments would be fewer programs than this: more than enough for
every multiprocessor. Which of the two it does changes no bit."""
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

    `split_tokens` and `segment_tokens` (powers of two) are the shape of the work, and so are tiles, which are those of
    `tile_shapes` for GPUs of `capability` (None: the current one's), but not larger than `tile_rows` by
    `block_tokens`: changing one changes the last bits of results, so all workers of a cluster use the same.
    `scratch_bytes` bounds what one call keeps of parts of results, and `split_below` is as `SPLIT_BELOW`; neither
    changes a bit.
    """

    def __init__(
        self, tile_rows: int = 64, block_tokens: int = 64, split_tokens: int = 256, segment_tokens: int = 4096, *,
        scratch_bytes: int = SCRATCH_BYTES, split_below: int = SPLIT_BELOW, capability: int | None = None,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` for a size that is no power of two or below 16."""
        sizes = {
            "tile_rows": tile_rows, "block_tokens": block_tokens, "split_tokens": split_tokens,
            "segment_tokens": segment_tokens,
        }  # fmt: skip
        for name, size in sizes.items():
            if size < 16 or size & (size - 1):
                raise ConfigError(f"triton attention: {name} must be a power of two of 16 or more; got {size}")
        if split_tokens % block_tokens or segment_tokens % split_tokens:
            raise ConfigError(
                f"triton attention: split_tokens {split_tokens} must hold whole blocks of {block_tokens}, and "
                f"segment_tokens {segment_tokens} whole splits"
            )
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._capability = device_capability() if capability is None else capability
        self.latent = TritonLatent(
            interpreted=self._interpreted, scratch_bytes=scratch_bytes, capability=self._capability
        )
        self.recurrence = TritonRecurrence()
        self._rows, self._block = tile_rows, block_tokens
        self._split, self._segment = split_tokens, segment_tokens
        self._scratch_bytes, self._split_below = scratch_bytes, split_below

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
        shape = self._shape(q_thd, k_pages)
        segments = self._segments(call, shape)
        programs = plan.starts_b.shape[0] * k_pages.shape[2] * segments
        parts = Parts(programs * shape["HEADS_PER_KV"] * (self._segment // self._split), shape["BLOCK_D"])
        if plan.max_queries == 1 and programs < self._split_below and parts.fit(self._scratch_bytes):
            self._decode(call, shape, segments, parts)
        else:
            self._extend(call, shape, segments)
        return out_thd

    def stale(self, plan: BackendPlan, epochs_e: Tensor) -> Tensor:
        """Flag sequences whose table names a page whose epoch in `epochs_e` ([pages] int32) has changed: [B] bool."""
        assert plan.epochs_bp is not None, "the plan has epochs"
        batch, width = plan.tables_bp.shape
        stale_b = torch.empty(batch, dtype=torch.int8, device=epochs_e.device)
        page_kernels.epoch_check_kernel[(batch,)](
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
        page_kernels.store_kernel[(tokens,)](
            k_td, v_td, k_pages, v_pages, slots_t,
            k_td.stride(0), v_td.stride(0), k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1),
            PAGE_TOKENS=k_pages.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip

    def _segments(self, call: _Call, shape: dict[str, int]) -> int:
        """How many segments the queries of one tile see, at most. The host knows no lengths: the table's width bounds
        them, and programs past a length end at once. A table that begins later may begin in the midst of a segment."""
        plan = call.plan
        segments: int = triton.cdiv(plan.tables_bp.shape[1] * plan.page_tokens, self._segment) + (
            plan.firsts_b is not None
        )
        if window := call.scores.window:
            per_tile = min(plan.max_queries, shape["ROWS"] // shape["GROUP"])
            segments = min(segments, triton.cdiv(window + per_tile - 1, self._segment) + 1)
        return segments

    def _extend(self, call: _Call, shape: dict[str, int], segments: int) -> None:
        """Some queries after the others, so many that their parts fit into the scratch."""
        q_thd, k_pages, v_pages, out_thd, plan = call.q_thd, call.k_pages, call.v_pages, call.out_thd, call.plan
        (tokens, heads), batch, per_tile = q_thd.shape[:2], plan.starts_b.shape[0], shape["ROWS"] // shape["GROUP"]
        a_token = Parts(heads * segments if segments > 1 else 0, shape["BLOCK_D"])
        for first, count in waves(tokens, a_token.nbytes, self._scratch_bytes, per_tile):
            parts = a_token.times(count).tensors(q_thd.device)
            # Tiles are cut from a sequence's begin on, so the first one may begin before this wave.
            queries = min(plan.max_queries, count + (0 if batch == 1 and first % per_tile == 0 else per_tile - 1))
            kernels.extend_kernel[(triton.cdiv(queries, per_tile) * segments, batch, k_pages.shape[2])](
                q_thd, k_pages, v_pages, out_thd, *parts, plan.starts_b, plan.offsets_b, plan.tables_bp, call.firsts,
                call.sinks, q_thd.stride(0), q_thd.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
                out_thd.stride(0), out_thd.stride(1), plan.tables_bp.stride(0), heads, segments, first, count,
                call.scale_log2, call.cap_log2,
                **shape, **call.kind, SINKS=call.scores.sinks_h is not None, PARTS=segments > 1,
                **self._options(kernels.extend_kernel, q_thd, shape),
            )  # fmt: skip
            if segments > 1:
                self._merge_segments(call, shape, parts, segments, first, count)

    def _decode(self, call: _Call, shape: dict[str, int], segments: int, split_parts: Parts) -> None:
        """A program for every split, and two kernels that merge: splits, and, where there are several, segments."""
        q_thd, k_pages, v_pages, out_thd, plan = call.q_thd, call.k_pages, call.v_pages, call.out_thd, call.plan
        batch, heads, splits = plan.starts_b.shape[0], q_thd.shape[1], segments * (self._segment // self._split)
        by_split = split_parts.tensors(q_thd.device)
        kernels.decode_split_kernel[(splits, batch, k_pages.shape[2])](
            q_thd, k_pages, v_pages, *by_split, plan.starts_b, plan.offsets_b, plan.tables_bp, call.firsts,
            q_thd.stride(0), q_thd.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            plan.tables_bp.stride(0), heads, segments, call.scale_log2, call.cap_log2,
            **shape, **call.kind, **self._options(kernels.decode_split_kernel, q_thd, shape),
        )  # fmt: skip
        parts = Parts(batch * heads * segments if segments > 1 else 0, shape["BLOCK_D"]).tensors(q_thd.device)
        merge_kernels.merge_splits_kernel[(segments, batch, heads)](
            *by_split, out_thd, *parts, plan.starts_b, plan.offsets_b, call.sinks,
            out_thd.stride(0), out_thd.stride(1), heads, segments,
            HEAD_DIM=shape["HEAD_DIM"], BLOCK_D=shape["BLOCK_D"], SPLIT=self._split, SEGMENT=self._segment,
            WINDOW=call.scores.window, SINKS=call.scores.sinks_h is not None, PARTS=segments > 1,
        )  # fmt: skip
        if segments > 1:
            self._merge_segments(call, shape, parts, segments, 0, batch)

    def _merge_segments(
        self, call: _Call, shape: dict[str, int], parts: Sequence[Tensor], segments: int, first: int, tokens: int
    ) -> None:
        """Of the queries at [first, first + tokens) on the packed axis."""
        plan, out_thd, heads = call.plan, call.out_thd, call.q_thd.shape[1]
        merge_kernels.merge_segments_kernel[(min(plan.max_queries, tokens), plan.starts_b.shape[0], heads)](
            *parts, out_thd, plan.starts_b, plan.offsets_b, call.sinks,
            out_thd.stride(0), out_thd.stride(1), heads, segments, first, tokens,
            HEAD_DIM=shape["HEAD_DIM"], BLOCK_D=shape["BLOCK_D"], SEGMENT=self._segment,
            PER_TILE=shape["ROWS"] // shape["GROUP"], WINDOW=call.scores.window,
            SINKS=call.scores.sinks_h is not None,
        )  # fmt: skip

    def _shape(self, q_thd: Tensor, k_pages: Tensor) -> dict[str, int]:
        """The kernels' compile-time numbers."""
        head_dim = q_thd.shape[2]
        per_kv = q_thd.shape[1] // k_pages.shape[2]
        group = triton.next_power_of_2(per_kv)
        tile = head_tile(head_dim, q_thd.dtype, self._capability).within(self._rows, self._block)
        return {
            "PAGE_TOKENS": k_pages.shape[1],
            "HEAD_DIM": head_dim,
            "HEADS_PER_KV": per_kv,
            "GROUP": group,
            "ROWS": max(tile.rows, group),
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_N": tile.block,
            "SPLIT": self._split,
            "SEGMENT": self._segment,
            "UPCAST": self._interpreted and q_thd.dtype == torch.bfloat16,
        }

    def _options(self, kernel: object, q_thd: Tensor, shape: Mapping[str, int]) -> dict[str, int]:
        tile = head_tile(q_thd.shape[2], q_thd.dtype, self._capability)
        return launch_options(kernel, q_thd.dtype, shape, tile.warps, tile.stages)

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
