"""Keys of data connections: who may open one, and what its bytes are sealed with.

A reader draws a secret and tells its writers, in the descriptor of its memory; off the loopback that goes over a CURVE
connection, so whoever knows it holds the cluster's secret as well. Reader and writer each draw a salt for a connection:

    reader   its salt
    writer   its salt, and the proof of both that takes the secret

Both derive the connection's key from the secret and both salts, so no two connections have the same key, and what was
recorded on one opens on no other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SALT_BYTES = 32
HELLO_BYTES = SALT_BYTES + 32
"""What a writer says first: its salt, and the proof."""


def draw() -> bytes:
    """Return a new secret, or a new salt."""
    return secrets.token_bytes(SALT_BYTES)


def hello(secret: bytes, reader_salt: bytes, writer_salt: bytes) -> bytes:
    """Return what a writer says to a reader with this secret."""
    return writer_salt + _derived(b"twinpool-proof", secret, reader_salt, writer_salt)


def welcome(secret: bytes, reader_salt: bytes, said: bytes) -> bytes | None:
    """Return the key of a connection on which a writer has `said` this; None where it doesn't know the secret."""
    salt = said[:SALT_BYTES]
    if not hmac.compare_digest(hello(secret, reader_salt, salt), said):
        return None
    return key(secret, reader_salt, salt)


def key(secret: bytes, reader_salt: bytes, writer_salt: bytes) -> bytes:
    """Return the key of a connection with these salts, of 32 bytes."""
    return _derived(b"twinpool-pages", secret, reader_salt, writer_salt)


def _derived(purpose: bytes, secret: bytes, reader_salt: bytes, writer_salt: bytes) -> bytes:
    return hashlib.blake2b(reader_salt + writer_salt, digest_size=32, key=secret, person=purpose).digest()
