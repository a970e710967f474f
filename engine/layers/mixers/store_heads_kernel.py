"""The Triton kernel between the projection of queries, keys and values and attention: norms, rope and the store.

`store_heads_kernel` takes the product of queries, keys and values and does in one pass what would be seven: norms by
head, rope, and the store into pages. It rounds where the operations that it replaces would round. Each program has one
head of one token, so a row's result is the same in any batch.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight_ptr, at, mask, scale):
    """`x` times `scale`, rounded, times a weight, rounded."""
    y = (x * scale).to(weight_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return (y * weight).to(weight_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def store_heads_kernel(
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr, q_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, muted_ptr,
    qkv_stride, cos_stride, sin_stride, k_stride_p, k_stride_t, v_stride_p, v_stride_t, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, MUTED: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token; heads of queries, then of keys, then of values. Grid (tokens, heads).

    Reads qkv [T, HEADS + 2 * KV_HEADS, HEAD_DIM]; queries go to q [T, HEADS, HEAD_DIM], keys and values to their slot,
    as zeros where the token is muted.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    mask = d < HEAD_DIM
    row_ptr = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    x = tl.load(row_ptr + d, mask=mask, other=0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    if head < HEADS + KV_HEADS:
        partner = tl.where(d < ROPE_DIM // 2, d + ROPE_DIM // 2, d - ROPE_DIM // 2)
        other = tl.load(row_ptr + partner, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
            x = _normed(x, norm_ptr, head * HEAD_DIM + d, mask, scale)
            other = _normed(other, norm_ptr, head * HEAD_DIM + partner, mask, scale)
        if ROPE:
            cos = tl.load(cos_ptr + token * cos_stride + d, mask=d < ROPE_DIM, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + token * sin_stride + d, mask=d < ROPE_DIM, other=0.0).to(tl.float32)
            x = (x * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)
    if head < HEADS:
        tl.store(q_ptr + (token * HEADS + head) * HEAD_DIM + d, x.to(dtype), mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        if MUTED:
            x = tl.where(tl.load(muted_ptr + token) != 0, 0.0, x)
        page, offset = slot // PAGE_TOKENS, slot % PAGE_TOKENS
        if head < HEADS + KV_HEADS:
            at = page * k_stride_p + offset * k_stride_t + (head - HEADS) * HEAD_DIM
            tl.store(k_pages_ptr + at + d, x.to(dtype), mask=mask)
        else:
            at = page * v_stride_p + offset * v_stride_t + (head - HEADS - KV_HEADS) * HEAD_DIM
            tl.store(v_pages_ptr + at + d, x.to(dtype), mask=mask)
