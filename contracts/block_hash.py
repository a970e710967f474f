"""Block hashes: one for each page of a sequence, over its salt and all tokens up to the page's end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def block_hashes(tokens: Sequence[int], page_tokens: int, salt: str = "") -> list[bytes]:
    """Return the block hash (16 bytes) of each page of `tokens`, in order; a last page that is partly filled has one
    too."""
    return chain_on(chain_start(salt), np.asarray(tokens, dtype="<u4").tobytes(), 4 * page_tokens)


def chain_start(salt: str) -> bytes:
    """Return the hash that stands before the first page's, the same for every sequence under `salt`."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"twinpool-chain").digest()


def chain_on(key: bytes, raw: bytes, page_bytes: int, start: int = 0) -> list[bytes]:
    """Return the block hashes of the pages of `raw` (4 bytes a token) from byte `start` on.

    `key`: the hash of the page before `start`, or `chain_start` at 0.
    """
    keys, blake2b = [], hashlib.blake2b
    for at in range(start, len(raw), page_bytes):
        key = blake2b(key + raw[at : at + page_bytes], digest_size=16).digest()
        keys.append(key)
    return keys


TOKEN_BYTES = 4
KEY_BYTES = 16
