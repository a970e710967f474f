"""Sums of pages' words for digests, on a GPU: one launch for all pages and all buffers of a stack.

A program sums some words of some layers of one token (or entry) and adds that to the token's sum. Additions modulo 2^64
come out the same in any order, so atomic ones are exact. Page numbers are read on the device; the host waits for
nothing. `cache.memory.page_digest.sum_by_numpy` is the same on a CPU, and the reference in tests.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from twinpool.cache.memory.copy_plan import index_tensor

_PIECE_WORDS = 1024
_LAYERS = 8
"""Layers that one program sums."""


@triton.jit
def sum_words_kernel(
    words_ptr, pages_ptr, coefficients_ptr, total_ptr,
    stride_l, stride_p, layers, words, tokens, LAYERS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """total[page, token] += sum over layers and words of word * coefficient. Grid (pages * tokens, layers, pieces).

    words [layers, all pages, tokens * words], strides in words; coefficients int64 [layers, words].
    """
    at, first = tl.program_id(0), tl.program_id(1) * LAYERS
    page, token = tl.load(pages_ptr + at // tokens).to(tl.int64), at % tokens
    columns = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    row_ptr = words_ptr + page * stride_p + token * words + columns
    sums = tl.zeros([PIECE], tl.int64)
    for layer in range(first, min(first + LAYERS, layers)):
        place = tl.full([], 0, tl.int64) + layer
        found = tl.load(row_ptr + place * stride_l, mask=columns < words, other=0).to(tl.int64)
        sums += found * tl.load(coefficients_ptr + place * words + columns, mask=columns < words, other=0)
    tl.atomic_add(total_ptr + at, tl.sum(sums, 0))


def add_sums(
    words_lpw: torch.Tensor, pages: Sequence[int], coefficients_lw: torch.Tensor, total_pt: torch.Tensor
) -> None:
    """Add to `total_pt`, int64 [pages, tokens], the sums of these pages' words times their coefficients.

    `words_lpw`: integers [layers, all pages, tokens * words], of which a page's words lie side by side; all on one GPU.
    The sums are queued on the current stream.
    """
    layers, words = coefficients_lw.shape
    assert words_lpw.stride(2) == 1, "a page's words lie side by side"
    assert total_pt.is_contiguous(), "sums lie side by side"
    piece = min(_PIECE_WORDS, triton.next_power_of_2(words))
    grid = (total_pt.numel(), triton.cdiv(layers, _LAYERS), triton.cdiv(words, piece))
    device = words_lpw.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        sum_words_kernel[grid](
            words_lpw, index_tensor(pages, device), coefficients_lw.contiguous(), total_pt,
            words_lpw.stride(0), words_lpw.stride(1), layers, words, total_pt.shape[1],
            LAYERS=_LAYERS, PIECE=piece,
        )  # fmt: skip
