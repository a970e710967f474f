"""Prefixes: the whole pages at the start of a sequence, as the tree and the storage tier name them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache.tags import chain_keys

TOKEN_BYTES = 4
KEY_BYTES = 16


class Prefix:
    """Whole pages of tokens under a salt (an adapter's or a tenant's: strangers share nothing).

    `raw` holds 4 bytes a token, so comparing prefixes is comparing bytes; `chain` the 16-byte chain key of each page.
    """

    __slots__ = ("_chain", "page_bytes", "page_tokens", "raw", "salt")

    def __init__(self, raw: bytes, page_tokens: int, salt: str = "", chain: bytes | None = None) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = TOKEN_BYTES * page_tokens
        self.raw = raw[: len(raw) // self.page_bytes * self.page_bytes]
        self.salt = salt
        self._chain = chain

    @classmethod
    def of(
        cls, tokens: Sequence[int], page_tokens: int, salt: str = "", chain: Sequence[bytes] | None = None
    ) -> Prefix:
        """The whole pages of `tokens`; what is left of a page isn't part of it. `chain`: their keys, where known."""
        keys = None if chain is None else b"".join(chain[: len(tokens) // page_tokens])
        return cls(np.asarray(tokens, dtype="<u4").tobytes(), page_tokens, salt, keys)

    def __len__(self) -> int:
        return len(self.raw) // self.page_bytes

    def head(self, pages: int) -> Prefix:
        """Its first `pages` pages."""
        if pages >= len(self):
            return self
        chain = None if self._chain is None else self._chain[: KEY_BYTES * pages]
        return Prefix(self.raw[: pages * self.page_bytes], self.page_tokens, self.salt, chain)

    @property
    def chain(self) -> bytes:
        """The chain keys of its pages, one after the other."""
        if self._chain is None:
            self._chain = b"".join(chain_keys(self.tokens(), self.page_tokens, self.salt))
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


def common_pages(run: bytes, raw: bytes, at: int, page_bytes: int) -> int:
    """How many leading pages of `run` lie in `raw` from byte `at` on."""
    if raw.startswith(run, at):
        return len(run) // page_bytes
    size = min(len(run), len(raw) - at)
    mine, other = np.frombuffer(run, "<u4", size // TOKEN_BYTES), np.frombuffer(raw, "<u4", size // TOKEN_BYTES, at)
    differ = np.flatnonzero(mine != other)
    same = TOKEN_BYTES * int(differ[0]) if len(differ) else size
    return same // page_bytes
