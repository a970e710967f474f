"""Incremental detokenizers: tokens to text, one token at a time, without ever cutting a character.

Most published tokenizers are byte-level: a token is a run of bytes, and text is the UTF-8 of all bytes, with U+FFFD for
bytes that aren't UTF-8. Python's incremental decoder does exactly that, so the joined pieces always equal the decode of
all tokens at once.

With other decoders (metaspace) a token's text depends on its neighbours. So a window of tokens is decoded again with
each new one: the last tokens whose text is already out (the context), then the pending ones. The new text is the part
of the window's text after the context's. Text that ends in U+FFFD is held back, since the next token may complete the
character, until `HELD_TOKENS` tokens are pending.

SentencePiece's tokenizers have a token for each byte (byte fallback) beside those of text. A run of such tokens is text
if all of it is UTF-8, and one U+FFFD a byte if not. No window may begin within a run, so runs are decoded beside it.

**Stop strings** (`StopMatcher`) are matched in the text as it comes, in pieces. The rule is stated on characters, so
that it can't depend on where pieces are cut: the answer ends at the first character that completes any stop string; if
it completes several, the longest counts. Text that may be the beginning of a stop string is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
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

    def feed_all(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; returns the text that they settle."""
        return "".join([self.feed(token) for token in tokens])

    def finish(self) -> str:
        """Return the text held back, after the last token: U+FFFD for a character that is incomplete."""


class ByteDetokenizer(Detokenizer):
    """The detokenizer of byte-level tokenizers; `token_bytes` gives a token's bytes, empty for a skipped one."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = _Utf8Decoder("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._token_bytes(token))

    def feed_all(self, tokens: Sequence[int]) -> str:
        return self._decode(b"".join(map(self._token_bytes, tokens)))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """The detokenizer of any other tokenizer; `decode` turns a list of tokens into text.

    `context` are the tokens before the answer: the prompt, of which the last `CONTEXT_TOKENS` are used. `skipped` are
    tokens without text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], context: Sequence[int] = (), skipped: Collection[int] = ()
    ) -> None:
        self._decode, self._skipped = decode, skipped
        self._context = [token for token in context[-CONTEXT_TOKENS:] if token not in skipped]
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        if token in self._skipped:
            return ""
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

    def cut(self, token: int) -> str:
        """Give out the text that is held back, and have `token`, whose text is out, as the only context."""
        text = self.finish()
        self._context = [token]
        return text

    def _gained(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]


class FallbackDetokenizer(Detokenizer):
    """The detokenizer of tokenizers with byte fallback: `byte_of` has the tokens that are bytes.

    A run of bytes that isn't UTF-8 is U+FFFD a byte from where that shows: what is out before stays.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context: Sequence[int],
        skipped: Collection[int],
        byte_of: Mapping[int, int],
    ) -> None:
        self._decode, self._byte_of, self._skipped = decode, byte_of, skipped
        self._letter = next(token for token, byte in byte_of.items() if 0x20 < byte < 0x80)
        """What the window has as context instead of a run."""
        last = [token for token in context[-CONTEXT_TOKENS:] if token not in skipped]
        self._window = WindowDetokenizer(decode, [self._letter if token in byte_of else token for token in last])
        run = list(takewhile(lambda token: token in byte_of, reversed(last)))
        self._held = _unfinished(bytes(byte_of[token] for token in reversed(run)))
        """The bytes of a character that isn't complete."""
        self._damaged = False
        """Whether the run isn't UTF-8."""
        self._begins = not last
        """Whether the next token is the first of all: a blank there may have no text."""

    def feed(self, token: int) -> str:
        if token in self._skipped:
            return ""
        byte = self._byte_of.get(token)
        begins, self._begins = self._begins, False
        if byte is None:
            return self._end_run() + self._window.feed(token)
        if begins and byte == 0x20:
            self._window.cut(self._letter)
            return self._decode([token])
        before = self._window.cut(self._letter)
        self._held += bytes([byte])
        try:
            text = "" if self._damaged else _Utf8Decoder("strict").decode(self._held)
        except UnicodeDecodeError:
            self._damaged, text = True, ""
        if self._damaged:
            text = "\ufffd" * len(self._held)
        if text:
            self._held = b""
        return before + text

    def finish(self) -> str:
        return self._end_run() + self._window.finish()

    def _end_run(self) -> str:
        text = "\ufffd" * len(self._held)
        self._held, self._damaged = b"", False
        return text


def _unfinished(run: bytes) -> bytes:
    """The bytes at the end of a run of a character that isn't complete."""
    for size in range(1, min(3, len(run)) + 1):
        lead = run[-size]
        if lead & 0xC0 != 0x80:
            needed = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return run[-size:] if needed > size else b""
    return b""


class NoText(Detokenizer):
    """The detokenizer of a checkpoint without a tokenizer: every token's text is empty."""

    def feed(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class StopMatcher:
    """The matcher of one choice's text against `stops`; `include` leaves the matched string in the text.

    `matched` is the stop string that was found, None until then.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; returns the text that may be shown. After a match nothing more may be."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
                first = (start + len(stop), start, stop)
        if first is not None:
            end, start, self.matched = first
            self._held = ""
            return buffer[: end if self._include else start]
        keep = self._may_begin(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return the held text, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - size :]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0
