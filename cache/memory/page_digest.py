"""Page digests and content tags: they seal a finished page where it was produced, to be checked where it arrives.

A tag is a *block hash* and a *digest*. The block hash names the tokens: a hash over every token from the start of the
sequence to the end of the page (and the salt), so equal keys mean equal prefixes. The digest sums the page's bytes:

    digest = sum over positions p, layers l, buffers b, words w of  A(p) * B(b, l, w) * word[p, l, b, w]   (mod 2^64)

with odd pseudo-random coefficients of the *logical* coordinates. Every term stands alone, so the digests of slices
(some heads, some layers, part of a page) add up to the digest of the whole, whatever the page size or the slicing on
the other side. A(p) odd makes every single-word change visible; it is a checksum against damage and mix-ups, not
against an adversary (the transport authenticates peers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from twinpool.cache.device.device_copies import to_host
from twinpool.cache.memory.kv_cache_spec import BufferLayout, BufferSpec, IndexSpace, PoolSetLayout, word_dtype
from twinpool.cache.memory.page_moves import IndexRuns, index_tensor, packing, runs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TEMPORARY_BYTES = 1024 * 1024
"""Small pages that don't follow each other are copied together in portions of about this many bytes, then summed."""
_LARGE_PAGE_BYTES = 64 * 1024
_RUN_PAGES = 4
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.uint8: np.uint8}


@dataclass(frozen=True, slots=True)
class ContentTag:
    """The content of a finished page: its block hash, 16 bytes, and the 64-bit digest of its state."""

    key: bytes
    digest: int


@dataclass(frozen=True, slots=True)
class _Stack:
    """Buffers that follow each other so evenly that they are summed as one with more layers."""

    layout: BufferLayout
    coefficients_lw: torch.Tensor
    word: torch.dtype
    """The type of the integers that are summed."""
    read_as: torch.dtype
    """The type in which the region's alignment allows to read them: no wider than `word`."""


@dataclass(frozen=True, slots=True)
class DigestSums:
    """A page's sums before they are weighted by positions, int64, on the device of the region."""

    by_token: torch.Tensor
    """[pages, page_tokens]: sums over the buffers by token."""
    by_entry: torch.Tensor
    """[pages, 1]: sums over the buffers by page or slot."""


