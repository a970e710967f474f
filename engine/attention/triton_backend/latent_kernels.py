"""Triton kernels over latents and index keys.

Attention to latents has one key for all heads, and the key's first part is the value: a block of latents is loaded once
and multiplied twice. The order of reduction goes by position, as in `attention_kernels`: blocks within splits, and a
split is a segment of its own (`merge_kernels`), as a second sum of a whole tile would not fit into registers. So extend
and decode are one kernel, with a program for each split of a tile of queries. For sparse attention a position is its
rank among the selected ones, and the table has one slot a rank; nothing else changes, so a selection of everything
gives the very bits of attention to everything.

A tile is `ROWS` rows: `ROWS / GROUP` queries times `GROUP` heads; where there are more heads than rows, further
programs take them. The latent part of a row (512 numbers in the published models) and the rotated part (64) are two
tiles, each padded to a power of two.

A selection takes three steps. *Scores*: one program takes a block of keys and a run of queries, and for each
query multiplies all index heads by the keys at once; the sum over heads is within a program, of one shape always.
*Threshold*: the k-th highest score is found digit by digit, four bits at a time, by counting how many scores share the
digits found so far; floats are compared as integers of the same order. No sort, no atomics, hence no dependence on
scheduling. *Writing*: positions in rising order, all whose score is above the threshold, and of equal scores the first.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from twinpool.engine.attention.triton_backend.attention_kernels import dot_upcast
from twinpool.engine.attention.triton_backend.merge_kernels import partial_weights


@triton.jit
def _load_rows(
    q_ptr, q_stride_t, q_stride_h, first_query, start, tile, queries, group, heads,
    GROUP: tl.constexpr, LATENT: tl.constexpr, TURNING: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of queries, [ROWS, BLOCK_L] and [ROWS, BLOCK_R], with each row's index in q, head, position (-1: none)
    and mask."""
    rows = tl.arange(0, ROWS)
    query = tile * (ROWS // GROUP) + rows // GROUP
    head = group * GROUP + rows % GROUP
    live = (query < queries) & (head < heads)
    position = tl.where(live, start + query, -1)
    index = first_query + query
    base = q_ptr + index.to(tl.int64) * q_stride_t + head * q_stride_h
    dims, turning = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    q = tl.load(base[:, None] + dims[None, :], mask=live[:, None] & (dims[None, :] < LATENT), other=0.0)
    mask = live[:, None] & (turning[None, :] < TURNING)
    q_turning = tl.load(base[:, None] + LATENT + turning[None, :], mask=mask, other=0.0)
    return q, q_turning, index, head, position, live


@triton.jit(do_not_specialize=["splits", "first_token", "tokens"])
def latent_split_kernel(
    q_ptr, latents_ptr, out_ptr, m_ptr, total_ptr, acc_ptr, starts_ptr, offsets_ptr, tables_ptr,
    q_stride_t, q_stride_h, stride_p, stride_t, out_stride_t, out_stride_h, tables_stride, heads, splits,
    first_token, tokens, scale_log2,
    PAGE_TOKENS: tl.constexpr, LATENT: tl.constexpr, TURNING: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries, some heads, one split. Grid (tiles * splits, sequences, head groups).

    Of the queries at [first_token, first_token + tokens) on the packed axis. Writes parts [tokens, heads, splits], to
    be merged by `merge_kernels.merge_segments_kernel`; without `PARTS`, where there is one split, the result.
    """
    row, group = tl.program_id(1), tl.program_id(2)
    PER_TILE: tl.constexpr = ROWS // GROUP
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    tile = tl.maximum(first_token - first, 0) // PER_TILE + tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    start = tl.load(starts_ptr + row)
    begin = split * SPLIT
    end = start + tl.minimum(queries, (tile + 1) * PER_TILE)
    if (tile * PER_TILE < queries) & (first + tile * PER_TILE < first_token + tokens) & (begin < end):
        q, q_turning, index, head, position, live = _load_rows(
            q_ptr, q_stride_t, q_stride_h, first, start, tile, queries, group, heads,
            GROUP, LATENT, TURNING, ROWS, BLOCK_L, BLOCK_R,
        )  # fmt: skip
        end = tl.minimum(end, begin + SPLIT)
        table_ptr = tables_ptr + row.to(tl.int64) * tables_stride
        dims, turning = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_L], tl.float32)
        for block in range(begin, end, BLOCK_N):
            n = block + tl.arange(0, BLOCK_N)
            seen = n < end
            page = tl.load(table_ptr + n // PAGE_TOKENS, mask=seen, other=0).to(tl.int64)
            base = latents_ptr + page * stride_p + n % PAGE_TOKENS * stride_t
            c = tl.load(base[:, None] + dims[None, :], mask=seen[:, None] & (dims[None, :] < LATENT), other=0.0)
            mask = seen[:, None] & (turning[None, :] < TURNING)
            k = tl.load(base[:, None] + LATENT + turning[None, :], mask=mask, other=0.0)
            scores = dot_upcast(q, tl.trans(c), tl.zeros([ROWS, BLOCK_N], tl.float32), UPCAST)
            scores = dot_upcast(q_turning, tl.trans(k), scores, UPCAST) * scale_log2
            scores = tl.where(seen[None, :] & (n[None, :] <= position[:, None]), scores, float("-inf"))
            m_next, alpha, _ = partial_weights(m, tl.max(scores, 1))
            p = tl.exp2(scores - tl.where(m_next == float("-inf"), 0.0, m_next)[:, None])
            if not UPCAST:
                p_c = p.to(c.dtype)
            else:
                p_c = p
            acc = dot_upcast(p_c, c, acc * alpha[:, None], UPCAST)
            total = tl.fma(total, alpha, tl.sum(p, 1))
            m = m_next
        live = live & (index >= first_token) & (index < first_token + tokens)
        if PARTS:
            part = ((index - first_token).to(tl.int64) * heads + head) * splits + split
            tl.store(m_ptr + part, m, mask=live)
            tl.store(total_ptr + part, total, mask=live)
            tl.store(acc_ptr + part[:, None] * BLOCK_L + dims[None, :], acc, mask=live[:, None])
        else:
            out = out_ptr + index.to(tl.int64)[:, None] * out_stride_t + head[:, None] * out_stride_h + dims[None, :]
            # Plus zero, as a merge would make it: minus zero and zero are one value.
            result = (acc + 0.0) / tl.where(live, total, 1.0)[:, None]
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dims[None, :] < LATENT))


@triton.jit(do_not_specialize=["first_token", "tokens"])
def index_score_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, scores_ptr, starts_ptr, offsets_ptr, tables_ptr,
    q_stride_t, q_stride_h, weights_stride, stride_p, stride_t, scales_stride, scores_stride, tables_stride, heads,
    first_token, tokens,
    PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, QUERIES: tl.constexpr, FLOAT8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of `QUERIES` queries of a sequence for a block of positions. Grid (blocks, tiles, sequences).

    Of the queries at [first_token, first_token + tokens) on the packed axis: writes scores [tokens, width] float32 up
    to the block of each query's position; -inf behind it.
    """
    block, row = tl.program_id(0), tl.program_id(2)
    first = tl.load(offsets_ptr + row)
    queries = tl.load(offsets_ptr + row + 1) - first
    start = tl.load(starts_ptr + row)
    begin_query = tl.maximum(first_token - first, 0) + tl.program_id(1) * QUERIES
    last = tl.minimum(tl.minimum(begin_query + QUERIES, queries), first_token + tokens - first)
    begin = block * BLOCK_N
    if (begin_query < last) & (begin < start + last):
        n = begin + tl.arange(0, BLOCK_N)
        live = n < start + last
        dims, head = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
        page = tl.load(tables_ptr + row.to(tl.int64) * tables_stride + n // PAGE_TOKENS, mask=live, other=0)
        page = page.to(tl.int64)
        slot = n % PAGE_TOKENS
        pointers = keys_ptr + (page * stride_p + slot * stride_t)[:, None] + dims[None, :]
        k = tl.load(pointers, mask=live[:, None] & (dims[None, :] < DIM), other=0.0)
        k = k.to(q_ptr.dtype.element_ty)
        for query in range(begin_query, last):
            index = (first + query).to(tl.int64)
            q_mask = (head[:, None] < heads) & (dims[None, :] < DIM)
            q = tl.load(q_ptr + index * q_stride_t + head[:, None] * q_stride_h + dims[None, :], mask=q_mask, other=0.0)
            weight = tl.load(weights_ptr + index * weights_stride + head, mask=head < heads, other=0.0)
            by_head = dot_upcast(q, tl.trans(k), tl.zeros([BLOCK_H, BLOCK_N], tl.float32), UPCAST)
            if FLOAT8:
                by_head = by_head * tl.load(scales_ptr + page * scales_stride + slot, mask=live, other=0.0)[None, :]
            positive = tl.maximum(by_head, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(positive * weight[:, None], 0)
            # Plus zero: minus zero and zero are one score. What is no number is the lowest.
            number = score == score  # noqa: PLR0124
            score = tl.where((n <= start + query) & number, score + 0.0, float("-inf"))
            tl.store(scores_ptr + (index - first_token) * scores_stride + n, score)


@triton.jit
def _ordered(score):
    """A float32 as an integer of the same order, from 0 up (int64)."""
    bits = score.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64) + 2147483648


@triton.jit(do_not_specialize=["first_token", "tokens"])
def select_kernel(
    scores_ptr, positions_ptr, slots_ptr, counts_ptr, starts_ptr, offsets_ptr, tables_ptr,
    scores_stride, selected_stride, tables_stride, top_k, first_token, tokens,
    PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What one query reads: positions and slots [T, top_k] int32, by rising position. Grid (queries, sequences).

    Of the queries at [first_token, first_token + tokens) on the packed axis, whose scores are [tokens, width].
    """
    row = tl.program_id(1)
    first = tl.load(offsets_ptr + row)
    query = tl.maximum(first_token - first, 0) + tl.program_id(0)
    if (first + query < tl.load(offsets_ptr + row + 1)) & (first + query < first_token + tokens):
        seen = tl.load(starts_ptr + row) + query + 1
        index = (first + query).to(tl.int64)
        scores_ptr += (index - first_token) * scores_stride
        columns = tl.arange(0, BLOCK)
        digits = tl.arange(0, 16)
        least = tl.zeros([1], tl.int64)
        room = tl.minimum(top_k, seen)  # of those that share the digits of `least`, the highest so many are chosen
        if seen > top_k:
            for turn in range(8):
                shift = 28 - 4 * turn
                counts = tl.zeros([16], tl.int32)
                for begin in range(0, seen, BLOCK):
                    n = begin + columns
                    score = tl.load(scores_ptr + n, mask=n < seen, other=0.0)
                    key = _ordered(score)
                    among = (n < seen) & ((key >> (shift + 4)) == (least >> (shift + 4)))
                    same = among[:, None] & (((key >> shift) & 15)[:, None] == digits[None, :])
                    counts += tl.sum(same.to(tl.int32), 0)
                above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # scores with a higher digit, by digit
                fits = above < room
                digit = tl.min(tl.where(fits, digits, 16), 0)
                room -= tl.sum(tl.where(digits == digit, above, 0), 0)
                least += digit.to(tl.int64) << shift
        written = tl.zeros([1], tl.int32)
        tied = tl.zeros([1], tl.int32)
        for begin in range(0, seen, BLOCK):
            n = begin + columns
            score = tl.load(scores_ptr + n, mask=(n < seen) & (seen > top_k), other=0.0)
            key = _ordered(score)
            equal = (n < seen) & (key == least)
            rank = tied + tl.cumsum(equal.to(tl.int32), 0)
            chosen = (n < seen) & ((key > least) | (equal & (rank <= room)))
            at = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
            page = tl.load(tables_ptr + row.to(tl.int64) * tables_stride + n // PAGE_TOKENS, mask=n < seen, other=0)
            tl.store(positions_ptr + index * selected_stride + at, n, mask=chosen)
            tl.store(slots_ptr + index * selected_stride + at, page * PAGE_TOKENS + n % PAGE_TOKENS, mask=chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
            tied += tl.sum(equal.to(tl.int32), 0)
        tl.store(counts_ptr + index, tl.minimum(top_k, seen))
