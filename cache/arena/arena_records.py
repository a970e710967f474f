"""The index of an arena: a record for each page or slot, valid only when its checksum matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.contracts.block_hash import KEY_BYTES, TOKEN_BYTES

SALT_BYTES = 96
"""The longest salt that fits into a record: pages under longer salts are not adopted."""

RecordWords = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class SealedPage:
    """A run of finished pages of one prefix, or one state, as it is entered in the index."""

    first: int
    """The page number of the first page; for a state, the number of the last page before it."""
    keys: bytes
    """Block hashes, 16 bytes each."""
    digests: Sequence[int]
    parent: bytes = b""
    """Block hash of the page before the first; empty at the start of a prefix. Of full pages only, like tokens and
    salt."""
    tokens: bytes = b""
    """The tokens of all pages, 4 bytes each."""
    salt: bytes = b""
    """UTF-8, at most `SALT_BYTES`."""


@dataclass(frozen=True, slots=True)
class ArenaRecord:
    """A valid record as it was read: one page or slot."""

    index: int
    """The page's or slot's index in its pool."""
    sequence: int
    """The higher, the later the record was written."""
    number: int
    """The page's number in its prefix; for a state, the number of the last page before it."""
    key: bytes
    """Block hash of that page."""
    digest: int
    parent: bytes
    """Block hash of the page before, zeros at the start of a prefix. Empty except for full pages, like tokens and
    salt."""
    tokens: bytes
    """The page's tokens, 4 bytes each."""
    salt: str


class RecordTable:
    """The records of one pool, by index, in the memory `raw`; `number` is the pool's."""

    def __init__(self, raw: np.ndarray, dtype: np.dtype, number: int) -> None:
        self._type = dtype
        self._records = raw.view(dtype)
        self._words: RecordWords = raw.view(np.uint64).reshape(len(self._records), -1)
        self.sums = self._words[:, 0]
        # These factors make a record invalid at another index or in another pool, and are the same in every process.
        draw = np.random.Generator(np.random.PCG64(number))
        self._odd: RecordWords = draw.integers(
            0, 1 << 64, self._words.shape[1], dtype=np.uint64, endpoint=False
        ) | np.uint64(1)

    def write(self, indices: Sequence[int], run: SealedPage, sequence: int) -> None:
        """Write the records of `run`, page by page, at `indices`; the first gets the number `sequence`."""
        count = len(indices)
        records = np.zeros(count, self._type)
        records["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint64)
        records["digest"] = np.array(run.digests, dtype=np.uint64)
        records["number"] = np.arange(run.first, run.first + count, dtype=np.uint32)
        records["key"] = _rows(run.keys, count, KEY_BYTES)
        if run.tokens:
            parents = (run.parent or bytes(KEY_BYTES)) + run.keys[:-KEY_BYTES]
            records["parent"] = _rows(parents, count, KEY_BYTES)
            records["tokens"] = _rows(run.tokens, count, len(run.tokens) // count)
            records["salted"] = len(run.salt)
            records["salt"][:, : len(run.salt)] = np.frombuffer(run.salt, np.uint8)
        words: RecordWords = records.view(np.uint64).reshape(count, -1)
        at = np.asarray(indices, dtype=np.int64)
        sums = self._sums(words, at)
        # The order of these three is what `read` relies on.
        self.sums[at] = 0
        self._words[at, 1:] = words[:, 1:]
        self.sums[at] = sums

    def _sums(self, words: RecordWords, at: np.ndarray) -> RecordWords:
        """Returns the checksums of whole records at the places `at`, over all words but the first; never 0."""
        with np.errstate(over="ignore"):
            mixed: RecordWords = (words[:, 1:] * self._odd[1:]).sum(axis=1, dtype=np.uint64)
            mixed += at.astype(np.uint64) * self._odd[0]
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed |= np.uint64(1)
        return mixed

    def read(self) -> tuple[list[ArenaRecord], int]:
        """Returns all valid records, by ascending index, and the number of torn records, which it clears."""
        there = self.sums.nonzero()[0]
        words = self._words[there]
        good = self._sums(words, there) == words[:, 0]
        torn = there[~good]
        self.sums[torn] = 0
        found = np.ascontiguousarray(words[good]).view(self._type)[:, 0] if good.any() else ()
        return [self._record(at, one) for at, one in zip(there[good].tolist(), found, strict=True)], len(torn)

    def _record(self, index: int, one: np.void) -> ArenaRecord:
        parent = tokens = salt = b""
        if "tokens" in (self._type.names or ()):
            parent, tokens = one["parent"].tobytes(), one["tokens"].tobytes()
            salt = one["salt"].tobytes()[: int(one["salted"])]
        key, sequence, number = one["key"].tobytes(), int(one["sequence"]), int(one["number"])
        return ArenaRecord(
            index, sequence, number, key, int(one["digest"]), parent, tokens, salt.decode(errors="replace")
        )


def record_type(page_tokens: int, kind: PoolKind) -> np.dtype:
    """Returns the dtype of a record of a pool of this kind: whole 8-byte words, the checksum first."""
    fields: list[tuple[str, str, int, int]] = [
        ("sum", "<u8", 1, 0), ("sequence", "<u8", 1, 8), ("digest", "<u8", 1, 16), ("number", "<u4", 1, 24),
        ("salted", "<u4", 1, 28), ("key", "u1", KEY_BYTES, 32),
    ]  # fmt: skip
    if kind is PoolKind.FULL:
        fields += [("parent", "u1", KEY_BYTES, 48), ("salt", "u1", SALT_BYTES, 64)]
        fields += [("tokens", "u1", TOKEN_BYTES * page_tokens, 64 + SALT_BYTES)]
    end = max(at + np.dtype(kind_of).itemsize * times for _, kind_of, times, at in fields)
    return np.dtype(
        {
            "names": [name for name, _, _, _ in fields],
            "formats": [kind_of if times == 1 else (kind_of, (times,)) for _, kind_of, times, _ in fields],
            "offsets": [at for _, _, _, at in fields],
            "itemsize": -(-end // 8) * 8,
        }
    )


def _rows(raw: bytes, count: int, width: int) -> np.ndarray:
    return np.frombuffer(raw, np.uint8).reshape(count, width)
