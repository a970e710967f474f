"""Sums over ranks on an NVIDIA GPU: the Triton kernel that adds up the parts of a sum that every rank has, and its
grid."""

# The compiler reads `rank_sum_kernel`, Python does not run it: it has no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def add_ranks(parts: Tensor) -> Tensor:
    """Add every rank's part in the order of the ranks, in float32, rounded once: [ranks, ...] gives [...] in the dtype
    of the parts, which lie one after the other."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    if out.numel():
        rank_sum_kernel[(triton.cdiv(out.numel(), _BLOCK),)](parts, out, out.numel(), SIZE=parts.shape[0], BLOCK=_BLOCK)
    return out


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
