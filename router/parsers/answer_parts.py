"""The parts of an answer, and the port to what finds them in its text.

A parser takes the text in pieces. What it returns depends on the characters alone and not on where pieces are cut: the
parts of all pieces, joined, are the same for every cutting. Text that may be the beginning of a mark is held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """The beginning of a call of a tool; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """A piece of the arguments of the latest call: of the text of one JSON object."""

    text: str


AnswerPart = ContentPart | ReasoningPart | CallPart | ArgumentsPart


class PartsParser(Protocol):
    """Finds parts in one answer's text."""

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece; returns what is certain by now."""

    def finish(self) -> list[AnswerPart]:
        """Return what was held back, once the text is over; called once."""


def cut_at(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Cut a text at the first of `marks`: return what stands before it, the mark, and what stands behind.

    Without a mark the second is empty, the first what no mark can begin in, and the third what is to be held back.
    """
    found = first_mark(text, marks)
    if found is None:
        end = len(text) - held_back(text, marks)
        return text[:end], "", text[end:]
    at, mark = found
    return text[:at], mark, text[at + len(mark) :]


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of one of `marks`, and not all of it."""
    longest = max(map(len, marks), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[len(text) - size :]
        if any(len(mark) > size and mark.startswith(tail) for mark in marks):
            return size
    return 0


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of `marks` begins in `text`, and which; the longest of those that begin there."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def joined(parts: Sequence[AnswerPart]) -> Iterator[AnswerPart]:
    """Yield the parts with neighbours of one kind joined, and none that is empty."""
    kept: AnswerPart | None = None
    for part in parts:
        if not isinstance(part, CallPart) and not part.text:
            continue
        if kept is not None and type(kept) is type(part) and not isinstance(kept, CallPart):
            assert not isinstance(part, CallPart)
            kept = type(kept)(kept.text + part.text)
            continue
        if kept is not None:
            yield kept
        kept = part
    if kept is not None:
        yield kept


class ArgumentsOfCalls:
    """Gives a call that has ended without arguments an empty object: models may write nothing there, and clients read
    arguments as JSON."""

    def __init__(self) -> None:
        self._waiting = False
        """Whether the latest call has no arguments yet."""

    def take(self, parts: Sequence[AnswerPart], *, stopped: bool) -> Iterator[AnswerPart]:
        """Yield the answer's next parts, with what is missing before them. `stopped`: whether they are the last, of an
        answer that wasn't cut off."""
        for part in parts:
            if self._waiting and not isinstance(part, ArgumentsPart):
                yield ArgumentsPart("{}")
            if isinstance(part, CallPart):
                self._waiting = True
            elif not isinstance(part, ArgumentsPart) or part.text.strip():
                self._waiting = False
            yield part
        if self._waiting and stopped:
            self._waiting = False
            yield ArgumentsPart("{}")
