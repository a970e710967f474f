"""Triton kernels over paged keys and values, with one order of reduction for everything.

The kernels guarantee that a query's result depends on its own sequence alone: not on the other sequences of the batch,
where a chunk of its prompt ended, how large a page is, or whether it was computed as the last of 512 queries or alone.
So the order in which a query reads its keys depends on absolute positions and on nothing else:

    positions   0        64       128      192      256      320  ...
    blocks      |--------|--------|--------|--------|--------|---      `BLOCK_N` keys, one online-softmax update each
    splits      |-----------------------------------|------------      `SPLIT` keys, each begun afresh
    segments    |------------------------------------------------      `SEGMENT` keys, some splits

A *split* starts from nothing; finished splits of a *segment* are merged from first to last, and segments in the order
that `merge_kernels` says. *Extend* has a program for each segment of a tile of queries, a loop over blocks that merges
where a split ends: so a few queries behind a long context keep a device busy too. *Decode* gives each split its own
program, because one query a sequence would leave the device idle, and small kernels merge them: the same splits, the
same merge, the same order. Keys after a query's own position are masked to weight zero, and a split that is masked as a
whole merges as an exact no-op, so it does not matter how far a program runs past a query.

A tile is `ROWS` rows by `BLOCK_D` columns: `ROWS / GROUP` queries, times the `GROUP` query heads that share one
key head (padded to a power of two). Both kernels use the same tile shape, although decode then fills few of its rows:
the instruction that multiplies a tile is chosen by its shape, and another instruction may add in another order.
Decode waits for memory, so the idle rows cost little.

A *window* hides positions before it as the causal mask hides those after a query; blocks, splits and segments that a
tile's first query can't see are left out, which is as exact: what is masked as a whole changes nothing.
A *sink*, a score without a value, is merged last, like a split of one key whose value is zero. Soft-capping is by
element.

Masks: rows past a sequence's queries have position -1 and see nothing; columns past `HEAD_DIM` (a head of 48 in a
tile of 64) and keys past the sequence's length or before the tile's window load as zero. Nothing past a length is ever
used, so the bytes of the null page or of a page's tail, NaN included, don't matter.

Triton's interpreter multiplies bfloat16 wrongly; there (`UPCAST`) operands are cast to float32 first, which is exact.
float32 operands are multiplied as such, never as TF32.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from twinpool.engine.attention.triton_backend.merge_kernels import (
    first_seen,
    merge_partials,
    partial_weights,
    with_sink,
)


@triton.jit
def _capped(scores, cap_log2):
    """`scores` squeezed to plus or minus `cap_log2` by a hyperbolic tangent."""
    turns = tl.exp2(scores / cap_log2 * 2.8853900817779268)  # exp(2x): 2 / ln 2
    return (1.0 - 2.0 / (turns + 1.0)) * cap_log2


@triton.jit
def dot_upcast(a, b, c, UPCAST: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _load_queries(
    q_ptr, q_stride_t, q_stride_h, first_query, start, tile, queries, kv_head,
    HEADS_PER_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of queries [ROWS, BLOCK_D] with each row's index in q, its head, its position (-1: none) and its mask."""
    rows = tl.arange(0, ROWS)
    query = tile * (ROWS // GROUP) + rows // GROUP
    member = rows % GROUP
    live = (query < queries) & (member < HEADS_PER_KV)
    head = kv_head * HEADS_PER_KV + member
    position = tl.where(live, start + query, -1)
    index = first_query + query
    dims = tl.arange(0, BLOCK_D)
    pointers = q_ptr + index.to(tl.int64)[:, None] * q_stride_t + head[:, None] * q_stride_h + dims[None, :]
    mask = live[:, None] & (dims[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=mask, other=0.0), index, head, position, live


@triton.jit
def _attend_block(
    q, position, m, total, acc, block, end, low, k_ptr, v_ptr, table_ptr, first_page, kv_head,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h, scale_log2, cap_log2,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Maximum [ROWS], sum [ROWS] and weighted values [ROWS, BLOCK_D] with the keys of one block merged in: positions
    from `block` on, but none of `end` or later. The table's first entry is page `first_page` of the sequence."""
    dims = tl.arange(0, BLOCK_D)
    n = block + tl.arange(0, BLOCK_N)
    live = n < end
    if WINDOW:
        live = live & (n >= low)
    page = tl.load(table_ptr + n // PAGE_TOKENS - first_page, mask=live, other=0).to(tl.int64)
    slot = n % PAGE_TOKENS
    mask = live[:, None] & (dims[None, :] < HEAD_DIM)
    k_offset = page * k_stride_p + slot * k_stride_t + kv_head * k_stride_h
    k = tl.load(k_ptr + k_offset[:, None] + dims[None, :], mask=mask, other=0.0)
    v_offset = page * v_stride_p + slot * v_stride_t + kv_head * v_stride_h
    v = tl.load(v_ptr + v_offset[:, None] + dims[None, :], mask=mask, other=0.0)
    scores = dot_upcast(q, tl.trans(k), tl.zeros([ROWS, BLOCK_N], tl.float32), UPCAST) * scale_log2
    if CAPPED:
        scores = _capped(scores, cap_log2)
    seen = live[None, :] & (n[None, :] <= position[:, None])
    if WINDOW:
        seen = seen & (n[None, :] > position[:, None] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    m_next, alpha, _ = partial_weights(m, tl.max(scores, 1))
    base = tl.where(m_next == float("-inf"), 0.0, m_next)
    p = tl.exp2(scores - base[:, None])
    if not UPCAST:
        p_v = p.to(v.dtype)
    else:
        p_v = p
    acc = dot_upcast(p_v, v, acc * alpha[:, None], UPCAST)
    return m_next, tl.fma(total, alpha, tl.sum(p, 1)), acc


@triton.jit(do_not_specialize=["segments", "first_token", "tokens"])
def extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, m_ptr, total_ptr, acc_ptr, starts_ptr, offsets_ptr, tables_ptr, firsts_ptr, sinks_ptr,
    q_stride_t, q_stride_h, k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    out_stride_t, out_stride_h, tables_stride, heads, segments, first_token, tokens, scale_log2, cap_log2,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_KV: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, SEGMENT: tl.constexpr,
    UPCAST: tl.constexpr, WINDOW: tl.constexpr, FIRSTS: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a sequence's queries, one key head, one segment. Grid (tiles * segments, sequences,
    kv_heads).

    Of the queries at [first_token, first_token + tokens) on the packed axis. Segments are counted from the first that
    the tile's first query sees. Writes parts [tokens, heads, segments]; without `PARTS`, where there is one segment,
    the result.
    """
    row, kv_head = tl.program_id(1), tl.program_id(2)
    PER_TILE: tl.constexpr = ROWS // GROUP
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    tile = tl.maximum(first_token - first, 0) // PER_TILE + tl.program_id(0) // segments
    segment = tl.program_id(0) % segments
    start = tl.load(starts_ptr + row)
    low = first_seen(start + tile * PER_TILE, WINDOW)
    begin = (low // SEGMENT + segment) * SEGMENT
    end = start + tl.minimum(queries, (tile + 1) * PER_TILE)
    if (tile * PER_TILE < queries) & (first + tile * PER_TILE < first_token + tokens) & (begin < end):
        q, index, head, position, live = _load_queries(
            q_ptr, q_stride_t, q_stride_h, first, start, tile, queries, kv_head,
            HEADS_PER_KV, GROUP, HEAD_DIM, ROWS, BLOCK_D,
        )  # fmt: skip
        first_page = tl.load(firsts_ptr + row) if FIRSTS else 0
        end = tl.minimum(end, begin + SEGMENT)
        begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
        m_all, m = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
        total_all, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        acc_all, acc = tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)
        # One loop, not one within another: loads for the next split are under way while this one is merged.
        for block in range(begin, end, BLOCK_N):
            if block % SPLIT == 0:
                m_all, old, new = partial_weights(m_all, m)
                total_all = merge_partials(total_all, old, total, new)
                acc_all = merge_partials(acc_all, old[:, None], acc, new[:, None])
                m = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            m, total, acc = _attend_block(
                q, position, m, total, acc, block, end, low,
                k_ptr, v_ptr, tables_ptr + row.to(tl.int64) * tables_stride, first_page, kv_head,
                k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h, scale_log2, cap_log2,
                PAGE_TOKENS, HEAD_DIM, ROWS, BLOCK_D, BLOCK_N, UPCAST, WINDOW, CAPPED,
            )  # fmt: skip
        m, old, new = partial_weights(m_all, m)
        total = merge_partials(total_all, old, total, new)
        acc = merge_partials(acc_all, old[:, None], acc, new[:, None])
        live = live & (index >= first_token) & (index < first_token + tokens)
        dims = tl.arange(0, BLOCK_D)
        if PARTS:
            part = ((index - first_token).to(tl.int64) * heads + head) * segments + segment
            tl.store(m_ptr + part, m, mask=live)
            tl.store(total_ptr + part, total, mask=live)
            tl.store(acc_ptr + part[:, None] * BLOCK_D + dims[None, :], acc, mask=live[:, None])
        else:
            if SINKS:
                total, acc = with_sink(m, total, acc, tl.load(sinks_ptr + head, mask=live, other=0.0))
            out = out_ptr + index.to(tl.int64)[:, None] * out_stride_t + head[:, None] * out_stride_h + dims[None, :]
            result = acc / tl.where(live, total, 1.0)[:, None]
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dims[None, :] < HEAD_DIM))


@triton.jit(do_not_specialize=["splits"])
def decode_split_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, total_ptr, acc_ptr, starts_ptr, offsets_ptr, tables_ptr, firsts_ptr,
    q_stride_t, q_stride_h, k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    tables_stride, heads, splits, scale_log2, cap_log2,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_KV: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, FIRSTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program: one split of one sequence's only query, one key head. Grid (splits, sequences, kv_heads).

    Splits are counted from the first that the query sees. Writes parts [sequences, heads, splits].
    """
    split, row, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    start = tl.load(starts_ptr + row)
    low = first_seen(start, WINDOW)
    begin = (low // SPLIT + split) * SPLIT
    end = tl.minimum(start + queries, begin + SPLIT)
    if (queries > 0) & (begin < end):
        first_page = tl.load(firsts_ptr + row) if FIRSTS else 0
        q, _, head, position, live = _load_queries(
            q_ptr, q_stride_t, q_stride_h, first, start, 0, queries, kv_head,
            HEADS_PER_KV, GROUP, HEAD_DIM, ROWS, BLOCK_D,
        )  # fmt: skip
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for block in range(tl.maximum(begin, low // BLOCK_N * BLOCK_N), end, BLOCK_N):
            m, total, acc = _attend_block(
                q, position, m, total, acc, block, end, low,
                k_ptr, v_ptr, tables_ptr + row.to(tl.int64) * tables_stride, first_page, kv_head,
                k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h, scale_log2, cap_log2,
                PAGE_TOKENS, HEAD_DIM, ROWS, BLOCK_D, BLOCK_N, UPCAST, WINDOW, CAPPED,
            )  # fmt: skip
        part = (row.to(tl.int64) * heads + head) * splits + split
        dims = tl.arange(0, BLOCK_D)
        tl.store(m_ptr + part, m, mask=live)
        tl.store(total_ptr + part, total, mask=live)
        tl.store(acc_ptr + part[:, None] * BLOCK_D + dims[None, :], acc, mask=live[:, None])
