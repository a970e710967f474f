"""Triton kernels by row: what stands between two products of attention, and the draw of a token.

Both read a row in blocks of fixed size from its begin, so a row's result is the same in any batch.

`store_heads_kernel` takes the product of queries, keys and values and does in one pass what would be seven: norms by
head, rope, and the store into pages. It rounds where the operations that it replaces would round.

`draw_kernel` draws from logits without sorting them. What top-k and top-p keep is a bound on the value: the k-th
largest, and the smallest that the nucleus needs. Both are the largest bound for which a count (or a weight) of what
lies at or above it is still enough, so they are searched for like digits of a number: floats are ordered as integers
(`_ordered`), and each round tries 15 bounds at once and fixes four bits, eight rounds for all 32. A whole row is read
18 times at most, and it stays in the device's cache. Ties at a bound are kept, as in `engine.sampling`.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

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
    PAGE_TOKENS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, MUTED: tl.constexpr,
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
        partner = tl.where(d < HEAD_DIM // 2, d + HEAD_DIM // 2, d - HEAD_DIM // 2)
        other = tl.load(row_ptr + partner, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
            x = _normed(x, norm_ptr, head * HEAD_DIM + d, mask, scale)
            other = _normed(other, norm_ptr, head * HEAD_DIM + partner, mask, scale)
        if ROPE:
            cos = tl.load(cos_ptr + token * cos_stride + d, mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + token * sin_stride + d, mask=mask, other=0.0).to(tl.float32)
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


@triton.jit
def _ordered(x):
    """float32 as int32 of the same order; minus zero counts as zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _bound(digits):
    """32 bits, as found digit by digit in an int64, as a bound on what `_ordered` gives."""
    return (digits - 0x80000000).to(tl.int32)


@triton.jit
def _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK: tl.constexpr):
    """Ids, keys and weights exp((x - top) / T) in float64 of one block; 0 behind the end, for minus infinity and below
    `least`, which is min-p: the largest weight is 1.

    The difference is divided, not its terms: with the smallest temperatures those would be infinite.
    """
    at = block + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
    weight = tl.exp((x.to(tl.float64) - top.to(tl.float64)) / temperature)
    return at, _ordered(x), tl.where((x > float("-inf")) & (weight >= least), weight, 0.0)


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, out_ptr, stride, vocab,
    BLOCK: tl.constexpr, LIMITS: tl.constexpr,
):  # fmt: skip
    """Draw one token of each row of logits [n, vocab] float32. Grid (n,).

    Per row: temperature float64 above 0, top_k int64 (the vocabulary's size: all), top_p, min_p and the draw in [0, 1)
    float64. `LIMITS`: some row has a top_k or top_p that cuts. Writes out [n] int64: -1 for a row with a NaN or plus
    infinity, or with nothing finite, which is no distribution.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    digit = tl.arange(0, 16).to(tl.int64)

    least = tl.load(min_p_ptr + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    damaged = tl.zeros([BLOCK], tl.int32)
    for block in range(0, vocab, BLOCK):
        at = block + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        # A maximum may lose a NaN on the way: it is looked for by itself.
        damaged += ((x != x) | (x == float("inf"))).to(tl.int32)  # noqa: PLR0124 (NaN)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    sound = (tl.sum(damaged, 0) == 0) & (top > float("-inf"))

    floor = tl.zeros([1], tl.int64)
    if LIMITS:
        # The largest bound that top_k tokens or more reach: that of the k-th.
        top_k = tl.load(top_k_ptr + row)
        for level in range(8):
            bounds = _bound(floor + (digit << (28 - 4 * level)))
            reached = tl.zeros([16], tl.int32)
            for block in range(0, vocab, BLOCK):
                at = block + tl.arange(0, BLOCK)
                key = _ordered(tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")))
                above = (key[:, None] >= bounds[None, :]) & (at < vocab)[:, None]
                reached += tl.sum(above.to(tl.int32), 0)
            floor += (tl.sum((reached >= top_k).to(tl.int64), 0) - 1) << (28 - 4 * level)

        # The nucleus is cut among what top-k left: the largest bound whose weight, ties included, is still enough.
        kept = _bound(floor)
        total = tl.zeros([1], tl.float64)
        for block in range(0, vocab, BLOCK):
            at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
            total += tl.sum(tl.where(key >= kept, weight, 0.0), 0)
        top_p = tl.load(top_p_ptr + row)
        needed = tl.where(top_p < 1.0, total * top_p, 0.0)
        nucleus = tl.zeros([1], tl.int64)
        for level in range(8):
            bounds = _bound(nucleus + (digit << (28 - 4 * level)))
            reached = tl.zeros([16], tl.float64)
            for block in range(0, vocab, BLOCK):
                at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
                weight = tl.where(key >= kept, weight, 0.0)
                reached += tl.sum(tl.where(key[:, None] >= bounds[None, :], weight[:, None], 0.0), 0)
            enough = tl.maximum(tl.sum((reached >= needed).to(tl.int64), 0), 1)
            nucleus += (enough - 1) << (28 - 4 * level)
        floor = tl.where(top_p < 1.0, tl.maximum(floor, nucleus), floor)

    bound = _bound(floor)
    total = tl.zeros([1], tl.float64)
    for block in range(0, vocab, BLOCK):
        at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
        total += tl.sum(tl.where(key >= bound, weight, 0.0), 0)
    target = total * tl.load(uniform_ptr + row)

    # The first id whose cumulative weight exceeds the target, else (the sum rounds) the last that has any.
    drawn = tl.full([1], 0, tl.int64) + vocab
    last = tl.zeros([1], tl.int64)
    before = tl.zeros([1], tl.float64)
    for block in range(0, vocab, BLOCK):
        at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
        weight = tl.where(key >= bound, weight, 0.0)
        reached = before + tl.cumsum(weight, 0)
        ids = at.to(tl.int64)
        drawn = tl.minimum(drawn, tl.min(tl.where((reached > target) & (weight > 0.0), ids, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, ids, 0), 0))
        before += tl.sum(weight, 0)
    tl.store(out_ptr + row + tl.arange(0, 1), tl.where(sound, tl.minimum(drawn, last), -1))
