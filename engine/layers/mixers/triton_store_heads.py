"""Norms, rope and the store into pages in one kernel on an NVIDIA GPU: shapes and grid of
`page_kernels.store_heads_kernel`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from twinpool.engine.attention.triton_backend import page_kernels


def store_heads(
    qkv_tn: Tensor,
    norm_nd: Tensor | None,
    eps: float,
    turns: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots_t: Tensor,
    muted_t: Tensor | None,
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values; returns the queries, [T, heads, head_dim].

    qkv_tn: [T, (heads + 2 * kv_heads) * head_dim], heads of queries, keys, values; norm_nd: [heads + kv_heads,
    head_dim] weights of their norms with epsilon `eps`, or None; turns: cos and sin as `ForwardContext.rope` gives
    them for a head's first dimensions, [T or more, 1, rope_dim] each, or None; pages [pages, page_tokens, kv_heads,
    head_dim]; all of one dtype. slots_t [T] int64; muted_t [T] bool or None: tokens for which zeros are stored instead.
    """
    tokens, kv_heads, dim = len(qkv_tn), k_pages.shape[2], k_pages.shape[3]
    total = qkv_tn.shape[1] // dim
    heads = total - 2 * kv_heads
    q_thd = torch.empty(tokens, heads, dim, dtype=qkv_tn.dtype, device=qkv_tn.device)
    if tokens == 0:
        return q_thd
    assert k_pages.stride(2) == v_pages.stride(2) == dim, "a token's heads lie side by side"
    cos_td, sin_td = turns if turns is not None else (qkv_tn, qkv_tn)
    page_kernels.store_heads_kernel[(tokens, total)](
        qkv_tn, norm_nd if norm_nd is not None else qkv_tn, cos_td, sin_td, q_thd, k_pages, v_pages, slots_t,
        slots_t if muted_t is None else muted_t.view(torch.int8),
        qkv_tn.stride(0), cos_td.stride(0), sin_td.stride(0),
        k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1), eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
        ROPE_DIM=cos_td.shape[-1] if turns is not None else dim,
        PAGE_TOKENS=k_pages.shape[1], NORM=norm_nd is not None, ROPE=turns is not None, MUTED=muted_t is not None,
    )  # fmt: skip
    return q_thd
