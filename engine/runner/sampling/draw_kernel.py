"""The Triton kernels that draw a token without sorting logits.

Top-k and top-p each keep the values at or above a bound: the k-th largest, and the smallest that the nucleus needs.
Both are the largest bound for which the count (or the weight) of values at or above it is still enough, so they are
searched for like digits of a number: floats are ordered as integers (`_ordered`), and each launch tries 16 bounds at
once and fixes four bits, eight launches for all 32. A row is cut into parts of fixed size from its begin, one program
each; a program writes what its part holds above each bound, and the programs of the next launch sum these, each for
itself and in the order of parts. So a row's result is the same in any batch. Ties at a bound are kept, as in
`engine.runner.sampling.sampler`.
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
def tops_kernel(logits_ptr, tops_ptr, stride, vocab, parts, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The largest logit of each part: writes tops [n, parts] float32. Grid (n, parts).

    Plus infinity stands for a part with a NaN or plus infinity. A part has PART logits, read BLOCK at a time.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(part * PART, min(part * PART + PART, vocab), BLOCK):
        at = block + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        # A maximum may lose a NaN on the way.
        best = tl.maximum(best, tl.where(x != x, float("inf"), x))  # noqa: PLR0124 (NaN)
    tl.store(tops_ptr + row * parts + part, tl.max(best, 0))


@triton.jit
def _top(tops_ptr, row, parts, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    return tl.max(tl.load(tops_ptr + row * parts + at, mask=at < parts, other=float("-inf")), 0)


@triton.jit
def _reached(sums_ptr, row, level, parts, PARTS: tl.constexpr):
    """What the row holds at or above each of the 16 bounds of a level, [16] float64."""
    at, digit = tl.arange(0, PARTS), tl.arange(0, 16)
    places = ((row * 8 + level) * parts + at)[:, None] * 16 + digit[None, :]
    return tl.sum(tl.load(sums_ptr + places, mask=(at < parts)[:, None], other=0.0), 0)


@triton.jit
def _floor(sums_ptr, floors_ptr, row, level, needed, parts, PARTS: tl.constexpr):
    """The digits fixed by the levels before `level`, int64: the stored ones, and one more by the last level's sums."""
    last = tl.maximum(level - 1, 0)
    reached = _reached(sums_ptr, row, last, parts, PARTS)
    enough = tl.maximum(tl.sum((reached >= needed).to(tl.int64), 0), 1)
    floor = tl.load(floors_ptr + row * 8 + last) + ((enough - 1) << (28 - 4 * last))
    return tl.where(level > 0, floor, 0)


@triton.jit
def _needed(sums_ptr, top_p, row, parts, PARTS: tl.constexpr):
    """The weight that the nucleus needs. The lowest bound of the first level keeps everything: the whole weight."""
    reached = _reached(sums_ptr, row, 0, parts, PARTS)
    return tl.sum(tl.where(tl.arange(0, 16) == 0, reached, 0.0), 0) * top_p


