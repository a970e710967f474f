"""Prefixes: the whole pages at the start of a sequence, as the tree and the storage tier name them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np

from contracts.block_hash import KEY_BYTES, TOKEN_BYTES, chain_on, chain_start


class TokenPrefix:
    """Whole pages of tokens under a salt (an adapter's or a tenant's: strangers share nothing).

    `raw` holds 4 bytes a token, so comparing prefixes is comparing bytes; `chain` the 16-byte block hash of each page.
    Keys are hashed when they are asked for; `chain` may bring those of its first pages, where they are known.
    """

    __slots__ = ("_chain", "page_bytes", "page_tokens", "raw", "salt")

    def __init__(self, raw: bytes, page_tokens: int, salt: str = "", chain: bytes = b"") -> None:
        self.page_tokens = page_tokens
        self.page_bytes = TOKEN_BYTES * page_tokens
        self.raw = raw[: len(raw) // self.page_bytes * self.page_bytes]
        self.salt = salt
        self._chain = chain

    @classmethod
    def of(
        cls, tokens: Sequence[int], page_tokens: int, salt: str = "", chain: Sequence[bytes] | None = None
    ) -> TokenPrefix:
        """The whole pages of `tokens`; what is left of a page isn't part of it. `chain`: their keys, where known."""
        keys = b"".join(chain[: len(tokens) // page_tokens]) if chain else b""
        return cls(_raw(tokens), page_tokens, salt, keys)

    def __len__(self) -> int:
        return len(self.raw) // self.page_bytes

    def head(self, pages: int) -> TokenPrefix:
        """Its first `pages` pages."""
        if pages >= len(self):
            return self
        return TokenPrefix(
            self.raw[: pages * self.page_bytes], self.page_tokens, self.salt, self._chain[: KEY_BYTES * pages]
        )

    def longer(self, tokens: Sequence[int]) -> TokenPrefix:
        """Itself and the whole pages of the `tokens` behind it: what is known of its pages isn't computed again."""
        return TokenPrefix(self.raw + _raw(tokens), self.page_tokens, self.salt, self._chain)

    def knows(self, pages: int) -> bool:
        """Whether the block hashes of its first `pages` pages needn't be computed."""
        return len(self._chain) >= KEY_BYTES * pages

    def know(self, chain: bytes) -> None:
        """Take the block hashes of its first pages from somebody who compared their tokens with his."""
        if len(chain) > len(self._chain):
            self._chain = chain

    @property
    def chain(self) -> bytes:
        """The block hashes of its pages, one after the other."""
        known = len(self._chain) // KEY_BYTES
        if known < len(self):
            key = self._chain[-KEY_BYTES:] or chain_start(self.salt)
            self._chain += b"".join(chain_on(key, self.raw, self.page_bytes, known * self.page_bytes))
        return self._chain

    def key(self, page: int) -> bytes:
        return self.chain[KEY_BYTES * page : KEY_BYTES * (page + 1)]

    def tokens(self, first: int = 0, end: int | None = None) -> Sequence[int]:
        """Tokens of pages `first .. end-1`."""
        stop = len(self) if end is None else end
        return token_ids(self.raw[first * self.page_bytes : stop * self.page_bytes])


def token_ids(raw: bytes) -> list[int]:
    """The tokens whose bytes these are."""
    tokens: list[int] = np.frombuffer(raw, dtype="<u4").tolist()
    return tokens


def _raw(tokens: Sequence[int]) -> bytes:
    """4 bytes a token, little-endian."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<u4").tobytes()
    # Over three times as fast as numpy for a list.
    words = array("I", tokens)
    if sys.byteorder != "little":
        words.byteswap()
    return words.tobytes()


def common_pages(run: bytes, raw: bytes, at: int, page_bytes: int) -> int:
    """How many leading pages of `run` lie in `raw` from byte `at` on."""
    size = min(len(run), len(raw) - at)
    word = 8 if page_bytes % 8 == 0 else TOKEN_BYTES
    mine = np.frombuffer(run, f"<u{word}", size // word)
    differ = mine != np.frombuffer(raw, f"<u{word}", size // word, at)
    first = int(differ.argmax()) if size else 0
    return (first * word if size and differ[first] else size) // page_bytes
