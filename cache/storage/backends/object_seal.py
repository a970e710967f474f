"""The seal of a stored object, by which a reader knows it from any other bytes under the same name.

    payload (n bytes) | magic 8 | version u16 | name length u16 | zero u32 | n u64 | digest u64 | checksum u64 | name

The seal follows the payload, so that reading a file into a page copies aligned memory (a header in front cost a tenth
of the bandwidth). A reader knows the name it asks for and the size it expects, hence where each byte must be: a file
that is cut or too long shows by its length, one of another object by the name, flipped bits by the checksum, which
covers payload, seal and name. Numbers are little-endian. The checksum is XXH3 with 64 bits (20 GB/s and more a core,
where CRC-32 gives 4). It guards against accidents, not against an adversary who can write to the store.
"""

from __future__ import annotations

import struct
from functools import cache

import xxhash

from twinpool.cache.storage.storage_backend import FORMAT_VERSION, ObjectName, ObjectOutcome, ObjectVerdict, Payload

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
