"""Paged attention with the C++ kernels (engine/native/attention.h), for CPUs where they can be compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.native.native_kernels import AttentionShape, NativeKernels
from twinpool.engine.tensors.row_exact_linear import Numerics


class NativeAttention(TorchAttention):
    """Attention by the C++ kernels, the rest in torch operations. Attention is row-exact whatever the numerics: a row
    is computed by itself, in the order of absolute positions."""

    def __init__(self, numerics: Numerics, kernels: NativeKernels) -> None:
        super().__init__(numerics)
        self._kernels = kernels

    def attend(
        self, q_thd: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, scores: ScoreOptions
    ) -> Tensor:
        assert k_pages.is_contiguous() and v_pages.stride() == k_pages.stride(), "pages follow each other"  # noqa: PT018
        heads, (page_tokens, kv_heads, dim) = q_thd.shape[1], k_pages.shape[1:]
        entry = kv_heads * dim
        shape = AttentionShape(
            heads,
            kv_heads,
            dim,
            page_tokens,
            v_pages.shape[3],
            page_tokens * entry,
            entry,
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
        )
