"""The Triton kernel that draws a token without sorting logits.

Top-k and top-p each keep the values at or above a bound: the k-th largest, and the smallest that the nucleus needs.
Both are the largest bound for which the count (or the weight) of values at or above it is still enough, so they are
searched for like digits of a number: floats are ordered as integers (`_ordered`), and each round tries 16 bounds at
once and fixes four bits, eight rounds for all 32. A row is read 20 times at most, and it stays in the device's
cache. It is read in blocks of fixed size from its begin, so a row's result is the same in any batch. Ties at a bound
are kept, as in `engine.runner.sampling.sampler`.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


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
