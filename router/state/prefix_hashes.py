"""Block hashes of prompts, by which the router knows that two prompts begin alike.

A block is `PREFIX_BLOCK_TOKENS` tokens; its hash is chained: it names every token up to the block's end, and the salt.
Workers' pages have block hashes of their own (`contracts.block_hash`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

PREFIX_BLOCK_TOKENS = 64


def prefix_hashes(tokens: Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    """The 8-byte hashes of the whole blocks of `tokens`, in order: equal hashes mean equal prefixes and equal salts."""
    if len(tokens) < PREFIX_BLOCK_TOKENS:
        return ()
    raw = array("I", tokens).tobytes()
    width = PREFIX_BLOCK_TOKENS * array("I").itemsize
    key = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    hashes = []
    for end in range(width, len(raw) + 1, width):
        key = hashlib.blake2b(raw[end - width : end], digest_size=8, key=key).digest()
        hashes.append(key)
    return tuple(hashes)
