"""Sealing of a data connection off the loopback: AES-256-GCM with a key that no other connection has.

Only the writer seals, with a key that `transfer.net.connection_keys` derives, and counts its pieces: a nonce is never
used twice, and a piece that is left out, repeated, moved or changed doesn't open.
"""

from __future__ import annotations

from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts.errors import WireError

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
