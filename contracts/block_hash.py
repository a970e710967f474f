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
PICTURE_KEYS = 1 << 30
"""From here on tokens of a sequence are no words of a vocabulary but keys of a picture's positions (`picture_keys`).
They are below 2**31, so that all places that have room for a token have room for them."""


def picture_keys(digest: bytes, count: int) -> list[int]:
    """Return what stands at the `count` positions of the picture with this digest in its prompt's tokens: 30 bits each,
    drawn from the digest. So all that is found by tokens tells pictures apart as it does words."""
    raw = hashlib.shake_128(digest).digest(4 * count)
    return [int(one) for one in np.frombuffer(raw, dtype="<u4") % PICTURE_KEYS + PICTURE_KEYS]


def in_vocabulary(tokens: Sequence[int], token: int) -> list[int]:
    """Return `tokens` with the placeholder `token` in place of keys of pictures, as models take them."""
    return [one if one < PICTURE_KEYS else token for one in tokens]
