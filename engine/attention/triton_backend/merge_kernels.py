"""Triton kernels that merge parts of a softmax: what programs found that each read some of a query's keys.

A *part* is what a run of positions says of one query and head, begun afresh: the largest score, the sum of weights
relative to it, and the weighted values. Which positions belong to which part, and in which order parts are merged, is
fixed by absolute positions:

    segments    |-----------------------|-----------------------|------      `SEGMENT` positions
    splits      |-----|-----|-----|-----|-----|-----|-----|-----|---         `SPLIT` positions

The splits of a segment are merged first to last, a chain of `SEGMENT / SPLIT` at most: by `merge_splits_kernel`, a
program for each segment, or by who read them one after the other. Where a window is no longer than a segment there is
one segment of all positions: the chain is as short. Segments are merged `SEGMENTS_AT_ONCE` side by side,
each in the place that its number gives it: their maximum first, which needs no order, then the sums of all of them,
whose terms don't wait for each other. A part that is masked as a whole weighs exactly nothing, and places without a
part are zeros, so it does not matter how many there are.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

SEGMENTS_AT_ONCE = tl.constexpr(16)


@triton.jit
def partial_weights(m_old, m_new):
    """The new running maximum, and what to scale the old and the new part by."""
    m = tl.maximum(m_old, m_new)
    base = tl.where(m == float("-inf"), 0.0, m)  # all masked so far: exp2(-inf) below, never -inf - -inf
    return m, tl.exp2(m_old - base), tl.exp2(m_new - base)


@triton.jit
def merge_partials(old, old_weight, new, new_weight):
    """The weighted sum, with the fused step spelled out: left to itself the compiler may fuse either product."""
    new, new_weight = tl.broadcast(new, new_weight)
    return tl.fma(new, new_weight, old * old_weight)


@triton.jit
def with_sink(m, total, acc, sink):
    """Sum and weighted values with a sink merged in: a key of that score (natural units) whose value is zero."""
    m, old, new = partial_weights(m, sink * 1.4426950408889634)
    return merge_partials(total, old, tl.full(total.shape, 1.0, tl.float32), new), acc * tl.expand_dims(old, 1)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query at `position` sees."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return position * 0


@triton.jit(do_not_specialize=["splits", "segments"])
def merge_splits_kernel(
    m_ptr, total_ptr, acc_ptr, out_ptr, m_out_ptr, total_out_ptr, acc_out_ptr, starts_ptr, offsets_ptr, sinks_ptr,
    out_stride_t, out_stride_h, heads, splits, segments,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one segment of one query. Grid (segments, sequences, heads); at most one query a sequence.

    Reads parts [sequences, heads, splits] and writes parts [query, heads, segments]; without `PARTS`, where there is
    one segment, the result. Splits and segments are counted from the first that the query sees.
    """
    segment, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tl.load(offsets_ptr + row)
    position = tl.load(starts_ptr + row)
    low = first_seen(position, WINDOW)
    begin = (low // SEGMENT + segment) * SEGMENT
    if (tl.load(offsets_ptr + row + 1) > index) & (begin <= position):
        dims = tl.arange(0, BLOCK_D)
        lone = tl.arange(0, 1)
        part = (row.to(tl.int64) * heads + head) * splits - low // SPLIT
        m = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        last = tl.minimum(position, begin + (SEGMENT - 1)) // SPLIT
        for split in range(tl.maximum(low, begin) // SPLIT, last + 1):
            at = part + split
            m, old, new = partial_weights(m, tl.load(m_ptr + at + lone))
            total = merge_partials(total, old, tl.load(total_ptr + at + lone), new)
            acc = merge_partials(acc, old[:, None], tl.load(acc_ptr + at * BLOCK_D + dims[None, :]), new[:, None])
        if PARTS:
            at = (index.to(tl.int64) * heads + head) * segments + segment
            tl.store(m_out_ptr + at + lone, m)
            tl.store(total_out_ptr + at + lone, total)
            tl.store(acc_out_ptr + at * BLOCK_D + dims[None, :], acc)
        else:
            if SINKS:
                total, acc = with_sink(m, total, acc, tl.load(sinks_ptr + head + lone))
            pointers = out_ptr + index.to(tl.int64) * out_stride_t + head * out_stride_h + dims[None, :]
            tl.store(pointers, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=dims[None, :] < HEAD_DIM)


@triton.jit(do_not_specialize=["segments", "first_token", "tokens"])
def merge_segments_kernel(
    m_ptr, total_ptr, acc_ptr, out_ptr, starts_ptr, offsets_ptr, sinks_ptr,
    out_stride_t, out_stride_h, heads, segments, first_token, tokens,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr, PER_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge one query's segments. Grid (queries of a sequence, sequences, heads).

    Of the queries at [first_token, first_token + tokens) on the packed axis, whose parts are [tokens, heads, segments].
    Those of a tile of `PER_TILE` queries are counted from the first segment that the tile's first query sees.
    """
    row, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets_ptr + row)
    query = tl.maximum(first_token - first, 0) + tl.program_id(0)
    index = first + query
    if (index < tl.load(offsets_ptr + row + 1)) & (index < first_token + tokens):
        start = tl.load(starts_ptr + row)
        base = first_seen(start + query // PER_TILE * PER_TILE, WINDOW) // SEGMENT
        last = (start + query) // SEGMENT
        dims = tl.arange(0, BLOCK_D)
        places = tl.arange(0, SEGMENTS_AT_ONCE)
        part = ((index - first_token).to(tl.int64) * heads + head) * segments - base
        # A segment's place follows from its number, so the sums below have one order, whatever a window leaves out.
        begin = base // SEGMENTS_AT_ONCE * SEGMENTS_AT_ONCE
        most = tl.full([SEGMENTS_AT_ONCE], float("-inf"), tl.float32)
        for group in range(begin, last + 1, SEGMENTS_AT_ONCE):
            at = group + places
            here = (at >= base) & (at <= last)
            most = tl.maximum(most, tl.load(m_ptr + part + at, mask=here, other=float("-inf")))
        m = tl.max(most, 0)
        m = tl.where(m == float("-inf"), 0.0, m)
        totals = tl.zeros([SEGMENTS_AT_ONCE], tl.float32)
        sums = tl.zeros([SEGMENTS_AT_ONCE, BLOCK_D], tl.float32)
        for group in range(begin, last + 1, SEGMENTS_AT_ONCE):
            at = group + places
            here = (at >= base) & (at <= last)
            weight = tl.exp2(tl.load(m_ptr + part + at, mask=here, other=float("-inf")) - m)
            totals = tl.fma(tl.load(total_ptr + part + at, mask=here, other=0.0), weight, totals)
            acc = tl.load(acc_ptr + (part + at)[:, None] * BLOCK_D + dims[None, :], mask=here[:, None], other=0.0)
            sums = tl.fma(acc, tl.broadcast_to(weight[:, None], sums.shape), sums)
        total = tl.sum(totals, 0) + tl.zeros([1], tl.float32)
        acc = tl.sum(sums, 0)[None, :]
        if SINKS:
            sink = tl.load(sinks_ptr + head + tl.arange(0, 1))
            total, acc = with_sink(m + tl.zeros([1], tl.float32), total, acc, sink)
        pointers = out_ptr + index.to(tl.int64) * out_stride_t + head * out_stride_h + dims[None, :]
        tl.store(pointers, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=dims[None, :] < HEAD_DIM)
