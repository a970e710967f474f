"""Triton kernels of pages: stores of keys and values and of index keys in float8, and the comparison of epochs.

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
def store_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, slots_ptr,
    k_stride_t, v_stride_t, k_stride_p, k_stride_s, v_stride_p, v_stride_s,
    PAGE_TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token's keys and values (all heads, `WIDTH` elements) into its slot. Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    page, offset = slot // PAGE_TOKENS, slot % PAGE_TOKENS
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    k = tl.load(k_ptr + token * k_stride_t + columns, mask=mask)
    v = tl.load(v_ptr + token * v_stride_t + columns, mask=mask)
    tl.store(k_pages_ptr + page * k_stride_p + offset * k_stride_s + columns, k, mask=mask)
    tl.store(v_pages_ptr + page * v_stride_p + offset * v_stride_s + columns, v, mask=mask)


@triton.jit
def epoch_check_kernel(
    tables_ptr, epochs_ptr, now_ptr, stale_ptr, tables_stride, epochs_stride, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether any page of a sequence's table has another epoch now than in its table: 0 or 1. Grid (sequences,).

    Epochs count frees, so tables need no lengths: behind a sequence's end are pages that it holds as well, or the null
    page, which is never freed.
    """
    row = tl.program_id(0).to(tl.int64)
    stale = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < width
        page = tl.load(tables_ptr + row * tables_stride + columns, mask=mask, other=0)
        leased = tl.load(epochs_ptr + row * epochs_stride + columns, mask=mask, other=0)
        now = tl.load(now_ptr + page, mask=mask, other=0)
        stale |= (leased != now).to(tl.int32)
    tl.store(stale_ptr + row, tl.max(stale, 0).to(tl.int8))


@triton.jit
def _on_float8_grid(value):
    """The nearest numbers that float8e4nv has, ties to even; within its range. Then the cast is exact everywhere."""
    exponent = (value.to(tl.int32, bitcast=True) >> 23) & 255
    step_exponent = tl.maximum(exponent - 3, 118)  # of float32: 127 - 9, the least step there is
    step = (step_exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - step_exponent) << 23).to(tl.float32, bitcast=True)
    return ((value * inverse + 12582912.0) - 12582912.0) * step  # 1.5 * 2^23 leaves no room for a fraction


@triton.jit
def store_float8_kernel(
    keys_ptr, pages_ptr, scales_ptr, slots_ptr, keys_stride, stride_p, stride_t, scales_stride,
    PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Round one token's key to float8 with its own scale, into its slot. Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    page, offset = slot // PAGE_TOKENS, slot % PAGE_TOKENS
    dims = tl.arange(0, BLOCK_D)
    key = tl.load(keys_ptr + token * keys_stride + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(key), 0), 448.0)
    value = tl.div_rn(key, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(key))
    value = _on_float8_grid(tl.minimum(tl.maximum(value, -448.0), 448.0))
    tl.store(pages_ptr + page * stride_p + offset * stride_t + dims, value.to(tl.float8e4nv), mask=dims < DIM)
    tl.store(scales_ptr + page * scales_stride + offset, scale)


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
