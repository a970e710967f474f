"""Triton kernels over paged keys and values, with one order of reduction for everything.

The kernels guarantee that a query's result depends on its own sequence alone: not on the other sequences of the batch,
where a chunk of its prompt ended, how large a page is, or whether it was computed as the last of 512 queries or alone.
So the order in which a query reads its keys depends on absolute positions and on nothing else:

    positions   0        64       128      192      256      320  ...
    blocks      |--------|--------|--------|--------|--------|---      `BLOCK_N` keys, one online-softmax update each
    splits      |-----------------------------------|------------      `SPLIT` keys, each begun afresh

A *split* starts from nothing (`_attend_split`); finished splits are merged from first to last (`partial_weights`).
*Extend* does both in one program, a loop over splits around a loop over blocks. *Decode* gives each split its own
program, because one query a sequence would leave the device idle, and a second small kernel merges them: the same
splits, the same merge, the same order. Keys after a query's own position are masked to weight zero, and a split that
is masked as a whole merges as an exact no-op, so it does not matter how far a program runs past a query.

A tile is `ROWS` rows by `BLOCK_D` columns: `ROWS / GROUP` queries, times the `GROUP` query heads that share one
key head (padded to a power of two). Both kernels use the same tile shape, although decode then fills few of its rows:
the instruction that multiplies a tile is chosen by its shape, and another instruction may add in another order.
Decode waits for memory, so the idle rows cost little.

A *window* hides positions before it as the causal mask hides those after a query; splits and blocks that a tile's
first query can't see are left out, which is as exact: a block or a split that is masked as a whole changes nothing.
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
def _sunk(m, total, acc, sink):
    """Running maximum, sum and weighted values with a sink merged in: a key of that score whose value is zero."""
    m, old, new = partial_weights(m, sink)
    return merge_partials(total, old, tl.full(total.shape, 1.0, tl.float32), new), acc * tl.expand_dims(old, 1)


@triton.jit
def _capped(scores, cap_log2):
    """`scores` squeezed to plus or minus `cap_log2` by a hyperbolic tangent."""
    turns = tl.exp2(scores / cap_log2 * 2.8853900817779268)  # exp(2x): 2 / ln 2
    return (1.0 - 2.0 / (turns + 1.0)) * cap_log2


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query at `position` sees."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return position * 0


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
def _attend_split(
    q, position, k_ptr, v_ptr, table_ptr, first_page, low, begin, end, kv_head,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h, scale_log2, cap_log2,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to positions [begin, end) from `low` on, begun afresh: maximum [ROWS], sum [ROWS], weighted values
    [ROWS, BLOCK_D]. The table's first entry is page `first_page` of the sequence."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dims = tl.arange(0, BLOCK_D)
    if WINDOW:
        begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
    for block in range(begin, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        live = n < end
        if WINDOW:
            live = live & (n >= low)
        page = tl.load(table_ptr + n // PAGE_TOKENS - first_page, mask=live, other=0).to(tl.int64)
        slot = n % PAGE_TOKENS
        mask = live[:, None] & (dims[None, :] < HEAD_DIM)
        k_offset = page * k_stride_p + slot * k_stride_t + kv_head * k_stride_h
        k = tl.load(k_ptr + k_offset[:, None] + dims[None, :], mask=mask, other=0.0)
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
        v_offset = page * v_stride_p + slot * v_stride_t + kv_head * v_stride_h
        v = tl.load(v_ptr + v_offset[:, None] + dims[None, :], mask=mask, other=0.0)
        if not UPCAST:
            p_v = p.to(v.dtype)
        else:
            p_v = p
        acc = dot_upcast(p_v, v, acc * alpha[:, None], UPCAST)
        total = total * alpha + tl.sum(p, 1)
        m = m_next
    return m, total, acc


@triton.jit
def extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, offsets_ptr, tables_ptr, firsts_ptr, sinks_ptr,
    q_stride_t, q_stride_h, k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    out_stride_t, out_stride_h, tables_stride, scale_log2, cap_log2,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_KV: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, FIRSTS: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a sequence's queries, one key head, all its keys. Grid (tiles, sequences, kv_heads)."""
    tile, row, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    PER_TILE: tl.constexpr = ROWS // GROUP
    if tile * PER_TILE < queries:
        start = tl.load(starts_ptr + row)
        q, index, head, position, live = _load_queries(
            q_ptr, q_stride_t, q_stride_h, first, start, tile, queries, kv_head,
            HEADS_PER_KV, GROUP, HEAD_DIM, ROWS, BLOCK_D,
        )  # fmt: skip
        low = _first_seen(start + tile * PER_TILE, WINDOW)
        first_page = tl.load(firsts_ptr + row) if FIRSTS else 0
        end = start + tl.minimum(queries, (tile + 1) * PER_TILE)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for begin in range(low // SPLIT * SPLIT, end, SPLIT):
            m_split, total_split, acc_split = _attend_split(
                q, position, k_ptr, v_ptr, tables_ptr + row.to(tl.int64) * tables_stride, first_page,
                low, begin, tl.minimum(begin + SPLIT, end), kv_head,
                k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h, scale_log2, cap_log2,
                PAGE_TOKENS, HEAD_DIM, ROWS, BLOCK_D, BLOCK_N, UPCAST, WINDOW, CAPPED,
            )  # fmt: skip
            m, old, new = partial_weights(m, m_split)
            total = merge_partials(total, old, total_split, new)
            acc = merge_partials(acc, old[:, None], acc_split, new[:, None])
        if SINKS:
            total, acc = _sunk(m, total, acc, tl.load(sinks_ptr + head, mask=live, other=0.0) * 1.4426950408889634)
        dims = tl.arange(0, BLOCK_D)
        pointers = out_ptr + index.to(tl.int64)[:, None] * out_stride_t + head[:, None] * out_stride_h + dims[None, :]
        result = acc / tl.where(live, total, 1.0)[:, None]
        tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dims[None, :] < HEAD_DIM))


