"""The byte stream of a write: in which order the pages of one pool travel, and where they lie at either end.

Bytes go buffer by buffer, layer by layer, page by page. Where both ends hold the same heads, rows of the region are
given to the kernel as they lie, and it copies them once on each side; rows of pages that follow each other are one.
Where the ends share only some heads, or rows are short, pages are packed into one piece of memory and unpacked from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from twinpool.cache.memory.head_slices import copy_common, of_layers, shared_spec
from twinpool.cache.memory.kv_cache_spec import BufferLayout, BufferSpec, overlap

_ROW_BYTES = 4096
"""Rows that are shorter on average are packed: the kernel takes a while for each, and so do lists of them."""


@dataclass(frozen=True, slots=True)
class PoolStream:
    """One pool's part of writes between two ranks, as one of them sees it."""

    pool: str
    count: int
    """Pages (or slots) of the pool in this rank's region."""
    mine: tuple[BufferLayout, ...]
    """The buffers in this rank's region that travel, of the layers that both ranks hold."""
    sent: tuple[BufferSpec, ...]
    """The same buffers, of the heads and layers that both ranks hold."""
    page_tokens: int

    def of_layers(self, layers: range) -> PoolStream:
        """The part of the stream that these layers of the pool take."""
        sent = [(spec, overlap(spec.here, layers)) for spec in self.sent]
        specs = tuple(replace(spec, layers=len(here), first_layer=here.start) for spec, here in sent if here)
        return replace(self, mine=of_layers(self.mine, layers), sent=specs)

    @property
    def page_bytes(self) -> int:
        return sum(spec.layers * spec.entry_bytes(self.page_tokens) for spec in self.sent)

    @property
    def layers(self) -> int:
        """The most layers that one of its buffers has, on all ranks."""
        return max(spec.all_layers for spec in self.sent)

    @property
    def whole(self) -> bool:
        """Whether all of a page travels, so that its rows can be sent as they lie."""
        return all(b.spec.shape == spec.shape for b, spec in zip(self.mine, self.sent, strict=True))

    def rows(self, region: memoryview, pages: Sequence[int]) -> list[memoryview] | None:
        """Return the rows of these pages in the order in which they travel; None where they must be packed."""
        if not self.whole:
            return None
        if not self.mine:
            return []
        at = np.asarray(pages, dtype=np.int64)
        starts, lengths = [], []
        for buffer in self.mine:
            layers = np.arange(buffer.spec.layers, dtype=np.int64)[:, None]
            offsets = (buffer.base + layers * buffer.layer_stride + at[None, :] * buffer.index_stride).ravel()
            firsts = np.flatnonzero(np.diff(offsets, prepend=-1) != buffer.entry_bytes)
            starts.append(offsets[firsts])
            lengths.append(np.diff(firsts, append=len(offsets)) * buffer.entry_bytes)
        begin, size = np.concatenate(starts), np.concatenate(lengths)
        if len(pages) * self.page_bytes < len(begin) * _ROW_BYTES:
            return None
        return [region[a:b] for a, b in zip(begin.tolist(), (begin + size).tolist(), strict=True)]

    def pack(self, region: torch.Tensor, pages: Sequence[int], out: torch.Tensor) -> None:
        """Copy these pages from the region into `out`, uint8 [bytes], in the order in which they travel."""
        ends = (self.count, pages), (len(pages), range(len(pages)))
        copy_common(self.mine, region, ends[0], self._packed(len(pages)), out, ends[1], self.page_tokens)

    def unpack(self, packed: torch.Tensor, region: torch.Tensor, pages: Sequence[int]) -> None:
        """The inverse of `pack`."""
        ends = (len(pages), range(len(pages))), (self.count, pages)
        copy_common(self._packed(len(pages)), packed, ends[0], self.mine, region, ends[1], self.page_tokens)

    def _packed(self, pages: int) -> tuple[BufferLayout, ...]:
        out, base = [], 0
        for spec in self.sent:
            entry = spec.entry_bytes(self.page_tokens)
            out.append(BufferLayout(spec, base, pages * entry, entry, entry))
            base += spec.layers * pages * entry
        return tuple(out)


def shared(mine: Sequence[BufferLayout], theirs: Sequence[BufferSpec]) -> tuple[BufferSpec, ...]:
    """Return the buffers as they travel between two ranks: of each, the heads and layers that both hold."""
    return tuple(shared_spec(buffer.spec, its) for buffer, its in zip(mine, theirs, strict=True))


def bytes_of(memory: torch.Tensor) -> memoryview:
    """Return flat uint8 memory as bytes that can be written."""
    array: Any = memory.numpy()
    return memoryview(array).cast("B")
