"""Triton kernels of matrix products whose rows are exact: one element is one fixed chain of additions.

The inner axis is cut into *parts* of `PART` from its begin. Within a part an element is a chain of dot products over
`BLOCK_K` terms each; the parts' results are added one after the other. Where parts begin depends on nothing but the
inner axis, so there are two ways to compute the same bits:

    whole    a program adds up all parts itself: for many rows, or a wide weight
    parts    a program computes one part, and `sum_parts_kernel` adds them up: for few rows, so that a product of a
             narrow weight has programs for all of a GPU, which waits for the weight anyway

A tile has `ROWS` rows, 64 or more of them whatever the batch: matrix instructions take 64 rows of four warps, and those
of a larger tile are several of the same instruction (a test compares the compiled code).
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, width, inner, x_stride_h, x_stride_m, weight_stride_h, weight_stride_n, weight_stride_k,
    out_stride_p, out_stride_h, out_stride_m,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[h, m, n] = sum over k of x[h, m, k] * weight[h, n, k], and bias[n]. Grid (tiles, heads, parts or 1).

    x [heads, rows, inner], weight [heads, width, inner]. `WHOLE`: all parts, rounded to the dtype of out [heads, rows,
    width]; else one part, float32 and without bias, into out [parts, heads, rows, width]. `EVEN`: inner is a multiple
    of BLOCK_K, which PART is always. Tiles of `GROUP` blocks of
    rows follow each other for every block of columns, so that weights are read again while the cache has them.
    """
    tile, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    blocks_m, blocks_n = tl.cdiv(rows, ROWS), tl.cdiv(width, BLOCK_N)
    group = tile // (GROUP * blocks_n)
    first_m = group * GROUP
    within = min(blocks_m - first_m, GROUP)
    block_m = first_m + (tile % (GROUP * blocks_n)) % within
    block_n = (tile % (GROUP * blocks_n)) // within
    m, n = block_m * ROWS + tl.arange(0, ROWS), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + head * x_stride_h + m.to(tl.int64)[:, None] * x_stride_m
    weight_row = weight_ptr + head * weight_stride_h + n.to(tl.int64)[None, :] * weight_stride_n
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    first = 0 if WHOLE else part * PART
    last = inner if WHOLE else min(inner, (part + 1) * PART)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    # One loop over all parts: the loads of a part are on their way while the one before it is still added up.
    for at in range(first, last, BLOCK_K):
        x_mask, w_mask = (m < rows)[:, None], (n < width)[None, :]
        if not EVEN:
            inside = at + k < inner
            x_mask, w_mask = x_mask & inside[None, :], w_mask & inside[:, None]
        x = tl.load(x_row + (at + k)[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight_row + (at + k).to(tl.int64)[:, None] * weight_stride_k, mask=w_mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if (at + BLOCK_K) % PART == 0:
            total += acc
            acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    total += acc  # What there is of a part that isn't whole.
    if BIAS and WHOLE:
        total += tl.load(bias_ptr + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + part.to(tl.int64) * out_stride_p + head * out_stride_h
    out += m.to(tl.int64)[:, None] * out_stride_m + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < width)[None, :])


@triton.jit
def sum_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, parts, elements, width, part_stride, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out[e] = the sum over p, in order, of parts[p, e], and bias[e % width]. Grid (cdiv(elements, BLOCK),)."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < elements
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + part * part_stride + e, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + e % width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + e, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rank_sum_kernel(parts_ptr, out_ptr, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Add parts [SIZE, count] in the order of the ranks, in float32, and round once: out [count]. Grid (blocks,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    begin = tl.zeros([1], tl.int64)
    for _ in tl.static_range(1, SIZE):
        begin += count
        total += tl.load(parts_ptr + begin + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total, mask=inside)


# ---------------------------------------------------------------- norms and activations: a program has a whole row


@triton.jit
def rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, sum_ptr, out_ptr, x_stride, added_stride, weight_rows, width, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out[r] = weight[r % weight_rows] * x[r] / root of (mean of squares + eps), in float32. Grid (rows,).

    `ADD`: x is x + added, rounded to its dtype and stored to sum [rows, width] as well. `WIDE`: the weight is float32
    and multiplies before the rounding; else after it, in the dtype of x.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0)
    if ADD:
        added = tl.load(added_ptr + row * added_stride + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + at, x, mask=mask)
    y = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(y * y, 0) / width + eps)
    weight = tl.load(weight_ptr + (row % weight_rows) * width + at, mask=mask, other=0.0)
    if WIDE:
        out = (y * scale * weight).to(x.dtype)
    else:
        out = ((y * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * width + at, out, mask=mask)


@triton.jit
def square_sum_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr):
    """out[r] = the sum of the squares of x[r], in float32. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x, 0))


@triton.jit
def silu_product_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """out[r, i] = silu(gate[r, i]), rounded, times up[r, i]; gate and up lie side by side. Grid (rows, columns)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    tl.store(out_ptr + row * width + at, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)
