"""Marks that are tokens, told from text that reads like them.

A model that has ``</think>`` as a token ends its reasoning with that token. Written in letters, as an answer about such
models has it, it is text. Parsers look for marks in text; so what only reads like one is broken by a character that
Unicode assigns to nothing, and made whole again in what they find.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from twinpool.router.parsers.answer_parts import AnswerPart, CallPart, held_back

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
