"""Incremental detokenizers: tokens to text, one token at a time, without ever cutting a character.

Most published tokenizers are byte-level: a token is a run of bytes, and text is the UTF-8 of all bytes, with U+FFFD for
bytes that aren't UTF-8. Python's incremental decoder does exactly that, so the joined pieces always equal the decode of
all tokens at once.

With other decoders (metaspace, byte fallback) a token's text depends on its neighbours. So a window of tokens is
decoded again with each new one: the last tokens whose text is already out (the context), then the pending ones. The new
text is the part of the window's text after the context's. Text that ends in U+FFFD is held back, since the next token
may complete the character, until `HELD_TOKENS` tokens are pending.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
HELD_TOKENS = 12
"""Pending tokens at which text is given out though it ends in U+FFFD."""
CONTEXT_TOKENS = 6
"""Tokens already given out that are decoded again as context."""


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text."""

    def feed(self, token: int) -> str:
        """Take the next token; returns the text that it settles, which may be empty."""

    def finish(self) -> str:
        """Return the text held back, after the last token: U+FFFD for a character that is incomplete."""


class ByteDetokenizer:
    """The detokenizer of byte-level tokenizers; `token_bytes` gives a token's bytes, empty for a skipped one."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = _Utf8Decoder("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """The detokenizer of any other tokenizer; `decode` turns a list of tokens into text.

    `context` are the tokens before the answer: the prompt, of which the last `CONTEXT_TOKENS` are used.
    """

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
    """The detokenizer of a checkpoint without a tokenizer: every token's text is empty."""

    def feed(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