@triton.jit
def decode_split_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, total_ptr, acc_ptr, starts_ptr, offsets_ptr, tables_ptr, firsts_ptr,
    q_stride_t, q_stride_h, k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    tables_stride, heads, splits, scale_log2, cap_log2,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_KV: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    WINDOW: tl.constexpr, FIRSTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program: one split of one sequence's only query, one key head. Grid (splits, sequences, kv_heads).

    Splits are counted from the first that the window reaches. Writes the split's part to m and total
    [sequences, heads, splits] and acc [sequences, heads, splits, BLOCK_D].
    """
    split, row, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    start = tl.load(starts_ptr + row)
    end = start + queries
    low = _first_seen(start, WINDOW)
    begin = (low // SPLIT + split) * SPLIT
    if (queries > 0) & (begin < end):
        first_page = tl.load(firsts_ptr + row) if FIRSTS else 0
        q, _, head, position, live = _load_queries(
            q_ptr, q_stride_t, q_stride_h, first, start, 0, queries, kv_head,
            HEADS_PER_KV, GROUP, HEAD_DIM, ROWS, BLOCK_D,
        )  # fmt: skip
        m, total, acc = _attend_split(
            q, position, k_ptr, v_ptr, tables_ptr + row.to(tl.int64) * tables_stride, first_page,
            low, begin, tl.minimum(begin + SPLIT, end), kv_head,
            k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h, scale_log2, cap_log2,
            PAGE_TOKENS, HEAD_DIM, ROWS, BLOCK_D, BLOCK_N, UPCAST, WINDOW, CAPPED,
        )  # fmt: skip
        part = (row.to(tl.int64) * heads + head) * splits + split
        dims = tl.arange(0, BLOCK_D)
        tl.store(m_ptr + part, m, mask=live)
        tl.store(total_ptr + part, total, mask=live)
        tl.store(acc_ptr + part[:, None] * BLOCK_D + dims[None, :], acc, mask=live[:, None])


@triton.jit
def decode_merge_kernel(
    m_ptr, total_ptr, acc_ptr, out_ptr, starts_ptr, offsets_ptr, sinks_ptr,
    out_stride_t, out_stride_h, heads, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge one query's splits, first to last. Grid (sequences, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    if queries > 0:
        start = tl.load(starts_ptr + row)
        dims = tl.arange(0, BLOCK_D)
        part = (row.to(tl.int64) * heads + head) * splits
        m = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        for _ in range(_first_seen(start, WINDOW) // SPLIT * SPLIT, start + queries, SPLIT):
            lone = part + tl.arange(0, 1)
            m, old, new = partial_weights(m, tl.load(m_ptr + lone))
            total = merge_partials(total, old, tl.load(total_ptr + lone), new)
            acc = merge_partials(acc, old[:, None], tl.load(acc_ptr + part * BLOCK_D + dims[None, :]), new[:, None])
            part += 1
        if SINKS:
            total, acc = _sunk(m, total, acc, tl.load(sinks_ptr + head + tl.arange(0, 1)) * 1.4426950408889634)
        pointers = out_ptr + first.to(tl.int64) * out_stride_t + head * out_stride_h + dims[None, :]
        tl.store(pointers, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=dims[None, :] < HEAD_DIM)


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
