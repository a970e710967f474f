"""Drawing of tokens on an NVIDIA GPU: shapes and grid of the kernel in `draw_kernel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.memory.pinned_memory import to_device
from contracts.sampling_params import SamplingParams
from engine.runner.sampling import draw_kernel

_VOCAB_BLOCK = 1024


def sample(
    logits_nv: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], block: int = _VOCAB_BLOCK
) -> Tensor:
    """Draw one token a row by temperature, the cuts and the inverse of the cumulative distribution.

    logits_nv: [n, vocab] float32. Returns [n] int64, -1 for a row that is no distribution. The computation of
    `engine.runner.sampling.sampler` in torch, but without a sort and without waiting for the device.
    """
    logits_nv = logits_nv.contiguous()
    rows, vocab = logits_nv.shape
    device = logits_nv.device
    drawn_n = torch.empty(rows, dtype=torch.int64, device=device)
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    numbers = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params], [*uniforms]]
    temperature_n, top_p_n, min_p_n, uniform_n = to_device(numbers, device, torch.float64)
    draw_kernel.draw_kernel[(rows,)](
        logits_nv, temperature_n, to_device(ks, device), top_p_n, min_p_n, uniform_n, drawn_n,
        logits_nv.stride(0), vocab,
        BLOCK=block, LIMITS=min(ks) < vocab or any(p.top_p < 1.0 for p in params),
        num_warps=8,
    )  # fmt: skip
    return drawn_n
