"""Triton kernels of products with weights in blocks: a tile is unpacked on its way into the product.

A tile's numbers are those of `BlockWeight.unpack` in float32, rounded to the dtype of the rows; after that the product
is `product_kernels.product_kernel`'s, in its order. So the bits are those of the same weight expanded when it is
loaded, and memory holds, and a decode step reads, what the checkpoint has.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(code):
    """Numbers of float8, by their codes (int32): a sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where((code & 128) != 0, -value, value)


@triton.jit
def _e2m1(code):
    """Numbers of a four-bit float, by their codes (int32): a sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23 | mantissa << 22).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _e8m0(code):
    """Powers of two, by their exponents plus 127 (int32)."""
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(codes_ptr, table_ptr, row, k, here, inner, code_bytes, CODE: tl.constexpr, BITS: tl.constexpr):
    """What the codes of columns k of some rows stand for, float32 [len(k), rows]; rows that are `here`."""
    bit = k * BITS
    byte = (bit // 8)[:, None]
    inside = (k < inner)[:, None] & here
    code = tl.load(codes_ptr + row * code_bytes + byte, mask=inside, other=0).to(tl.int32)
    if BITS != 8:
        if 8 % BITS != 0:  # A code may lie in two bytes.
            more = inside & (byte + 1 < code_bytes)
            code |= tl.load(codes_ptr + row * code_bytes + byte + 1, mask=more, other=0).to(tl.int32) << 8
        code = (code >> (bit % 8)[:, None]) & ((1 << BITS) - 1)
    if CODE == "e4m3":
        return _e4m3(code)
    elif CODE == "e2m1":
        return _e2m1(code)
    elif CODE == "table":
        return tl.load(table_ptr + code)
    else:
        return code.to(tl.float32)


@triton.jit
def unpacked_tile(
    codes_ptr, scales_ptr, zeros_ptr, factors_ptr, offsets_ptr, offset_factors_ptr, table_ptr,
    n, at, inner, width, code_bytes, groups, spans,
    BLOCK_K: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, FACTORS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_FACTORS: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The weight's columns at .. at + BLOCK_K of rows n, float32 [BLOCK_K, len(n)]: `BlockWeight.unpack`, transposed.

    Pointers are those of the tile's first row, from which n counts in 32 bits. codes [width, code_bytes], scales, zeros
    and offsets [width, groups], factors [width, spans]. `CODE`: whole numbers "int", "e2m1", "e4m3", or "table", by
    `table` [16]. `SCALES`: "plain", or uint8 as "e8m0", "e4m3", or "paired" with offsets. A scale is read once for all
    of a tile's columns where they are of one group.
    """
    k = at + tl.arange(0, BLOCK_K)
    row = n[None, :]
    here = (n < width)[None, :]
    w = _numbers(codes_ptr, table_ptr, row, k, here, inner, code_bytes, CODE, BITS)
    if GROUP % BLOCK_K == 0:
        group = (at // GROUP + tl.zeros([1], tl.int32))[:, None]
    else:
        group = (k // GROUP)[:, None]
    at_group = row * groups + group
    of_group = here & (group < groups)
    scale = tl.load(scales_ptr + at_group, mask=of_group, other=0)
    if ZEROS:
        w -= tl.load(zeros_ptr + at_group, mask=of_group, other=0).to(tl.float32)
    elif ZERO != 0:
        w -= ZERO
    if SCALES == "e8m0":
        w *= _e8m0(scale.to(tl.int32))
    elif SCALES == "e4m3":
        w *= _e4m3(scale.to(tl.int32))
    elif SCALES == "paired":
        w *= (scale.to(tl.int32) & 15).to(tl.float32)
    else:
        w *= scale.to(tl.float32)
    if SPAN % BLOCK_K == 0:
        span = (at // SPAN + tl.zeros([1], tl.int32))[:, None]
    else:
        span = (k // SPAN)[:, None]
    at_span = row * spans + span
    of_span = here & (span < spans)
    if FACTORS:
        w *= tl.load(factors_ptr + at_span, mask=of_span, other=0).to(tl.float32)
    if OFFSETS or SCALES == "paired":
        if SCALES == "paired":
            added = (scale.to(tl.int32) >> 4).to(tl.float32)
        else:
            added = tl.load(offsets_ptr + at_group, mask=of_group, other=0).to(tl.float32)
        if OFFSET_FACTORS:
            added *= tl.load(offset_factors_ptr + at_span, mask=of_span, other=0).to(tl.float32)
        w += added
    return w


@triton.jit
def block_product_kernel(
    x_ptr, bias_ptr, out_ptr,
    codes_ptr, scales_ptr, zeros_ptr, factors_ptr, offsets_ptr, offset_factors_ptr, table_ptr,
    rows, width, inner, code_bytes, groups, spans, x_stride_m, out_stride_p, out_stride_m,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, GROUP_M: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
    CODE: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_FACTORS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] * weight[n, k], and bias[n]. Grid (tiles, 1, parts or 1).

    x [rows, inner]; the weight [width, inner] as `unpacked_tile` has it; all else as `product_kernel` has it.
    """
    tile, part = tl.program_id(0), tl.program_id(2)
    blocks_m, blocks_n = tl.cdiv(rows, ROWS), tl.cdiv(width, BLOCK_N)
    first_m = tile // (GROUP_M * blocks_n) * GROUP_M
    within = min(blocks_m - first_m, GROUP_M)
    block_m = first_m + (tile % (GROUP_M * blocks_n)) % within
    block_n = (tile % (GROUP_M * blocks_n)) // within
    m, n = block_m * ROWS + tl.arange(0, ROWS), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_before = block_n.to(tl.int64) * BLOCK_N
    of_codes, of_groups, of_spans = rows_before * code_bytes, rows_before * groups, rows_before * spans
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_stride_m
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    first = 0 if WHOLE else part * PART
    last = inner if WHOLE else min(inner, (part + 1) * PART)
    for at in range(first, last, BLOCK_K):
        x_mask = (m < rows)[:, None]
        if not EVEN:
            x_mask &= (at + k < inner)[None, :]
        x = tl.load(x_row + (at + k)[None, :], mask=x_mask, other=0.0)
        w = unpacked_tile(
            codes_ptr + of_codes, scales_ptr + of_groups, zeros_ptr + of_groups, factors_ptr + of_spans,
            offsets_ptr + of_groups, offset_factors_ptr + of_spans, table_ptr,
            tl.arange(0, BLOCK_N), at, inner, width - block_n * BLOCK_N, code_bytes, groups, spans,
            BLOCK_K, CODE, BITS, SCALES, ZERO, ZEROS, FACTORS, OFFSETS, OFFSET_FACTORS, GROUP, SPAN,
        ).to(x.dtype)  # fmt: skip
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if (at + BLOCK_K) % PART == 0:
            total += acc
            acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    total += acc
    if BIAS and WHOLE:
        total += tl.load(bias_ptr + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + part.to(tl.int64) * out_stride_p + m.to(tl.int64)[:, None] * out_stride_m + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < width)[None, :])
