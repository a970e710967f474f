"""The Triton kernel that adds up the parts of a sum that every rank has."""

# The compiler reads this function, Python does not run it: it has no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


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
