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

from cache.registry import BufferLayout, Index, PoolSetLayout, word_dtype

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
    """Digests pages and slots of one pool set, in regions of any order."""

    def __init__(self, layout: PoolSetLayout) -> None:
        self._layout = layout
        self._coefficients: dict[str, list[torch.Tensor]] = {
            pool: [_coefficients(pool, buffer) for buffer in buffers] for pool, buffers in layout.buffers.items()
        }

    def digest(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """Digest positions `firsts[i] .. ends[i]-1` of each page, the first of which is the page's first position.

        Buffers by page or slot are digested whole, at position `firsts[i]`.
        """
        block = max(1, _BLOCK_BYTES // (4 * self._layout.spec.unit_bytes(pool)))
        out: list[int] = []
        for at in range(0, len(indices), block):
            part = slice(at, at + block)
            out += self._digest_block(region, pool, indices[part], firsts[part], ends[part])
        return out

    def _digest_block(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        page_tokens = self._layout.spec.page_tokens
        index = torch.tensor(indices, dtype=torch.int64)
        starts = np.asarray(firsts, dtype=np.int64)[:, None]
        positions = starts + np.arange(page_tokens, dtype=np.int64)[None, :]
        weights = _odd(positions.astype(np.uint64) * _GOLDEN)
        weights[positions >= np.asarray(ends, dtype=np.int64)[:, None]] = 0
        by_token = torch.zeros(len(indices), page_tokens, dtype=torch.int64)
        by_entry = torch.zeros(len(indices), 1, dtype=torch.int64)
        for buffer, coefficients_lw in zip(self._layout.buffers[pool], self._coefficients[pool], strict=True):
            total = by_token if buffer.spec.index is Index.TOKEN else by_entry
            word = _word(buffer)
            stack_lpw = buffer.stack(region, self._layout.counts[pool], min(word, buffer.word, key=_size))
            for layer, coefficients_w in enumerate(coefficients_lw):
                words_ptw = stack_lpw[layer].index_select(0, index).view(word).view(len(indices), total.shape[1], -1)
                if words_ptw.dtype is not torch.int64:
                    words_ptw = words_ptw.to(torch.int64)
                total += (words_ptw * coefficients_w).sum(-1)
        summed = (by_token * torch.from_numpy(weights.view(np.int64))).sum(-1)
        summed += by_entry[:, 0] * torch.from_numpy(_odd(starts.astype(np.uint64) * _GOLDEN).view(np.int64))[:, 0]
        return [int(x) & 0xFFFFFFFFFFFFFFFF for x in summed]


def _word(buffer: BufferLayout) -> torch.dtype:
    """The integers that a buffer is summed in, wherever it lies: none spans two heads, so that slices add up."""
    return word_dtype(buffer.spec.shape[-1] * buffer.spec.dtype.itemsize)


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
    layers = np.arange(spec.layers, dtype=np.uint64)[:, None] * np.uint64(width)
    return torch.from_numpy(_odd(layers + here + np.uint64(name)).view(np.int64))


def _odd(x: np.ndarray) -> np.ndarray:
    """Mix 64-bit counters (the finaliser of SplitMix64, Steele et al. 2014) into odd coefficients."""
    with np.errstate(over="ignore"):
        z = x * _GOLDEN + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return mixed
