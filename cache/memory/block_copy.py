"""Block copies: the blocks of a move, copied on a CPU or a GPU.

On a CPU three things cost more than the bytes: a call a page, a temporary, and the C library's memcpy of about two
KiB. Measured (see docs/benchmarks.md), best is

    runs of pages that follow each other on both sides    one strided copy by torch, on all of torch's threads
    single pages of some KiB                              numpy, page by page, straight to their places
    single pages of some hundred bytes                    numpy, all pages of a row at once, through a temporary
    some heads of each token of a page                    numpy, page by page, all layers and tokens at once

On a GPU, and between a GPU and pinned host memory, a block is one launch of a kernel that reads the indices on the
device. Memory that isn't pinned goes through a temporary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twinpool.cache.memory.copy_plan import CopyBlock, index_tensor, runs

_RUN_PAGES = 4
"""Shorter runs aren't worth torch's overhead: their pages count as single."""
_SINGLE_BYTES = 4096
"""Pages with smaller rows are copied together."""
_FEW = 8
"""Up to so many pages are copied one by one, whatever their size."""
_TEMPORARY_BYTES = 512 * 1024
"""Small pages are copied in portions that stay in the second-level cache."""


def copy_block(
    block: CopyBlock,
    source: torch.Tensor,
    source_count: int,
    sources: Sequence[int],
    target: torch.Tensor,
    target_count: int,
    targets: Sequence[int],
) -> None:
    """Copy one block of pages `sources` in the uint8 region `source` to pages `targets` in `target`.

    `..._count` is how many pages (or slots) each region has.
    """
    if not len(sources):
        return
    word = block.word
    from_rpw = block.source.stack(source, block.rows, source_count, block.width, word)
    to_rpw = block.target.stack(target, block.rows, target_count, block.width, word)
    if not from_rpw.is_cuda and not to_rpw.is_cuda:
        _copy_on_cpu(block, from_rpw, sources, to_rpw, targets)
        return
    copy_on_gpu(from_rpw, sources, to_rpw, targets)


def copy_on_gpu(from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]) -> None:
    """Copy pages between stacks of integers [rows, pages, words], at least one of them on a GPU.

    From one GPU to another's memory it is the source's that copies, on its current stream.
    """
    from twinpool.cache.memory.triton_copy import copy_rows, reachable

    if reachable(from_rpw) and reachable(to_rpw):
        copy_rows(from_rpw, sources, to_rpw, targets)
    else:
        copy_indexed(from_rpw, sources, to_rpw, targets)


def copy_inner_rows(
    from_ripw: torch.Tensor, sources: Sequence[int], to_ripw: torch.Tensor, targets: Sequence[int]
) -> None:
    """Copy pages `sources` to pages `targets` between stacks [rows, inner, pages, words]: each row of a page is `inner`
    runs of words, such as some heads of its tokens."""
    if not from_ripw.is_cuda and not to_ripw.is_cuda:
        source, target = from_ripw.numpy(), to_ripw.numpy()
        for a, b in zip(sources, targets, strict=True):
            target[:, :, b] = source[:, :, a]
        return
    from twinpool.cache.memory.triton_copy import copy_rows, reachable

    if reachable(from_ripw) and reachable(to_ripw):
        copy_rows(from_ripw, sources, to_ripw, targets)
    else:
        copy_indexed(from_ripw, sources, to_ripw, targets)


def copy_indexed(from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]) -> None:
    """Copy pages between stacks [rows, pages, words] or [rows, inner, pages, words] wherever they are: by plain torch,
    through a temporary."""
    a, b = index_tensor(sources, from_rpw.device), index_tensor(targets, to_rpw.device)
    for row in range(from_rpw.shape[0]):
        to_rpw[row].index_copy_(-2, b, from_rpw[row].index_select(-2, a).to(to_rpw.device))


def _copy_on_cpu(
    block: CopyBlock, from_rpw: torch.Tensor, sources: Sequence[int], to_rpw: torch.Tensor, targets: Sequence[int]
) -> None:
    found = runs(sources, targets, at_least=_RUN_PAGES)
    for start, stop in found.long:
        a, b, pages = sources[start], targets[start], stop - start
        to_rpw[:, b : b + pages].copy_(from_rpw[:, a : a + pages])
    if not len(found.rest):
        return
    source, target = from_rpw.numpy(), to_rpw.numpy()
    from_p, to_p = np.asarray(sources)[found.rest], np.asarray(targets)[found.rest]
    if block.width < _SINGLE_BYTES and len(from_p) > _FEW:
        _copy_small(source, from_p, target, to_p)
        return
    for a, b in zip(from_p.tolist(), to_p.tolist(), strict=True):
        target[:, b] = source[:, a]


def _copy_small(source: Any, sources: Any, target: Any, targets: Any) -> None:
    """Copy many small pages: each run of a row is one opaque item, so that numpy copies items, not words."""
    width = source.shape[2] * source.itemsize
    step = max(1, _TEMPORARY_BYTES // width)
    for row in range(source.shape[0]):
        from_p, to_p = _items(source[row], width), _items(target[row], width)
        for at in range(0, len(sources), step):
            to_p[targets[at : at + step]] = from_p[sources[at : at + step]]


def _items(pages: Any, width: int) -> Any:
    return pages.view(np.dtype(f"V{width}"))[:, 0]
