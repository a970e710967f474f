"""The parts of an answer, and the port to what finds them in its text.

A parser takes the text in pieces. What it returns depends on the characters alone and not on where pieces are cut: the
parts of all pieces, joined, are the same for every cutting. Text that may be the beginning of a mark is held back.

What parsers share stands here as well: content around calls, whose whitespace before a call is dropped; the base of
parsers that take one thing of a text at a time; literals of grammars in Lark's notation.

**Marks that are tokens** (`MarkTokens`) are told from text that reads like them. A model that has ``</think>`` as a
token ends its reasoning with that token. Written in letters, as an answer about such models has it, it is text. Parsers
look for marks in text; so what only reads like one is broken by a character that Unicode assigns to nothing, and made
whole again in what they find.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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


SPACE = " \t\r\n"


class ContentAround:
    """The content of one answer. Whitespace is held back until it is known what follows it."""

    def __init__(self) -> None:
        self._space = ""
        self.called_once = False
        self.after_call = False
        """Whether nothing but whitespace came since the latest call."""

    def take(self, text: str, parts: list[AnswerPart]) -> None:
        """Take text outside calls; adds what is certain to `parts`."""
        if self.after_call:
            text = text.lstrip(SPACE)
        told = text.rstrip(SPACE)
        if told:
            parts.append(ContentPart(self._space + told))
            self._space, self.after_call = "", False
        self._space += text[len(told) :]

    def called(self) -> None:
        """Note that a call stands here."""
        self._space, self.called_once, self.after_call = "", True, True

    def finish(self, parts: list[AnswerPart]) -> None:
        """Take the end of the answer: whitespace at the end of one without calls is content."""
        if not self.called_once and self._space:
            parts.append(ContentPart(self._space))
        self._space = ""


class SteppedParser(ABC):
    """The base of parsers that are `router.parsers.answer_parts.PartsParser`s by steps."""

    def __init__(self) -> None:
        self._held = ""
        """Text of which it isn't known yet what it is."""

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece; returns what is certain by now."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[AnswerPart]) -> bool:
        """Take the next thing from the held text; False where more is needed."""


GUARD = "\ufdd0"


class MarkTokens:
    """The text of one answer for a parser that looks for marks, of which `tokens` are tokens of the model."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._marks = tuple(tokens)
        names = sorted(tokens, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._noted: deque[tuple[int, bool]] = deque()
        """Characters that are still to be shown, by piece, and whether they are a mark's."""
        self._held = ""
        """Text that may be the beginning of what reads like a mark."""

    def note(self, text: str, mark: str | None) -> None:
        """Note the text of a token; `mark`: the one that it is, which the text ends with. None: of any other."""
        if self._names is None or not text:
            return
        of_mark = len(mark) if mark is not None and text.endswith(mark) else 0
        if of_mark < len(text):
            self._noted.append((len(text) - of_mark, False))
        if of_mark:
            self._noted.append((of_mark, True))

    def take(self, shown: str) -> str:
        """Take the next text that is shown, of what was noted; returns what the parser is given."""
        if self._names is None:
            return shown
        out: list[str] = []
        while shown and self._noted:
            size, is_mark = self._noted.popleft()
            piece, shown = shown[:size], shown[size:]
            if len(piece) < size:
                self._noted.appendleft((size - len(piece), is_mark))
            if is_mark:
                out += (self.finish(), piece)
            else:
                self._held += piece
                whole = self._broken(self._held)
                end = len(whole) - held_back(whole, self._marks)
                out.append(whole[:end])
                self._held = whole[end:]
        return "".join(out) + shown

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._broken(self._held), ""
        return held

    def _broken(self, text: str) -> str:
        if self._names is None:
            return text
        return self._names.sub(lambda name: name[0][0] + GUARD + name[0][1:], text)


def made_whole(parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
    """Yield parts as the model wrote them."""
    for part in parts:
        if isinstance(part, CallPart) or GUARD not in part.text:
            yield part
        else:
            yield replace(part, text=part.text.replace(GUARD, ""))


def quoted(text: str) -> str:
    """Return the literal of a text."""
    return json.dumps(text, ensure_ascii=False)
