"""The arena: host memory that outlives its worker, with the pages of a host tier and an index of their content.

An arena is one segment of memory that the node's arena agent keeps (`cluster.arena.arena_agent`). The worker maps it
and puts its host tier there. When the worker dies, however it dies, its next incarnation maps the same segment and
finds:

    header      the kind of state (model, layout, numerics), which ranks belong together, how often it was taken over
    index       for each pool a table with a record for each page or slot, at its number: the content sealed there
    region      the pages, as `PoolSetLayout` lays them out page-first

The dead worker may have stopped between any two stores. So the order of the stores decides what a reader may trust:

- A record says that its page is finished. It is written after the page's last byte, and taken back before the page is
  given to an operation that may write to it.
- The first word of a record is a checksum over all other words and over the record's place. Writing a record begins
  with a zero there and ends with the checksum; so a record whose writing was cut off has no checksum, or a wrong one,
  and counts as torn.
- The header is written in the same way, after the index was cleared.

A process that is killed has made all stores up to some instruction and none after it, so the order of the stores is
all that is needed. The agent makes sure that only one process writes: it lends a segment again only when the process
that had it is dead.

A record is trusted for the shape of the tree: its own checksum and the block hashes prove it. The page's bytes are
trusted only once their digest was computed again (`cache.arena.arena_keeper`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetLayout, PoolSetSpec
from twinpool.cache.memory.page_moves import describe_spec
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
        self.words: RecordWords = raw.view(np.uint64).reshape(len(self._records), -1)
        """The records as they lie in memory, [indices, words], the checksum first; 0 there: no record."""
        self.sums = self.words[:, 0]
        # These factors make a record invalid at another index or in another pool, and are the same in every process.
        draw = np.random.Generator(np.random.PCG64(number))
        self._odd: RecordWords = draw.integers(
            0, 1 << 64, self.words.shape[1], dtype=np.uint64, endpoint=False
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
        self.words[at, 1:] = words[:, 1:]
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
        words = self.words[there]
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


_MAGIC = 0x616E657261707774
_FORMAT = 1
_BLOCK = 4096
_HEADER_WORDS = 8
_SUM, _MAGIC_AT, _FORMAT_AT, _TAKEN, _FINGERPRINT, _BOND = 0, 1, 2, 3, 4, 6
"""Words of the header; fingerprint and bond take two each."""
BOND_BYTES = 16


class Arena:
    """One rank's segment of memory. For one process and one thread."""

    def __init__(self, memory: memoryview, layout: PoolSetLayout, fingerprint: str) -> None:
        """`memory`: writable, at least `arena_bytes(layout)` long, else `ValueError` is raised.

        `fingerprint` names all that the content of pages depends on besides their tokens and the layout.
        """
        raw = np.frombuffer(memory, dtype=np.uint8)
        if raw.nbytes < arena_bytes(layout) or not raw.flags.writeable:
            raise ValueError(f"an arena of this layout is {arena_bytes(layout)} writable bytes, not {raw.nbytes}")
        self.layout = layout
        self._fingerprint = _fingerprint(layout, fingerprint)
        self._header: RecordWords = raw[: 8 * _HEADER_WORDS].view(np.uint64)
        # Behind the header and not under its checksum: the count changes with every copy.
        self._copies: RecordWords = raw[8 * _HEADER_WORDS : 8 * _HEADER_WORDS + 8].view(np.uint64)
        self.tables: dict[str, RecordTable] = {}
        """The index, by pool."""
        at = _BLOCK
        for number, pool in enumerate(layout.spec.pools):
            dtype = record_type(layout.spec.page_tokens, pool.kind)
            count = layout.counts[pool.name]
            self.tables[pool.name] = RecordTable(raw[at : at + count * dtype.itemsize], dtype, number)
            at += _blocks(count * dtype.itemsize)
        self._index = raw[_BLOCK:at]
        self.region = torch.from_numpy(raw[at : at + layout.nbytes])
        """uint8 [layout.nbytes]: the memory of the host tier's `PoolSet`."""
        self._sequence = 0

    # ------------------------------------------------------------ the header

    @property
    def bond(self) -> bytes:
        """The id that the segments of all ranks of a worker have in common, `BOND_BYTES` long.

        Empty where there is nothing to take over: the header is torn, or is that of other state.
        """
        words = self._header
        valid = (
            int(words[_SUM]) == _header_sum(words)
            and (int(words[_MAGIC_AT]), int(words[_FORMAT_AT])) == (_MAGIC, _FORMAT)
            and words[_FINGERPRINT:_BOND].tobytes() == self._fingerprint
        )
        return words[_BOND : _BOND + 2].tobytes() if valid else b""

    @property
    def taken(self) -> int:
        """The number of incarnations in a row that have taken the arena over without having settled."""
        return int(self._header[_TAKEN])

    def begin(self, bond: bytes) -> None:
        """Clear the index and write a new header: from now on the segment belongs with others of this bond."""
        self._header[_SUM] = 0
        self._index[:] = 0
        self._sequence = 0
        self._write_header(bond, 0)

    def take(self, times: int) -> None:
        """Record that `taken` is `times` from now on. The index stays."""
        self._write_header(self.bond, times)

    def _write_header(self, bond: bytes, taken: int) -> None:
        assert len(bond) == BOND_BYTES
        words = self._header
        words[_SUM] = 0
        words[_MAGIC_AT], words[_FORMAT_AT], words[_TAKEN] = _MAGIC, _FORMAT, taken
        words[_FINGERPRINT:_BOND] = np.frombuffer(self._fingerprint, np.uint64)
        words[_BOND : _BOND + 2] = np.frombuffer(bond, np.uint64)
        words[_SUM] = _header_sum(words)

    def count_copy(self) -> None:
        """Count a copy into this tier: one that was ordered (in the leader's arena) or carried out (in a follower's).

        For workers of several ranks.
        """
        self._copies[0] += np.uint64(1)

    def take_copies(self) -> int:
        """Returns how many copies were counted, and sets the count to zero.

        Where the counts of a dead worker's ranks differ, a follower had not carried out all copies whose pages the
        leader had sealed.
        """
        count = int(self._copies[0])
        self._copies[0] = 0
        return count

    # ------------------------------------------------------------ the index

    def seal(self, pool: str, indices: Sequence[int], run: SealedPage) -> bool:
        """Record that the pages `indices` are finished and hold `run`. False, and nothing is recorded, where its salt
        is longer than `SALT_BYTES`."""
        if len(run.salt) > SALT_BYTES:
            return False
        self.tables[pool].write(indices, run, self._sequence + 1)
        self._sequence += len(indices)
        return True

    def drop(self, pool: str, indices: Sequence[int]) -> None:
        """Clear the records of these pages, which may be written to from now on."""
        self.tables[pool].sums[np.asarray(indices, dtype=np.int64)] = 0

    def read(self, pool: str) -> tuple[list[ArenaRecord], int]:
        """Returns all valid records of a pool, by ascending index, and the number of torn records, which it clears."""
        records, torn = self.tables[pool].read()
        self._sequence = max([self._sequence, *(record.sequence for record in records)])
        return records, torn


