"""Tokens to text, one at a time, without ever cutting a character.

Most published tokenizers are byte-level: a token is a run of bytes, and text is the UTF-8 of all bytes, with U+FFFD for
what isn't UTF-8. Python's incremental decoder does exactly that, so joined pieces equal the whole-text decode, always.

Other decoders (metaspace, byte fallback) depend on neighbours. There a window of tokens is decoded again with each new
one: `context` tokens whose text is already out, then the pending ones; what the window gained is the new text. It is
held while it ends in U+FFFD, since the next token may complete the character, but not beyond `HELD_TOKENS`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

HELD_TOKENS = 12
CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def feed(self, token: int) -> str:
        """The text that is certain after `token`; may be empty."""

    def finish(self) -> str:
        """The rest: U+FFFD for a character that never came to its end."""


class ByteDetokenizer:
    """For byte-level tokenizers; `token_bytes` gives a token's bytes (none for one that is skipped)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer; `decode` turns a list of tokens into text. `context`: the prompt's last tokens."""

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(context[-CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        self._pending.append(token)
        text = self._gained()
        if not text or (text.endswith("\ufffd") and len(self._pending) < HELD_TOKENS):
            return ""
        self._context = self._pending[-CONTEXT_TOKENS:]
        self._pending = []
        return text

    def finish(self) -> str:
        text = self._gained() if self._pending else ""
        self._pending = []
        return text

    def _gained(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]


class NoText:
    """For a checkpoint without a tokenizer: tokens in, tokens out."""

    def feed(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
