"""Drawing of tokens on an NVIDIA GPU: shapes and grids of the kernels in `draw_kernel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from twinpool.cache.device.device_copies import to_device
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.sampling import draw_kernel

_VOCAB_BLOCK = 1024
_PART_BLOCKS = 2  # of a row that one program reads
_LEVELS = 8  # of four bits each, in a search for a bound


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
    top_k_n = to_device(ks, device)
    by_count, by_weight = min(ks) < vocab, any(p.top_p < 1.0 for p in params)

    part = _PART_BLOCKS * block
    parts = triton.cdiv(vocab, part)
    tops_np = torch.empty(rows, parts, dtype=torch.float32, device=device)
    # What a first level reads of the one before it is written by nobody and not used.
    counts, sums = torch.empty(2, rows, _LEVELS, parts, 16, dtype=torch.float64, device=device)
    count_floors, floors = torch.empty(2, rows, _LEVELS, dtype=torch.int64, device=device)
    totals_np = torch.empty(rows, parts, dtype=torch.float64, device=device)
    bounds_n = torch.empty(rows, dtype=torch.int32, device=device)
    shape = {"BLOCK": block, "PART": part, "num_warps": 8}
    row, sizes = logits_nv.stride(0), {**shape, "PARTS": triton.next_power_of_2(parts)}
    grid = (rows, parts)

    draw_kernel.tops_kernel[grid](logits_nv, tops_np, row, vocab, parts, **shape)
    if by_count:
        for level in range(_LEVELS):
            draw_kernel.count_kernel[grid](
                logits_nv, top_k_n, counts, count_floors, level, row, vocab, parts, **sizes
            )  # fmt: skip
    cut = (logits_nv, tops_np, temperature_n, min_p_n, top_k_n, top_p_n, counts, count_floors, sums, floors)
    if by_weight:
        for level in range(_LEVELS):
            draw_kernel.weigh_kernel[grid](*cut, level, row, vocab, parts, **sizes, TOP_K=by_count)
    draw_kernel.part_kernel[grid](
        *cut, totals_np, bounds_n, row, vocab, parts, **sizes, TOP_K=by_count, TOP_P=by_weight
    )  # fmt: skip
    draw_kernel.draw_kernel[(rows,)](
        logits_nv, tops_np, temperature_n, min_p_n, uniform_n, totals_np, bounds_n, drawn_n, row, vocab, parts, **sizes
    )
    return drawn_n