@triton.jit(do_not_specialize=["level"])
def count_kernel(
    logits_ptr, top_k_ptr, counts_ptr, floors_ptr, level, stride, vocab, parts,
    BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Count each part's logits at or above the 16 bounds of `level`. Grid (n, parts).

    Writes counts [n, 8, parts, 16] float64 at `level`, and the digits before it to floors [n, 8] int64.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    digit = tl.arange(0, 16).to(tl.int64)
    floor = _floor(counts_ptr, floors_ptr, row, level, tl.load(top_k_ptr + row), parts, PARTS)
    tl.store(floors_ptr + row * 8 + level, floor, mask=part == 0)
    bounds = _bound(floor + (digit << (28 - 4 * level)))
    reached = tl.zeros([16], tl.int32)
    for block in range(part * PART, min(part * PART + PART, vocab), BLOCK):
        at = block + tl.arange(0, BLOCK)
        key = _ordered(tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")))
        above = (key[:, None] >= bounds[None, :]) & (at < vocab)[:, None]
        reached += tl.sum(above.to(tl.int32), 0)
    tl.store(counts_ptr + ((row * 8 + level) * parts + part) * 16 + tl.arange(0, 16), reached.to(tl.float64))


@triton.jit
def _kept(counts_ptr, count_floors_ptr, top_k_ptr, row, parts, PARTS: tl.constexpr, TOP_K: tl.constexpr):
    """The digits of the bound that top-k keeps, int64: the largest that top_k logits or more reach."""
    floor = tl.zeros([], tl.int64)
    if TOP_K:
        floor = _floor(counts_ptr, count_floors_ptr, row, 8, tl.load(top_k_ptr + row), parts, PARTS)
    return floor


@triton.jit(do_not_specialize=["level"])
def weigh_kernel(
    logits_ptr, tops_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, counts_ptr, count_floors_ptr,
    sums_ptr, floors_ptr, level, stride, vocab, parts,
    BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Sum each part's weights at or above the 16 bounds of `level`, among what top-k left. Grid (n, parts).

    Writes sums [n, 8, parts, 16] float64 at `level`, and the digits before it to floors [n, 8] int64.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    digit = tl.arange(0, 16).to(tl.int64)
    top, temperature = _top(tops_ptr, row, parts, PARTS), tl.load(temperature_ptr + row)
    least = tl.load(min_p_ptr + row)
    kept = _bound(_kept(counts_ptr, count_floors_ptr, top_k_ptr, row, parts, PARTS, TOP_K))
    needed = _needed(sums_ptr, tl.load(top_p_ptr + row), row, parts, PARTS)
    floor = _floor(sums_ptr, floors_ptr, row, level, needed, parts, PARTS)
    tl.store(floors_ptr + row * 8 + level, floor, mask=part == 0)
    bounds = _bound(floor + (digit << (28 - 4 * level)))
    reached = tl.zeros([16], tl.float64)
    for block in range(part * PART, min(part * PART + PART, vocab), BLOCK):
        _at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
        weight = tl.where(key >= kept, weight, 0.0)
        reached += tl.sum(tl.where(key[:, None] >= bounds[None, :], weight[:, None], 0.0), 0)
    tl.store(sums_ptr + ((row * 8 + level) * parts + part) * 16 + tl.arange(0, 16), reached)


@triton.jit
def part_kernel(
    logits_ptr, tops_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, counts_ptr, count_floors_ptr,
    sums_ptr, floors_ptr, totals_ptr, bounds_ptr, stride, vocab, parts,
    BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Sum what each part keeps after both cuts: totals [n, parts] float64. Grid (n, parts).

    Writes the bound of the row, as `_ordered` gives it, to bounds [n] int32.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    top, temperature = _top(tops_ptr, row, parts, PARTS), tl.load(temperature_ptr + row)
    least = tl.load(min_p_ptr + row)
    floor = _kept(counts_ptr, count_floors_ptr, top_k_ptr, row, parts, PARTS, TOP_K)
    if TOP_P:
        top_p = tl.load(top_p_ptr + row)
        needed = _needed(sums_ptr, top_p, row, parts, PARTS)
        nucleus = _floor(sums_ptr, floors_ptr, row, 8, needed, parts, PARTS)
        floor = tl.where(top_p < 1.0, tl.maximum(floor, nucleus), floor)
    bound = _bound(floor)
    tl.store(bounds_ptr + row, bound, mask=part == 0)
    total = tl.zeros([BLOCK], tl.float64)
    for block in range(part * PART, min(part * PART + PART, vocab), BLOCK):
        _at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
        total += tl.where(key >= bound, weight, 0.0)
    tl.store(totals_ptr + row * parts + part, tl.sum(total, 0))


@triton.jit
def draw_kernel(
    logits_ptr, tops_ptr, temperature_ptr, min_p_ptr, uniform_ptr, totals_ptr, bounds_ptr, out_ptr,
    stride, vocab, parts,
    BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Draw one token of each row of logits [n, vocab] float32: first its part, then the token in it. Grid (n,).

    Writes out [n] int64: -1 for a row with a NaN or plus infinity, or with nothing finite, which is no distribution.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    top, temperature = _top(tops_ptr, row, parts, PARTS), tl.load(temperature_ptr + row)
    least, bound = tl.load(min_p_ptr + row), tl.load(bounds_ptr + row)
    at_part = tl.arange(0, PARTS)
    totals = tl.load(totals_ptr + row * parts + at_part, mask=at_part < parts, other=0.0)
    target = tl.sum(totals, 0) * tl.load(uniform_ptr + row)

    # The first whose cumulative weight exceeds the target, else (sums round) the last that has any: a part, then an id.
    beyond = (tl.cumsum(totals, 0) > target) & (totals > 0.0)
    part = tl.min(tl.where(beyond, at_part, PARTS), 0)
    part = tl.minimum(part, tl.max(tl.where(totals > 0.0, at_part, 0), 0))
    before = tl.sum(tl.where(at_part < part, totals, 0.0), 0)
    drawn, last = vocab, 0
    for block in range(part * PART, min(part * PART + PART, vocab), BLOCK):
        at, key, weight = _weights_of(row_ptr, block, vocab, top, temperature, least, BLOCK)
        weight = tl.where(key >= bound, weight, 0.0)
        reached = before + tl.cumsum(weight, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((reached > target) & (weight > 0.0), at, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
        before += tl.sum(weight, 0)
    sound = (top > float("-inf")) & (top < float("inf"))
    tl.store(out_ptr + row, tl.where(sound, tl.minimum(drawn, last), -1).to(tl.int64))
