"""Moving pages, written once over the registry.

The canonical page layout, shared by transfer and storage, is a page's bytes pool by pool, buffer by buffer, layer by
layer: `[pages, page_bytes]`. Source and destination may have different numbers of pages, so their strides differ;
their specs must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cache.registry import PoolSetLayout, PoolSetSpec

_SINGLE_PAGE_BYTES = 4096


def describe_spec(spec: PoolSetSpec) -> dict[str, object]:
    """The spec as plain values, for a peer to compare with its own."""
    return {
        "page_tokens": spec.page_tokens,
        "pools": {
            pool.name: {
                buffer.name: {
                    "layers": buffer.layers,
                    "shape": list(buffer.shape),
                    "dtype": str(buffer.dtype).removeprefix("torch."),
                }
                for buffer in pool.buffers
            }
            for pool in spec.pools
        },
    }


def copy_pages(
    source: torch.Tensor,
    source_layout: PoolSetLayout,
    source_pages: Sequence[int],
    target: torch.Tensor,
    target_layout: PoolSetLayout,
    target_pages: Sequence[int],
) -> int:
    """Copy all buffers of `source_pages` to `target_pages` (same order); returns the bytes copied."""
    src, dst = torch.tensor(source_pages), torch.tensor(target_pages)
    pairs = zip(_stacks(source, source_layout), _stacks(target, target_layout), strict=True)
    for source_lpw, target_lpw in pairs:
        if _page_by_page(source_lpw):
            from_lpw, to_lpw = source_lpw.numpy(), target_lpw.numpy()
            for a, b in zip(source_pages, target_pages, strict=True):
                to_lpw[:, b] = from_lpw[:, a]
            continue
        for layer in range(source_lpw.shape[0]):
            target_lpw[layer].index_copy_(0, dst, source_lpw[layer].index_select(0, src))
    return len(source_pages) * source_layout.spec.page_bytes


def gather_pages(region: torch.Tensor, layout: PoolSetLayout, pages: Sequence[int]) -> torch.Tensor:
    """Copy pages into the canonical layout: uint8 [pages, page_bytes], contiguous."""
    index = torch.tensor(pages)
    out = torch.empty(len(pages), layout.spec.page_bytes, dtype=torch.uint8)
    at = 0
    for stack_lpw in _stacks(region, layout):
        if _page_by_page(stack_lpw):
            width = _page_bytes(stack_lpw)
            from_lpw, rows = stack_lpw.numpy(), out[:, at : at + width].numpy()
            for row, page in zip(rows, pages, strict=True):
                row.view(from_lpw.dtype).reshape(len(from_lpw), -1)[...] = from_lpw[:, page]
            at += width
            continue
        for layer_pw in stack_lpw:
            words = layer_pw.index_select(0, index).view(torch.uint8)
            out[:, at : at + words.shape[1]] = words
            at += words.shape[1]
    return out


def scatter_pages(packed: torch.Tensor, region: torch.Tensor, layout: PoolSetLayout, pages: Sequence[int]) -> None:
    """The inverse of `gather_pages`: write canonical pages [pages, page_bytes] into `region`."""
    index = torch.tensor(pages)
    at = 0
    for stack_lpw in _stacks(region, layout):
        if _page_by_page(stack_lpw):
            width = _page_bytes(stack_lpw)
            to_lpw, rows = stack_lpw.numpy(), packed[:, at : at + width].numpy()
            for row, page in zip(rows, pages, strict=True):
                to_lpw[:, page] = row.view(to_lpw.dtype).reshape(len(to_lpw), -1)
            at += width
            continue
        for layer_pw in stack_lpw:
            size = layer_pw.shape[1] * layer_pw.element_size()
            words = packed[:, at : at + size].contiguous().view(layer_pw.dtype)
            layer_pw.index_copy_(0, index, words)
            at += size


def _page_bytes(stack_lpw: torch.Tensor) -> int:
    """Bytes of one page of a buffer, all layers."""
    return stack_lpw.shape[0] * stack_lpw.shape[2] * stack_lpw.element_size()


def _page_by_page(stack_lpw: torch.Tensor) -> bool:
    """Whether to copy pages one by one, straight to their places: two to three times as fast as going through an
    indexed copy, unless pages are so small that the calls weigh more than the bytes."""
    return stack_lpw.device.type == "cpu" and _page_bytes(stack_lpw) >= _SINGLE_PAGE_BYTES


def _stacks(region: torch.Tensor, layout: PoolSetLayout) -> Iterator[torch.Tensor]:
    """Each buffer as [layers, pages, words] of the widest integers that its page size allows."""
    for buffers in layout.buffers.values():
        for buffer in buffers:
            word = word_dtype(buffer.page_stride)
            size = word.itemsize
            flat = region[buffer.base : buffer.base + buffer.layer_stride * buffer.spec.layers].view(word)
            yield flat.as_strided(
                (buffer.spec.layers, layout.pages, buffer.page_stride // size),
                (buffer.layer_stride // size, buffer.page_stride // size, 1),
                flat.storage_offset(),
            )


def word_dtype(nbytes: int) -> torch.dtype:
    """The widest integer type whose size divides `nbytes`."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if nbytes % dtype.itemsize == 0:
            return dtype
    return torch.uint8
