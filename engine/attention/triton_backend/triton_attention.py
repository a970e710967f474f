"""Attention over paged keys and values on an NVIDIA GPU: shapes, grids and limits of `attention_kernels`.

`attention_kernels` says how the order of reduction is fixed. Which programs do the work follows from how much of it
there is, and changes no bit: decode has a program for each split where that is few programs, and is an extend of one
query a sequence otherwise. Parts of results are kept in scratch of a bounded size (`attend_call`). With Triton's
interpreter (``TRITON_INTERPRET=1``) the same kernels run on CPU tensors, slowly: so they are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from twinpool.cache.device.device_choice import device_capability
from twinpool.contracts.errors import ConfigError
from twinpool.engine.attention.kv_quantization import KVScales
from twinpool.engine.attention.triton_backend import attention_kernels as kernels
from twinpool.engine.attention.triton_backend import merge_kernels, page_kernels
from twinpool.engine.attention.triton_backend.attend_call import (
    SCRATCH_BYTES,
    SEGMENT_TOKENS,
    SPLIT_TOKENS,
    AttendCall,
    Parts,
    head_tile,
    waves,
)
from twinpool.engine.attention.triton_backend.triton_latent import TritonLatent
from twinpool.engine.attention.triton_backend.triton_recurrence import TritonRecurrence
from twinpool.engine.tensors.launch_configs import launch_options

if TYPE_CHECKING:
    from twinpool.engine.attention.attention_backend import ScoreOptions
    from twinpool.engine.attention.attention_plan import AttentionPlan, BackendPlan


SPLIT_BELOW = 1024
"""Decode gives each split a program of its own where segments would be fewer programs than this: more than enough for
every multiprocessor. Which of the two it does changes no bit."""
_EPOCHS_AT_ONCE = 1024
_ENDLESS = 1 << 30
"""A segment of all positions, for windows that are no longer than a segment."""


class TritonAttention:
    """Implements `AttentionBackend` in Triton kernels.

    `split_tokens` and `segment_tokens` (powers of two) are the shape of the work, and so are tiles, which are those of
    `attend_call` for GPUs of `capability` (None: the current one's), but not larger than `tile_rows` by
    `block_tokens`: changing one changes the last bits of results, so all workers of a cluster use the same.
    `scratch_bytes` bounds what one call keeps of parts of results, and `split_below` is as `SPLIT_BELOW`; neither
    changes a bit.
    """

    def __init__(
        self, tile_rows: int = 64, block_tokens: int = 64, split_tokens: int = SPLIT_TOKENS,
        segment_tokens: int = SEGMENT_TOKENS, *,
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
        self,
        q_thd: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: AttentionPlan,
        scores: ScoreOptions,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Attend each query to the positions up to its own that it sees.

        q_thd: [T, heads, head_dim] float32, float16 or bfloat16, packed by `plan.offsets_b`; k_pages and v_pages:
        [pages, page_tokens, kv_heads, head_dim] of the same dtype, the new tokens' entries already stored.
        Returns [T, heads, head_dim] in q's dtype, freshly allocated. Raises `ConfigError` for shapes
        that it can't serve.
        """
        assert scales is None, "`kernel_choice.check_state` refuses quantised state"
        out_thd = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
        call = AttendCall(q_thd, k_pages, v_pages, out_thd, plan, scores)
        call.check()
        if q_thd.shape[0] == 0:
            return out_thd
        shape = self._shape(call)
        segments, splits = self._segments(call, shape), self._splits(call)
        programs = plan.starts_b.shape[0] * k_pages.shape[2] * segments
        parts = Parts(plan.starts_b.shape[0] * q_thd.shape[1] * (splits + segments), shape["BLOCK_D"])
        if plan.max_queries == 1 and programs < self._split_below and parts.fit(self._scratch_bytes):
            self._decode(call, shape, segments, splits)
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

    def _segments(self, call: AttendCall, shape: dict[str, int]) -> int:
        """How many segments the queries of one tile see, at most. The host knows no lengths: the table's width bounds
        them, and programs past a length end at once. A table that begins later may begin in the midst of a segment."""
        plan, size = call.plan, shape["SEGMENT"]
        if size == _ENDLESS:
            return 1
        segments: int = triton.cdiv(plan.tables_bp.shape[1] * plan.page_tokens, size) + (plan.firsts_b is not None)
        if window := call.scores.window:
            per_tile = min(plan.max_queries, shape["ROWS"] // shape["GROUP"])
            segments = min(segments, triton.cdiv(window + per_tile - 1, size) + 1)
        return segments

    def _splits(self, call: AttendCall) -> int:
        """How many splits one query sees, at most; bounded likewise."""
        plan = call.plan
        splits: int = triton.cdiv(plan.tables_bp.shape[1] * plan.page_tokens, self._split) + (plan.firsts_b is not None)
        if window := call.scores.window:
            splits = min(splits, triton.cdiv(window, self._split) + 1)
        return splits

    def _extend(self, call: AttendCall, shape: dict[str, int], segments: int) -> None:
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
            del parts  # before those of the next wave are taken

    def _decode(self, call: AttendCall, shape: dict[str, int], segments: int, splits: int) -> None:
        """A program for every split, and two kernels that merge: splits, and, where there are several, segments."""
        q_thd, k_pages, v_pages, out_thd, plan = call.q_thd, call.k_pages, call.v_pages, call.out_thd, call.plan
        batch, heads = plan.starts_b.shape[0], q_thd.shape[1]
        by_split = Parts(batch * heads * splits, shape["BLOCK_D"]).tensors(q_thd.device)
        whole = {name: size for name, size in shape.items() if name != "SEGMENT"}
        kernels.decode_split_kernel[(splits, batch, k_pages.shape[2])](
            q_thd, k_pages, v_pages, *by_split, plan.starts_b, plan.offsets_b, plan.tables_bp, call.firsts,
            q_thd.stride(0), q_thd.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            plan.tables_bp.stride(0), heads, splits, call.scale_log2, call.cap_log2,
            **whole, **call.kind, **self._options(kernels.decode_split_kernel, q_thd, shape),
        )  # fmt: skip
        parts = Parts(batch * heads * segments if segments > 1 else 0, shape["BLOCK_D"]).tensors(q_thd.device)
        merge_kernels.merge_splits_kernel[(segments, batch, heads)](
            *by_split, out_thd, *parts, plan.starts_b, plan.offsets_b, call.sinks,
            out_thd.stride(0), out_thd.stride(1), heads, splits, segments,
            HEAD_DIM=shape["HEAD_DIM"], BLOCK_D=shape["BLOCK_D"], SPLIT=self._split, SEGMENT=shape["SEGMENT"],
            WINDOW=call.scores.window, SINKS=call.scores.sinks_h is not None, PARTS=segments > 1,
        )  # fmt: skip
        if segments > 1:
            self._merge_segments(call, shape, parts, segments, 0, batch)

    def _merge_segments(
        self, call: AttendCall, shape: dict[str, int], parts: Sequence[Tensor], segments: int, first: int, tokens: int
    ) -> None:
        """Of the queries at [first, first + tokens) on the packed axis."""
        plan, out_thd, heads = call.plan, call.out_thd, call.q_thd.shape[1]
        merge_kernels.merge_segments_kernel[(min(plan.max_queries, tokens), plan.starts_b.shape[0], heads)](
            *parts, out_thd, plan.starts_b, plan.offsets_b, call.sinks,
            out_thd.stride(0), out_thd.stride(1), heads, segments, first, tokens,
            HEAD_DIM=shape["HEAD_DIM"], BLOCK_D=shape["BLOCK_D"], SEGMENT=shape["SEGMENT"],
            PER_TILE=shape["ROWS"] // shape["GROUP"], WINDOW=call.scores.window,
            SINKS=call.scores.sinks_h is not None,
        )  # fmt: skip

    def _shape(self, call: AttendCall) -> dict[str, int]:
        """The kernels' compile-time numbers."""
        q_thd, k_pages = call.q_thd, call.k_pages
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
            "SEGMENT": _ENDLESS if 0 < call.scores.window <= self._segment else self._segment,
            "UPCAST": self._interpreted and q_thd.dtype == torch.bfloat16,
        }

    def _options(self, kernel: object, q_thd: Tensor, shape: Mapping[str, int]) -> dict[str, int]:
        tile = head_tile(q_thd.shape[2], q_thd.dtype, self._capability)
        return launch_options(kernel, q_thd.dtype, shape, tile.warps, tile.stages)
