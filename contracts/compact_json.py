"""JSON without whitespace and in ASCII, by orjson, for answers and logs; and the server-sent events that carry it.

ASCII alone, as many clients take some characters beyond it for the end of a line (U+0085, U+2028), and would cut an
event of a stream there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import orjson


def compact_json(tree: object, default: Callable[[Any], object] | None = None) -> str:
    """Return `tree` as JSON. `default` makes something of what JSON has no form for.

    Raises `TypeError` for what has no form, where there is no `default`.
    """
    try:
        written = orjson.dumps(tree, default)
        if written.isascii():
            return written.decode()
    except TypeError:  # Lone surrogates, long integers, keys that aren't text: json can write these.
        pass
    return json.dumps(tree, default=default, separators=(",", ":"))


class Pieces(Protocol):
    """A part of an answer that is made as it is sent, a piece at a time."""

    def __len__(self) -> int:
        """Its bytes."""

    def __iter__(self) -> Iterator[bytes]: ...


def joined(parts: Iterable[bytes | Pieces]) -> bytes:
    """The parts of an answer in one piece."""
    return b"".join(piece for part in parts for piece in ((part,) if isinstance(part, bytes) else part))


DATA, END, DONE = "data: ", "\n\n", b"[DONE]"
"""The begin of a server-sent event without a kind, its end, and the data of the last event of OpenAI's streams."""


def sse_event(data: str | bytes, kind: str = "") -> bytes:
    """Return the server-sent event with this data, which is one line, and of this kind."""
    line = data.encode() if isinstance(data, str) else data
    return b"".join((f"event: {kind}\n{DATA}".encode() if kind else DATA.encode(), line, END.encode()))


class SseReader:
    """The data of a stream's server-sent events, each in one line, whose bytes come in pieces."""

    _line = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that have come to their end with these bytes."""
        *lines, self._line = (self._line + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
