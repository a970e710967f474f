"""Triton kernels of a mixture of experts: products grouped by expert, and the sum over a token's experts.

The pairs of token and expert are sorted by expert; a *block* is `ROWS` neighbouring pairs of one expert at most:

    pairs    | expert 0: 70 pairs                | 1: none | expert 2: 3 pairs     ...
    blocks   |<-- 64 -->|<- 6, rest masked ->|             |<- 3, rest masked ->|  ...

Every block is multiplied in tiles of one shape, `ROWS` by `BLOCK_N`, over the inner axis in steps of `BLOCK_K` from
its begin, whether it came from one decoded token or from a long prompt: so a row's result is one chain of additions,
whatever shares its batch. Decode fills few rows of a tile; it waits for the weights anyway.

The host doesn't know the number of blocks, and doesn't wait for it: the grid has as many programs as there can be
blocks, and programs past the last block end at once.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from twinpool.engine.gpu.block_kernels import unpacked_tile


@triton.jit
def grouped_product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, row_ptr, expert_ptr, first_ptr, count_ptr,
    x_stride, weight_stride_e, weight_stride_n, out_stride, experts, inner, width,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: one block of pairs, `BLOCK_N` columns. Grid (blocks, cdiv(width, BLOCK_N)).

    Pair s of a block reads row `row_ptr[s]` of x [*, inner] and its expert's weight [width, inner], and writes row s
    of out [pairs, width].
    """
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert < experts:
        pair = tl.load(first_ptr + block) + tl.arange(0, ROWS)
        live = tl.arange(0, ROWS) < tl.load(count_ptr + block)
        row = tl.load(row_ptr + pair, mask=live, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_row = weight_ptr + expert.to(tl.int64) * weight_stride_e + n.to(tl.int64)[None, :] * weight_stride_n
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for begin in range(0, inner, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            inside = k < inner
            x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            w = tl.load(weight_row + k[:, None], mask=inside[:, None] & (n < width)[None, :], other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias_ptr + expert.to(tl.int64) * width + n, mask=n < width, other=0.0).to(tl.float32)[
                None, :
            ]
        pointers = out_ptr + pair.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < width)[None, :])


@triton.jit
def grouped_block_kernel(
    x_ptr, bias_ptr, out_ptr, row_ptr, expert_ptr, first_ptr, count_ptr,
    codes_ptr, scales_ptr, zeros_ptr, factors_ptr, offsets_ptr, offset_factors_ptr, table_ptr,
    x_stride, out_stride, experts, inner, width, code_bytes, groups, spans,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
    CODE: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_FACTORS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """`grouped_product_kernel` with weights in blocks [experts, width, inner], as `unpacked_tile` has each."""
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert < experts:
        pair = tl.load(first_ptr + block) + tl.arange(0, ROWS)
        live = tl.arange(0, ROWS) < tl.load(count_ptr + block)
        row = tl.load(row_ptr + pair, mask=live, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        first_n = tl.program_id(1) * BLOCK_N
        rows_before = expert.to(tl.int64) * width + first_n
        of_codes, of_groups, of_spans = rows_before * code_bytes, rows_before * groups, rows_before * spans
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for begin in range(0, inner, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            inside = live[:, None] & (k < inner)[None, :]
            x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
            w = unpacked_tile(
                codes_ptr + of_codes, scales_ptr + of_groups, zeros_ptr + of_groups, factors_ptr + of_spans,
                offsets_ptr + of_groups, offset_factors_ptr + of_spans, table_ptr,
                tl.arange(0, BLOCK_N), begin, inner, width - first_n, code_bytes, groups, spans,
                BLOCK_K, CODE, BITS, SCALES, ZERO, ZEROS, FACTORS, OFFSETS, OFFSET_FACTORS, GROUP, SPAN,
            ).to(x.dtype)  # fmt: skip
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias_ptr + rows_before + tl.arange(0, BLOCK_N), mask=n < width, other=0.0).to(tl.float32)[
                None, :
            ]
        pointers = out_ptr + pair.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < width)[None, :])


@triton.jit
def weighted_sum_kernel(
    answers_ptr, place_ptr, weight_ptr, out_ptr, answers_stride, out_stride, width,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j, in order, of weight[t, j] * answers[place[t, j]], in float32; a place below 0 adds nothing.
    Grid (tokens, columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + j).to(tl.int64)
        there = mask & (place >= 0)
        answer = tl.load(answers_ptr + place * answers_stride + column, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(answer, tl.load(weight_ptr + token * TOP_K + j) + tl.zeros([BLOCK], tl.float32), total)
    tl.store(out_ptr + token * out_stride + column, total, mask=mask)
