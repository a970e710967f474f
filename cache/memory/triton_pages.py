"""Kernels over pages on a GPU: copies between regions, and sums of words for digests.

`copy_rows` gathers and scatters between regions that the GPU can reach, pinned host memory included. A block of a move
is `rows` equal runs of bytes a page (see `cache.memory.page_moves`). One launch copies all rows of all pages: a program
copies one piece of one row of one page, as words of up to eight bytes, loaded and stored as vectors where the strides
allow. It reads the page's number on both sides from index tensors on the device, so a launch doesn't depend on the
values and the host waits for nothing. Pinned host memory is read and written in place, over the bus: there is no
staging buffer. `cache.memory.page_moves.copy_indexed` is the same by plain torch, and the reference in tests.

The caller keeps the regions alive until the device is done with them. The index tensors are made on the stream that
reads them, so the caching allocator gives their memory to nothing that runs before the copy.

`add_sums` is one launch for all pages and all buffers of a stack. A program sums some words of some layers of one token
(or entry) and adds that to the token's sum. Additions modulo 2^64 come out the same in any order, so atomic ones are
exact. `cache.memory.page_digest.sum_by_numpy` is the same on a CPU, and the reference in tests.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from twinpool.cache.memory.page_moves import index_tensor

_PIECE_WORDS = 1024


@triton.jit
def copy_rows_kernel(
    source_ptr, target_ptr, sources_ptr, targets_ptr,
    source_stride_r, source_stride_i, source_stride_p, target_stride_r, target_stride_i, target_stride_p,
    inner, words, PIECE: tl.constexpr,
):  # fmt: skip
    """Copy `PIECE` words of one inner row of one page. Grid (pages, rows * inner, pieces); strides are in words."""
    page, piece = tl.program_id(0), tl.program_id(2)
    row, i = (tl.program_id(1) // inner).to(tl.int64), tl.program_id(1) % inner
    source = tl.load(sources_ptr + page).to(tl.int64)
    target = tl.load(targets_ptr + page).to(tl.int64)
    columns = piece * PIECE + tl.arange(0, PIECE)
    mask = columns < words
    from_ptr = source_ptr + row * source_stride_r + i * source_stride_i + source * source_stride_p
    to_ptr = target_ptr + row * target_stride_r + i * target_stride_i + target * target_stride_p
    tl.store(to_ptr + columns, tl.load(from_ptr + columns, mask=mask), mask=mask)


def reachable(tensor: torch.Tensor) -> bool:
    """Whether a kernel can read and write the tensor where it is: on a GPU, or in pinned host memory."""
    return tensor.is_cuda or tensor.is_pinned()


def copy_rows(from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]) -> None:
    """Copy pages `sources` to pages `targets`, all rows, between stacks of integers [rows, pages, words]; or between
    stacks [rows, inner, pages, words], whose rows of a page are `inner` runs at even distances.

    Both must be `reachable`, at least one of them on the GPU. The copy is queued on the current stream.
    """
    if from_rpw.dim() == 3:
        from_rpw, to_rpw = from_rpw[:, None], to_rpw[:, None]
    rows, inner, _, words = from_rpw.shape
    if not len(sources):
        return
    device = from_rpw.device if from_rpw.is_cuda else to_rpw.device
    piece = min(_PIECE_WORDS, triton.next_power_of_2(words))
    grid = (len(sources), rows * inner, triton.cdiv(words, piece))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        copy_rows_kernel[grid](
            from_rpw, to_rpw, index_tensor(sources, device), index_tensor(targets, device),
            *from_rpw.stride()[:3], *to_rpw.stride()[:3], inner, words, PIECE=piece,
        )  # fmt: skip


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