class PageDigester:
    """Digests pages and slots of one pool set, in regions of any order that lie on `device`."""

    def __init__(
        self,
        layout: PoolSetLayout,
        device: torch.device | str = "cpu",
        only: str | None = None,
        counts: Callable[[BufferSpec], bool] = lambda buffer: True,
    ) -> None:
        """`only`: the one pool that will be digested; without it, all. `counts`: which buffers go into the sums."""
        self._layout = layout
        self._device = torch.device(device)
        self._stacks: dict[str, list[_Stack]] = {}
        """By pool, for regions of the layout."""
        self._packed: dict[str, list[_Stack]] = {}
        """By pool, for pages in the canonical layout."""
        for pool, buffers in layout.buffers.items():
            if only in (None, pool):
                coefficients = [_coefficients(pool, b).to(device) if counts(b.spec) else None for b in buffers]
                self._stacks[pool] = _stacks(buffers, coefficients)
                self._packed[pool] = _stacks(packing(layout, pool), coefficients)
        self._weights = np.zeros(0, dtype=np.uint64)
        """A(p) of the first positions."""

    def digest(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """Digest positions `firsts[i] .. ends[i]-1` of each page, where `firsts[i]` is the page's first position.

        Buffers by page or slot are digested whole, at position `firsts[i]`. Returns a digest for each of `indices`, in
        order; waits for a GPU.
        """
        return self.begin(region, pool, indices, firsts, ends)()

    def begin(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> Callable[[], list[int]]:
        """Begin `digest`: queue on a GPU, without waiting, what reads the region and the copy of its sums to the host.

        Returns a function that waits for these, and for nothing that is queued later; a CPU has digested by now.
        """
        sums = self.sums(region, pool, indices)
        if not sums.by_token.is_cuda:
            digests = self.finish(sums, firsts, ends)
            return lambda: digests
        there = DigestSums(to_host(sums.by_token), to_host(sums.by_entry))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(region.device))

        def read() -> list[int]:
            copied.synchronize()
            return self.finish(there, firsts, ends)

        return read

    def digest_canonical(
        self, packed: torch.Tensor, pool: str, firsts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """As `digest`, of pages in the canonical layout: uint8 [pages, unit_bytes], contiguous."""
        sums = self._sums(packed.view(-1), self._packed[pool], len(packed), range(len(packed)))
        return self.finish(sums, firsts, ends)

    def sums(self, region: torch.Tensor, pool: str, indices: Sequence[int]) -> DigestSums:
        """Begin the part of `digest` that reads the region: it is queued on the device; `finish` waits for it."""
        return self._sums(region, self._stacks[pool], self._layout.counts[pool], indices)

    def _sums(self, region: torch.Tensor, stacks: Sequence[_Stack], count: int, indices: Sequence[int]) -> DigestSums:
        by_token = torch.zeros(len(indices), self._layout.spec.page_tokens, dtype=torch.int64, device=self._device)
        by_entry = torch.zeros(len(indices), 1, dtype=torch.int64, device=self._device)
        if not len(indices):
            return DigestSums(by_token, by_entry)
        found = runs(indices, at_least=_RUN_PAGES)
        for stack in stacks:
            total = by_token if stack.layout.spec.index is IndexSpace.TOKEN else by_entry
            stack_lpw = stack.layout.stack(region, count, stack.read_as)
            if stack_lpw.is_cuda and stack.read_as == stack.word:
                from twinpool.cache.memory.triton_pages import add_sums

                add_sums(stack_lpw, indices, stack.coefficients_lw, total)
                continue
            for at, words_lpw in _portions(stack_lpw, indices, found):
                sums = sum_by_torch if words_lpw.is_cuda else sum_by_numpy
                total[at] += sums(words_lpw, stack.word, stack.coefficients_lw, total.shape[1])
        return DigestSums(by_token, by_entry)

    def finish(self, sums: DigestSums, firsts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Digests of positions `firsts[i] .. ends[i]-1` from their `sums`; waits for those of a GPU."""
        starts = np.asarray(firsts, dtype=np.int64)[:, None]
        positions = starts + np.arange(self._layout.spec.page_tokens, dtype=np.int64)
        known = self._weights_below(int(positions.max(initial=0)) + 1)
        weights = known[positions]
        weights[positions >= np.asarray(ends, dtype=np.int64)[:, None]] = 0
        summed = (sums.by_token.cpu().numpy().view(np.uint64) * weights).sum(-1, dtype=np.uint64)
        summed += (sums.by_entry.cpu().numpy().view(np.uint64) * known[starts])[:, 0]
        digests: list[int] = summed.tolist()
        return digests

    def _weights_below(self, stop: int) -> np.ndarray:
        """A(p) of at least the positions before `stop`; kept, as mixing them anew was a fifth of a small digest."""
        if (known := self._weights).size < stop:
            positions = np.arange(1 << stop.bit_length(), dtype=np.uint64)
            known = self._weights = _odd(positions * _GOLDEN)
        return known


def _portions(
    stack_lpw: torch.Tensor, indices: Sequence[int], found: IndexRuns
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    """Positions in `indices` with their pages [layers, pages, words]: in place where they follow each other or are
    large, else copied together."""
    for start, stop in found.long:
        yield slice(start, stop), stack_lpw[:, indices[start] : indices[start] + stop - start]
    page_bytes = stack_lpw.shape[0] * stack_lpw.shape[2] * stack_lpw.element_size()
    chosen = np.asarray(indices)[found.rest]
    if page_bytes >= _LARGE_PAGE_BYTES:
        for place, page in zip(found.rest.tolist(), chosen.tolist(), strict=True):
            yield slice(place, place + 1), stack_lpw[:, page : page + 1]
        return
    step = _TEMPORARY_BYTES // page_bytes + 1
    for first in range(0, len(chosen), step):
        pages = chosen[first : first + step]
        at: slice | torch.Tensor = slice(first, first + step)
        if found.long:
            at = index_tensor(found.rest[first : first + step], stack_lpw.device)
        if stack_lpw.is_cuda:
            on_device = index_tensor(pages, stack_lpw.device)
            yield at, torch.stack([words_pw.index_select(0, on_device) for words_pw in stack_lpw])
        else:
            yield at, torch.from_numpy(stack_lpw.numpy()[:, pages])


def sum_by_numpy(
    words_lpw: torch.Tensor, word: torch.dtype, coefficients_lw: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Sums over layers and words of each token: [layers, pages, words] -> int64 [pages, tokens].

    numpy's einsum multiplies and adds in one pass, without a temporary: as fast as a copy, where torch needs three.
    """
    words = words_lpw.numpy().view(_NUMPY[word])
    layers, pages, width = words.shape
    words_lptw = words.reshape(layers, pages, tokens, width // tokens)
    sums_pt = np.einsum("lptw,lw->pt", words_lptw, coefficients_lw.numpy(), dtype=np.int64, casting="safe")
    return torch.from_numpy(sums_pt)


def sum_by_torch(
    words_lpw: torch.Tensor, word: torch.dtype, coefficients_lw: torch.Tensor, tokens: int
) -> torch.Tensor:
    """As `sum_by_numpy`, by torch, on any device."""
    pages = words_lpw.shape[1]
    sums_pt = torch.zeros(pages, tokens, dtype=torch.int64, device=words_lpw.device)
    for words_pw, coefficients_w in zip(words_lpw, coefficients_lw, strict=True):
        words_ptw = words_pw.contiguous().view(word).view(pages, tokens, -1).to(torch.int64)
        sums_pt += (words_ptw * coefficients_w).sum(-1)
    return sums_pt


def _stacks(buffers: Sequence[BufferLayout], coefficients: Sequence[torch.Tensor | None]) -> list[_Stack]:
    """The buffers that have coefficients, as few stacks as their places allow."""
    found: list[tuple[BufferLayout, torch.Tensor]] = []
    for buffer, coefficients_lw in zip(buffers, coefficients, strict=True):
        if coefficients_lw is None:
            continue
        if found and (joined := _joined(found[-1][0], buffer)) is not None:
            found[-1] = joined, torch.cat([found[-1][1], coefficients_lw])
        else:
            found.append((buffer, coefficients_lw))
    return [_Stack(b, c, _word(b), min(_word(b), b.word, key=_size)) for b, c in found]


def _joined(buffer: BufferLayout, following: BufferLayout) -> BufferLayout | None:
    """Both as one buffer where all their layers are evenly spaced and alike, else None."""
    layers = buffer.spec.layers
    stride = buffer.layer_stride if layers > 1 else following.base - buffer.base
    if following.spec.layers > 1 and following.layer_stride != stride:
        return None
    one, other = (replace(b.spec, name="", layers=layers, first_layer=0, depths=()) for b in (buffer, following))
    alike = one == other
    if not alike or following.index_stride != buffer.index_stride or following.base != buffer.base + layers * stride:
        return None
    both = replace(buffer.spec, layers=layers + following.spec.layers, first_layer=0, depths=())
    return replace(buffer, spec=both, layer_stride=stride)


def _word(buffer: BufferLayout) -> torch.dtype:
    """The integers that a buffer is summed in, wherever it lies: none spans two heads, so that slices add up."""
    spec = buffer.spec
    return word_dtype(
        spec.shape[-1] * spec.dtype.itemsize if len(spec.shape) > 1 or not spec.heads else spec.dtype.itemsize
    )


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _coefficients(pool: str, buffer: BufferLayout) -> torch.Tensor:
    """Odd coefficients of what a buffer holds here, [layers, words], by its logical coordinates: int64."""
    spec = buffer.spec
    words = spec.shape_bytes // _word(buffer).itemsize
    head_words = words // spec.shape[0]
    width = spec.heads * head_words if spec.heads else words
    name = int.from_bytes(hashlib.blake2b(f"{pool}/{spec.name}".encode(), digest_size=7).digest())
    here = np.arange(words, dtype=np.uint64) + np.uint64(spec.first_head * head_words)
    layers = np.asarray(spec.here, dtype=np.uint64)[:, None] * np.uint64(width)
    return torch.from_numpy(_odd(layers + here + np.uint64(name)).view(np.int64))


def _odd(x: np.ndarray) -> np.ndarray:
    """Mix 64-bit counters (the finaliser of SplitMix64, Steele et al. 2014) into odd coefficients."""
    z = x * _GOLDEN + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return mixed