def arena_bytes(layout: PoolSetLayout) -> int:
    """Returns the bytes of the segment for a host tier of this layout: its pages, and about 250 bytes for each."""
    return _BLOCK + index_bytes(layout) + layout.nbytes


def index_bytes(layout: PoolSetLayout) -> int:
    """Returns the bytes of the index for a host tier of this layout."""
    spec = layout.spec
    sizes = [layout.counts[p.name] * record_type(spec.page_tokens, p.kind).itemsize for p in spec.pools]
    return sum(map(_blocks, sizes))


def max_index_bytes(spec: PoolSetSpec, nbytes: int) -> int:
    """Returns the bytes that an arena takes, at most, besides the `nbytes` of its host tier's pages.

    The bound is reached when all pages are in the pool whose records are largest for their pages' size.
    """
    sizes = [record_type(spec.page_tokens, p.kind).itemsize / spec.unit_bytes(p.name) for p in spec.pools]
    return int(nbytes * max(sizes)) + (1 + len(sizes)) * _BLOCK


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _fingerprint(layout: PoolSetLayout, named: str) -> bytes:
    described = json.dumps([named, describe_spec(layout.spec), dict(layout.counts), str(layout.order)], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).digest()


def _header_sum(words: RecordWords) -> int:
    digest = hashlib.blake2b(words[1:].tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1
