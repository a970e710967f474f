"""Block hashes of a prompt, by which the router knows what workers hold of it.

A worker hashes each page of a sequence together with the hash of the page before (`contracts.block_hash`), and names
pages by these hashes in its KV events. The router hashes a prompt in the same chain, so both speak of the same pages;
it keeps the first 64 bits of each hash. A prompt of 128k tokens has 8,192 pages of 16, so two choices of pages are
made:

- **Blocks** are of at least `BLOCK_TOKENS` tokens and lie where the position says: every fourth page of 16. What this
  router has sent is remembered by them.
- **Marks** are the pages whose hash ends in zeros: one in four of 16 tokens, as many as there are blocks. An event
  doesn't say at which position a page begins, and needn't: whether a page is a mark shows in its hash alone. The index
  of what workers say is kept by marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.block_hash import KEY_BYTES, block_hashes

BLOCK_TOKENS = 64
PAGE_TOKENS = 16
"""Tokens of a page where nothing else is configured (`cache.page_tokens`)."""
HASH_BYTES = 8
ASKED = 512
"""Most keys of a prompt that are looked up, as who holds one holds all before it: of 128k tokens every fourth block, so
that what is held is known to 256 tokens."""

KeysAndEnds = tuple[NDArray[np.uint64], NDArray[np.int32]]


def keys_of(hashes: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the keys of pages, the first 64 bits of their block hashes."""
    return np.frombuffer(b"".join(hashes), np.uint64)[:: KEY_BYTES // HASH_BYTES]


def marked(keys: NDArray[np.uint64], page_tokens: int) -> NDArray[np.bool_]:
    """Return which pages are marks: all of them where a page has `BLOCK_TOKENS` tokens or more."""
    found: NDArray[np.bool_] = (keys & np.uint64(max(1, BLOCK_TOKENS // page_tokens) - 1)) == 0
    return found


@dataclass(frozen=True)
class PrefixHashes:
    """The keys of a prompt's full pages, in order: equal keys mean equal prefixes and equal salts."""

    raw: bytes
    """`HASH_BYTES` a page."""
    page_tokens: int = PAGE_TOKENS

    @property
    def pages(self) -> NDArray[np.uint64]:
        """Keys of all full pages."""
        return np.frombuffer(self.raw, np.uint64)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return max(BLOCK_TOKENS, self.page_tokens)

    @property
    def blocks(self) -> NDArray[np.uint64]:
        """Keys of the blocks."""
        step = self.block_tokens // self.page_tokens
        return self.pages[step - 1 :: step]

    @property
    def blocks_end(self) -> int:
        """The position where the last block ends."""
        return len(self.blocks) * self.block_tokens

    @cached_property
    def asked_blocks(self) -> KeysAndEnds:
        """Blocks to look up, and the positions where they end."""
        blocks = self.blocks
        at = _spread(len(blocks))
        return blocks[at], ((at + 1) * self.block_tokens).astype(np.int32)

    @cached_property
    def asked_marks(self) -> KeysAndEnds:
        """Marks to look up, and the positions where they end."""
        at = np.flatnonzero(marked(self.pages, self.page_tokens))
        at = at[_spread(len(at))]
        return self.pages[at], ((at + 1) * self.page_tokens).astype(np.int32)


def _spread(count: int) -> NDArray[np.intp]:
    """Return at most `ASKED` of so many places, evenly spread, the last among them."""
    step = -(-count // ASKED) or 1
    return np.arange(count - 1, -1, -step)[::-1]


NO_HASHES = PrefixHashes(b"")
"""Of a prompt of which nothing is to be found anywhere."""


def prefix_hashes(tokens: Sequence[int], salt: str = "", page_tokens: int = PAGE_TOKENS) -> PrefixHashes:
    """Return the hashes of the full pages of `tokens`."""
    full = len(tokens) // page_tokens * page_tokens
    return PrefixHashes(keys_of(block_hashes(tokens[:full], page_tokens, salt)).tobytes(), page_tokens)
