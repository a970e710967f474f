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

import numpy as np
import torch

from twinpool.cache.arena.arena_records import (
    SALT_BYTES,
    ArenaRecord,
    RecordTable,
    RecordWords,
    SealedPage,
    record_type,
)
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.memory_layout import PoolSetLayout
from twinpool.cache.memory.page_moves import describe_spec

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
        self._tables: dict[str, RecordTable] = {}
        at = _BLOCK
        for number, pool in enumerate(layout.spec.pools):
            dtype = record_type(layout.spec.page_tokens, pool.kind)
            count = layout.counts[pool.name]
            self._tables[pool.name] = RecordTable(raw[at : at + count * dtype.itemsize], dtype, number)
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
        self._tables[pool].write(indices, run, self._sequence + 1)
        self._sequence += len(indices)
        return True

    def drop(self, pool: str, indices: Sequence[int]) -> None:
        """Clear the records of these pages, which may be written to from now on."""
        self._tables[pool].sums[np.asarray(indices, dtype=np.int64)] = 0

    def read(self, pool: str) -> tuple[list[ArenaRecord], int]:
        """Returns all valid records of a pool, by ascending index, and the number of torn records, which it clears."""
        records, torn = self._tables[pool].read()
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
