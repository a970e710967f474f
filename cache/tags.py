"""Content tags: what is in a finished page, sealed where it was produced and checked wherever it arrives.

A tag is a *chain key* and a *digest*. The chain key names the tokens: a hash over every token from the start of the
sequence to the end of the page (and the salt), so equal keys mean equal prefixes. The digest sums the page's bytes:

    digest = sum over positions p, layers l, buffers b, words w of  A(p) * B(b, l, w) * word[p, l, b, w]   (mod 2^64)

with odd pseudo-random coefficients of the *logical* coordinates. Every term stands alone, so the digests of slices
(some heads, some layers, part of a page) add up to the digest of the whole, whatever the page size or the slicing on
the other side. A(p) odd makes every single-word change visible; it is a checksum against damage and mix-ups, not
against an adversary (the transport authenticates peers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cache.moves import word_dtype
from cache.registry import PoolSetLayout

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_BYTES = 64 * 1024 * 1024
"""Digests are computed in blocks of about this many bytes, to bound temporary memory."""


@dataclass(frozen=True, slots=True)
class ContentTag:
    """What a finished page holds: 16 bytes that name its tokens, 64 bits over its state."""

    key: bytes
    digest: int


def chain_keys(tokens: Sequence[int], page_tokens: int, salt: str = "") -> list[bytes]:
    """The chain key of each page of `tokens`, the last, partly filled one included."""
    keys = []
    key = hashlib.blake2b(salt.encode(), digest_size=16, person=b"twinpool-chain").digest()
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    step = 4 * page_tokens
    for start in range(0, len(raw), step):
        key = hashlib.blake2b(key + raw[start : start + step], digest_size=16).digest()
        keys.append(key)
    return keys


class Digester:
    """Digests pages of one pool set."""

    def __init__(self, layout: PoolSetLayout) -> None:
        self._layout = layout
        self._coefficients: list[torch.Tensor] = []
        for pool, buffers in layout.buffers.items():
            for buffer in buffers:
                head_bytes = buffer.spec.shape[-1] * buffer.spec.dtype.itemsize
                word = word_dtype(head_bytes)
                words = buffer.spec.token_bytes // word.itemsize
                name = int.from_bytes(hashlib.blake2b(f"{pool}/{buffer.spec.name}".encode(), digest_size=7).digest())
                counters = np.arange(buffer.spec.layers * words, dtype=np.uint64) + np.uint64(name)
                coefficients = _odd(counters).reshape(buffer.spec.layers, 1, 1, words)
                self._coefficients.append(torch.from_numpy(coefficients.view(np.int64)))

    def digest(
        self, region: torch.Tensor, pages: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """Digest each page's positions `firsts[i] .. ends[i]-1`, the first of which is the page's first position."""
        if not pages:
            return []
        block = max(1, _BLOCK_BYTES // (4 * self._layout.spec.page_bytes))
        out: list[int] = []
        for at in range(0, len(pages), block):
            part = slice(at, at + block)
            out += self._digest_block(region, pages[part], firsts[part], ends[part])
        return out

    def _digest_block(
        self, region: torch.Tensor, pages: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        page_tokens = self._layout.spec.page_tokens
        index = torch.tensor(pages)
        slots = np.arange(page_tokens, dtype=np.int64)[None, :]
        positions = np.asarray(firsts, dtype=np.int64)[:, None] + slots
        weights = _odd(positions.astype(np.uint64) * _GOLDEN)
        weights[positions >= np.asarray(ends, dtype=np.int64)[:, None]] = 0
        weights_pt = torch.from_numpy(weights.view(np.int64))
        total = torch.zeros(len(pages), page_tokens, dtype=torch.int64)
        each = iter(self._coefficients)
        for buffers in self._layout.buffers.values():
            for buffer in buffers:
                coefficients_l11w = next(each)
                word = word_dtype(buffer.spec.shape[-1] * buffer.spec.dtype.itemsize)
                for layer in range(buffer.spec.layers):
                    start = buffer.offset(layer, 0)
                    flat = region[start : start + self._layout.pages * buffer.page_stride].view(word)
                    words_ptw = flat.view(self._layout.pages, page_tokens, -1).index_select(0, index)
                    if word is not torch.int64:
                        words_ptw = words_ptw.to(torch.int64)
                    total += (words_ptw * coefficients_l11w[layer]).sum(-1)
        return [int(x) & 0xFFFFFFFFFFFFFFFF for x in (total * weights_pt).sum(-1)]


def _odd(x: np.ndarray) -> np.ndarray:
    """Mix 64-bit counters (the finaliser of SplitMix64, Steele et al. 2014) into odd coefficients."""
    with np.errstate(over="ignore"):
        z = x * _GOLDEN + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return mixed
