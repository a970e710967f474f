"""Sealing of a data connection: who may open one, the key that it gets, and its bytes under that key, AES-256-GCM.

A reader draws a secret and tells its writers, in the descriptor of its memory; off the loopback that goes over a CURVE
connection, so whoever knows it holds the cluster's secret as well. Reader and writer each draw a salt for a connection:

    reader   its salt
    writer   its salt, and the proof of both that takes the secret

Both derive the connection's key from the secret and both salts, so no two connections have the same key, and what was
recorded on one opens on no other. Only the writer seals, and counts its pieces: a nonce is never used twice, and a
piece that is left out, repeated, moved or changed doesn't open.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from twinpool.contracts.errors import WireError

TAG_BYTES = 16
"""What a sealed piece is longer by."""
PIECE_BYTES = 1 << 20
"""Bytes of data in one sealed piece at most."""


class SealedStream:
    """One direction of a connection. For one thread, and for either end: pieces are counted from 0."""

    def __init__(self, key: bytes) -> None:
        self._cipher: Any = AESGCM(key)
        self._pieces = 0

    def seal(self, data: memoryview | bytes, out: memoryview, about: bytes = b"") -> memoryview:
        """Seal `data` into the start of `out`; returns what is to be sent. `about` is proven with it, and not sent."""
        size = self._cipher.encrypt_into(self._nonce(), data, about, out[: len(data) + TAG_BYTES])
        return out[:size]

    def open(self, sealed: memoryview | bytes, out: memoryview, about: bytes = b"") -> memoryview:
        """Open a piece into the start of `out`. Raises `WireError` unless it is the next one, as it was sealed."""
        try:
            size = self._cipher.decrypt_into(self._nonce(), sealed, about, out[: len(sealed) - TAG_BYTES])
        except (InvalidTag, ValueError) as error:
            raise WireError(f"a sealed piece of {len(sealed)} bytes can't be opened: {error!r}") from None
        return out[:size]

    def _nonce(self) -> bytes:
        nonce = self._pieces.to_bytes(12, "big")
        self._pieces += 1
        return nonce


class SealedBody:
    """The body of one write, at the writer: its bytes are sealed in pieces of `PIECE_BYTES`, however they come."""

    def __init__(self, stream: SealedStream, send: Callable[[Sequence[memoryview]], None], nbytes: int) -> None:
        """`send` sends what is sealed. `nbytes`: of the whole body."""
        self._stream, self._send, self._left = stream, send, nbytes
        self._out = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        self._piece = bytearray()
        """The bytes of a piece that isn't whole yet."""

    def send(self, rows: Sequence[memoryview]) -> None:
        """Send these bytes, as far as they fill pieces; the last ones of the body fill the last piece."""
        for row in rows:
            at = 0
            while at < len(row):
                whole = min(PIECE_BYTES, self._left)
                some = row[at : at + whole - len(self._piece)]
                at += len(some)
                if not self._piece and len(some) == whole:
                    self._seal(some)
                    continue
                self._piece += some
                if len(self._piece) == whole:
                    self._seal(memoryview(self._piece))
                    self._piece = bytearray()

    def _seal(self, piece: memoryview) -> None:
        self._left -= len(piece)
        self._send([self._stream.seal(piece, self._out)])


class OpenedBody:
    """The body of one write, at the reader: its bytes in portions of any size, though they come in sealed pieces."""

    def __init__(
        self, stream: SealedStream, fill: Callable[[memoryview], None], scratch: bytearray, nbytes: int
    ) -> None:
        """`fill` waits for as many bytes as its memory has. `scratch`: memory for two sealed pieces. `nbytes`: of the
        whole body."""
        self._stream, self._fill, self._left = stream, fill, nbytes
        half = PIECE_BYTES + TAG_BYTES
        self._sealed, self._opened = memoryview(scratch)[:half], memoryview(scratch)[half : 2 * half]
        self._over = self._opened[:0]
        """What was opened and not read yet."""

    def read(self, into: memoryview) -> None:
        """Read as many bytes as `into` has. Raises `WireError` where a piece can't be opened."""
        at = 0
        while at < len(into):
            if not self._over:
                size = min(PIECE_BYTES, self._left)
                self._left -= size
                sealed = self._sealed[: size + TAG_BYTES]
                self._fill(sealed)
                if size <= len(into) - at:
                    self._stream.open(sealed, into[at:])
                    at += size
                    continue
                self._over = self._stream.open(sealed, self._opened)
            some = self._over[: len(into) - at]
            into[at : at + len(some)] = some
            self._over, at = self._over[len(some) :], at + len(some)

    def drop(self) -> None:
        """Read the rest. Each piece is opened all the same, as they are counted."""
        while self._left:
            size = min(PIECE_BYTES, self._left)
            self._left -= size
            self._fill(self._sealed[: size + TAG_BYTES])
            self._stream.open(self._sealed[: size + TAG_BYTES], self._opened)
        self._over = self._opened[:0]


SALT_BYTES = 32
HELLO_BYTES = SALT_BYTES + 32
"""What a writer says first: its salt, and the proof."""


def draw_secret() -> bytes:
    """Return a new secret, or a new salt."""
    return secrets.token_bytes(SALT_BYTES)


def writer_hello(secret: bytes, reader_salt: bytes, writer_salt: bytes) -> bytes:
    """Return what a writer says to a reader with this secret."""
    return writer_salt + _derived(b"twinpool-proof", secret, reader_salt, writer_salt)


def accept_hello(secret: bytes, reader_salt: bytes, said: bytes) -> bytes | None:
    """Return the key of a connection on which a writer has `said` this; None where it doesn't know the secret."""
    salt = said[:SALT_BYTES]
    if not hmac.compare_digest(writer_hello(secret, reader_salt, salt), said):
        return None
    return connection_key(secret, reader_salt, salt)


def connection_key(secret: bytes, reader_salt: bytes, writer_salt: bytes) -> bytes:
    """Return the key of a connection with these salts, of 32 bytes."""
    return _derived(b"twinpool-pages", secret, reader_salt, writer_salt)


def _derived(purpose: bytes, secret: bytes, reader_salt: bytes, writer_salt: bytes) -> bytes:
    return hashlib.blake2b(reader_salt + writer_salt, digest_size=32, key=secret, person=purpose).digest()
