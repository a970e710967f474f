"""Triton kernels of pages: the store of keys and values, and the comparison of epochs."""

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
