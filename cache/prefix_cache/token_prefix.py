"""Prefixes: the whole pages at the start of a sequence, by which the tree and storage find state."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np

from twinpool.contracts.block_hash import KEY_BYTES, TOKEN_BYTES, chain_on, chain_start


class TokenPrefix:
    """Whole pages of tokens under a salt (of an adapter or a tenant: prefixes of different salts share nothing).

    `raw` holds 4 bytes a token, so comparing prefixes is comparing bytes; `chain` holds the 16-byte block hash of each
    page. Block hashes are computed when they are asked for; the argument `chain` gives those of the first pages, where
    they are known already.
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
        """Returns the whole pages of `tokens`, without a last page that isn't full.

        `chain`: block hashes of the first pages, where they are known.
        """
        keys = b"".join(chain[: len(tokens) // page_tokens]) if chain else b""
        return cls(_raw(tokens), page_tokens, salt, keys)

    def __len__(self) -> int:
        return len(self.raw) // self.page_bytes

    def head(self, pages: int) -> TokenPrefix:
        """Returns the prefix of the first `pages` pages, with their known block hashes."""
        if pages >= len(self):
            return self
        return TokenPrefix(
            self.raw[: pages * self.page_bytes], self.page_tokens, self.salt, self._chain[: KEY_BYTES * pages]
        )

    def longer(self, tokens: Sequence[int]) -> TokenPrefix:
        """Returns this prefix extended by the whole pages of the following `tokens`; known block hashes are kept."""
        return TokenPrefix(self.raw + _raw(tokens), self.page_tokens, self.salt, self._chain)

    def knows(self, pages: int) -> bool:
        """Whether the block hashes of the first `pages` pages are known, so that `chain` needn't compute them."""
        return len(self._chain) >= KEY_BYTES * pages

    def know(self, chain: bytes) -> None:
        """Take over block hashes of the first pages. The caller has found the tokens of these pages to be the same."""
        if len(chain) > len(self._chain):
            self._chain = chain

    @property
    def chain(self) -> bytes:
        """The block hashes of all pages, 16 bytes each, one after the other."""
        known = len(self._chain) // KEY_BYTES
        if known < len(self):
            key = self._chain[-KEY_BYTES:] or chain_start(self.salt)
            self._chain += b"".join(chain_on(key, self.raw, self.page_bytes, known * self.page_bytes))
        return self._chain

    def key(self, page: int) -> bytes:
        """Returns the block hash of page number `page`."""
        return self.chain[KEY_BYTES * page : KEY_BYTES * (page + 1)]

    def tokens(self, first: int = 0, end: int | None = None) -> Sequence[int]:
        """Returns the tokens of pages `first .. end-1`."""
        stop = len(self) if end is None else end
        return token_ids(self.raw[first * self.page_bytes : stop * self.page_bytes])


def token_ids(raw: bytes) -> list[int]:
    """Returns the tokens whose bytes `raw` are, 4 bytes each, little-endian."""
    tokens: list[int] = np.frombuffer(raw, dtype="<u4").tolist()
    return tokens


def _raw(tokens: Sequence[int]) -> bytes:
    """Returns the tokens as bytes: 4 bytes each, little-endian."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<u4").tobytes()
    # Over three times as fast as numpy for a list.
    words = array("I", tokens)
    if sys.byteorder != "little":
        words.byteswap()
    return words.tobytes()


def common_pages(run: bytes, raw: bytes, at: int, page_bytes: int) -> int:
    """Returns how many leading pages of `run` are the same as those of `raw` from byte `at` on."""
    size = min(len(run), len(raw) - at)
    word = 8 if page_bytes % 8 == 0 else TOKEN_BYTES
    mine = np.frombuffer(run, f"<u{word}", size // word)
    differ = mine != np.frombuffer(raw, f"<u{word}", size // word, at)
    first = int(differ.argmax()) if size else 0
    return (first * word if size and differ[first] else size) // page_bytes
