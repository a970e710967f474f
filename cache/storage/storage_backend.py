"""The interface of storage backends: objects by content-derived names, read and written in batches.

One object is one page of one pool (or one slice of its heads) in its canonical layout. Its name says everything that
its content depends on, so an object never changes: writing a name that is there already is a no-op, and any process may
delete any object at any time. A caller gets an `ObjectOutcome` for each name; a bad object, a full disk and a server
that has gone are outcomes too, not exceptions. All calls block and may be made from many threads at once.

The seal of a stored object, by which a reader knows it from any other bytes under the same name.

    payload (n bytes) | magic 8 | version u16 | name length u16 | zero u32 | n u64 | digest u64 | checksum u64 | name

The seal follows the payload, so that reading a file into a page copies aligned memory (a header in front cost a tenth
of the bandwidth). A reader knows the name it asks for and the size it expects, hence where each byte must be: a file
that is cut or too long shows by its length, one of another object by the name, flipped bits by the checksum, which
covers payload, seal and name. Numbers are little-endian. The checksum is XXH3 with 64 bits (20 GB/s and more a core,
where CRC-32 gives 4). It guards against accidents, not against an adversary who can write to the store.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import NamedTuple, Protocol

import xxhash

CHAIN_BYTES = 16
FORMAT_VERSION = 1

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectName:
    """The name of an object: model, pool, prefix and slice. Reuse the instance: `encoded` and `key` are kept in it."""

    fingerprint: str
    """Model and layout; objects of different fingerprints have different names."""
    pool: str
    chain: bytes
    """Block hash of the page, 16 bytes: it names every token up to the page's end."""
    part: str = "0of1"
    """The slice of the whole model's heads, see `cache.storage.object_slices`."""

    def __post_init__(self) -> None:
        assert len(self.chain) == CHAIN_BYTES, f"a block hash has {CHAIN_BYTES} bytes, this one {len(self.chain)}"
        assert "\0" not in self.fingerprint + self.pool + self.part, "names of objects hold no NUL"

    @cached_property
    def encoded(self) -> bytes:
        """All of the name, unambiguously; at most 65,535 bytes."""
        return self.chain + f"{self.fingerprint}\0{self.pool}\0{self.part}".encode()

    @cached_property
    def key(self) -> str:
        """32 hex digits: the key of the object in a file system or a server, different for each format version."""
        return hashlib.blake2b(self.encoded, digest_size=16, salt=b"twinpool-l3-v%d" % FORMAT_VERSION).hexdigest()


class ObjectVerdict(StrEnum):
    """The verdict on one name of a batch."""

    FOUND = "found"
    """Read: the payload is in the caller's buffer and matches its seal."""
    MISSING = "missing"
    """Read: there is no such object."""
    DAMAGED = "damaged"
    """Read: the bytes under the name are not the object that was written; they have been deleted."""
    STORED = "stored"
    """Write: it is there now."""
    KEPT = "kept"
    """Write: it was there before; its use was refreshed."""
    REFUSED = "refused"
    """Write: no room for it."""
    FAILED = "failed"
    """The medium failed, the deadline passed, or the operation never ran; nothing is known about the object."""


class ObjectOutcome(NamedTuple):
    """A verdict, the content digest if the object was found, and else a reason for people (it may be empty)."""

    verdict: ObjectVerdict
    digest: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the payload is in the buffer (read), or the object is in the store (write)."""
        return self.verdict in (ObjectVerdict.FOUND, ObjectVerdict.STORED, ObjectVerdict.KEPT)


CUT_OFF = "what comes before it could not be written"
"""The reason of a write that was not begun, since one before it failed."""
MISSING = ObjectOutcome(ObjectVerdict.MISSING)
STORED = ObjectOutcome(ObjectVerdict.STORED)
KEPT = ObjectOutcome(ObjectVerdict.KEPT)


@dataclass(frozen=True, slots=True)
class ObjectBuffer:
    """An object to write: its name, the 64-bit content digest of the page, and its canonical bytes (contiguous)."""

    name: ObjectName
    digest: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class BackendCapacity:
    """The capacity of a backend and its use, in bytes with seals; `max_bytes` 0 means that nothing limits it."""

    max_bytes: int
    used_bytes: int
    objects: int


@dataclass(frozen=True, slots=True)
class BackendCounts:
    """The counters of a backend since it was opened."""

    damaged: int = 0
    """Objects that did not match their seal when read."""
    foreign: int = 0
    """Files met in the folder that are not Twinpool's; they were left alone."""
    failed: int = 0
    """Names that met an I/O error, an absent server or the deadline, or were behind one that did in a write."""
    refused: int = 0
    """Writes for which there was no room."""
    evicted: int = 0
    """Objects deleted to make room for others."""


