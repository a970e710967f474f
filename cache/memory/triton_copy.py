"""Copies of pages on a GPU: gather and scatter between regions that it can reach, pinned host memory included.

A block of a move is `rows` equal runs of bytes a page (see `cache.memory.copy_plan`). One launch copies all rows of all
pages: a program copies one piece of one row of one page, as words of up to eight bytes, loaded and stored as vectors
where the strides allow. It reads the page's number on both sides from index tensors on the device, so a launch doesn't
depend on the values and the host waits for nothing. Pinned host memory is read and written in place, over the bus:
there is no staging buffer. `cache.memory.block_copy.copy_indexed` is the same by plain torch, and the reference in
tests.

The caller keeps the regions alive until the device is done with them. The index tensors are made on the stream that
reads them, so the caching allocator gives their memory to nothing that runs before the copy.
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
