"""Sums over ranks on an NVIDIA GPU: shapes and grid of `rank_sum_kernel`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from twinpool.engine.gpu.product_kernels import rank_sum_kernel

_BLOCK = 1024


def add_ranks(parts: Tensor) -> Tensor:
    """Add every rank's part in the order of the ranks, in float32, rounded once: [ranks, ...] gives [...] in the dtype
    of the parts, which lie one after the other."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    if out.numel():
        rank_sum_kernel[(triton.cdiv(out.numel(), _BLOCK),)](parts, out, out.numel(), SIZE=parts.shape[0], BLOCK=_BLOCK)
    return out