class BackendTally:
    """The running counters behind `BackendCounts`, for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(BackendCounts.__dataclass_fields__, 0)

    def add(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counts[what] += count

    def add_outcomes(self, outcomes: Sequence[ObjectOutcome]) -> None:
        """Count the damaged, failed and refused ones among `outcomes`."""
        for outcome in outcomes:
            if outcome.verdict in (ObjectVerdict.DAMAGED, ObjectVerdict.FAILED, ObjectVerdict.REFUSED):
                self.add(outcome.verdict.value)

    def snapshot(self) -> BackendCounts:
        with self._lock:
            return BackendCounts(**self._counts)


class StorageBackend(Protocol):
    """A store of objects. Every call ends by a deadline of the backend's own, and reports errors of the medium as
    outcomes instead of raising. Answers are in the order of the names."""

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """Whether each object is there, by name alone: a later read may still find it gone or damaged."""
        ...

    def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        """Read each payload into its own buffer, writable, contiguous and of exactly the payload's size.

        A buffer's content is undefined unless its outcome is `FOUND`. An object of another size is damage.
        """
        ...

    def write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        """Store each object in turn, evicting the least recently used ones to make room.

        Once an object could not be stored, none behind it is written: later objects may be of use only with those
        before them. Their outcome is `FAILED`, with `CUT_OFF` as the reason; those that are there already may be
        `KEPT`.
        """
        ...

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Delete these objects; names that aren't there are ignored."""
        ...

    def capacity(self) -> BackendCapacity: ...

    def counts(self) -> BackendCounts: ...

    def close(self) -> None:
        """Release the backend's resources in this process. Objects stay, where the medium outlives the process."""
        ...


_MAGIC = b"twinpage"
_MARK = struct.Struct("<8sHHI")
_COVERED_NUMBERS = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")
_NUMBERS = struct.Struct("<QQQ")
_NUMBERS_AT = _MARK.size
_CHECKSUM_AT = _NUMBERS_AT + 16
_NAME_AT = _NUMBERS_AT + _NUMBERS.size


def seal(name: ObjectName, digest: int, payload: Payload) -> bytes:
    """Returns the seal: the bytes that follow `payload` in the stored object. `digest` is stored in it."""
    encoded = name.encoded
    size = memoryview(payload).nbytes
    covered = _mark(len(encoded)) + _COVERED_NUMBERS.pack(size, digest)
    return covered + _CHECKSUM.pack(_checksum(covered, encoded, payload)) + encoded


def seal_bytes(name: ObjectName) -> int:
    """Returns the length of the seal of an object of this name."""
    return _NAME_AT + len(name.encoded)


def check_seal(name: ObjectName, payload: Payload, found: bytes | bytearray) -> ObjectOutcome:
    """Compare `payload` with the seal `found` after it, of the length that `name` calls for: `FOUND` or `DAMAGED`."""
    encoded, covered = found[_NAME_AT:], found[:_CHECKSUM_AT]
    size, digest, checksum = _NUMBERS.unpack_from(found, _NUMBERS_AT)
    same = size == memoryview(payload).nbytes and encoded == name.encoded
    if same and covered[:_NUMBERS_AT] == _mark(len(encoded)) and checksum == _checksum(covered, encoded, payload):
        return ObjectOutcome(ObjectVerdict.FOUND, digest)
    if not covered.startswith(_MAGIC):
        return damaged("it carries no seal")
    if checksum != _checksum(covered, encoded, payload):
        return damaged("its bytes do not match its checksum")
    return damaged("it is the object of another name, size or version")


def unpack(name: ObjectName, stored: bytes, into: memoryview) -> ObjectOutcome:
    """Check a whole stored object (payload and seal), and copy its payload into `into` if it is `FOUND`.

    `into` has exactly the expected payload's size; an object of another size is `DAMAGED`.
    """
    size = into.nbytes
    if len(stored) != size + seal_bytes(name):
        return wrong_size(len(stored), size + seal_bytes(name))
    view = memoryview(stored)
    outcome = check_seal(name, view[:size], stored[size:])
    if outcome.ok:
        into.cast("B")[:] = view[:size]
    return outcome


def damaged(reason: str) -> ObjectOutcome:
    """Returns the outcome `DAMAGED`, with this reason."""
    return ObjectOutcome(ObjectVerdict.DAMAGED, reason=reason)


def wrong_size(found: int, expected: int) -> ObjectOutcome:
    """Returns the outcome of an object of `found` bytes, seal included, where `expected` were to be there."""
    return damaged(f"it has {found} bytes instead of {expected}")


@cache
def _mark(name_bytes: int) -> bytes:
    return _MARK.pack(_MAGIC, FORMAT_VERSION, name_bytes, 0)


def _checksum(covered: bytes | bytearray, encoded: bytes | bytearray, payload: Payload) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(covered + encoded))
