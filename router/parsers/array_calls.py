"""A parser of calls that are one JSON array of objects behind a mark: Nemotron Nano 2, Mistral's models of 2024."""

from __future__ import annotations

from enum import StrEnum

from twinpool.router.parsers.answer_parts import SPACE, AnswerPart, ContentAround, SteppedParser, cut_at
from twinpool.router.parsers.call_object import CallObject


class _State(StrEnum):
    OUTSIDE = "outside an array"
    BRACKET = "before an array's bracket"
    OBJECT = "before an object"
    INSIDE = "in an object"
    COMMA = "before a comma, or the array's end"


class ArrayJsonCalls(SteppedParser):
    """Implements `router.parsers.answer_parts.PartsParser` for arrays behind `begin`, maybe with `end` behind them.

    What stands in the place of a call and is none stays content, with its marks, unless its name was told already."""

    def __init__(self, begin: str, end: str = "") -> None:
        super().__init__()
        self._begin, self._end = begin, end
        self._content = ContentAround()
        self._state = _State.OUTSIDE
        self._before = ""
        """What was taken of an array since the last object."""
        self._object = CallObject()

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._state is not _State.INSIDE:
            self._content.take(self._before + self._held, parts)
        elif not self._object.told:
            self._content.take(self._before + "".join(self._object.raw) + self._held, parts)
        self._held = self._before = ""
        self._content.finish(parts)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        if not self._held:
            return False
        if self._state is _State.INSIDE:
            return self._read_object(parts)
        if self._state is _State.OUTSIDE:
            marks = (self._begin, self._end) if self._end and self._content.after_call else (self._begin,)
            before, mark, self._held = cut_at(self._held, marks)
            self._content.take(before, parts)
            if mark == self._begin:
                self._before, self._state = mark, _State.BRACKET
            return bool(mark)
        text = self._held.lstrip(SPACE)
        if not text:
            return False
        self._read_mark(text, parts)
        return True

    def _read_mark(self, text: str, parts: list[AnswerPart]) -> None:
        """Read what stands between objects; `text` is what is held, without the whitespace before it."""
        space = self._held[: len(self._held) - len(text)]
        following = _NEXT.get((self._state, text[0]))
        if following is _State.INSIDE:
            self._before += space
            self._held, self._object = text, CallObject()
        elif following is not None:
            self._before += space + text[0]
            self._held = text[1:]
        else:
            self._content.take(self._before, parts)
        if following in (None, _State.OUTSIDE):
            self._before = ""
        self._state = following or _State.OUTSIDE

    def _read_object(self, parts: list[AnswerPart]) -> bool:
        call = self._object
        used, found = call.feed(self._held)
        self._held = self._held[used:]
        if found:
            self._content.called()
            parts += found
        if call.broken and not call.told:
            self._content.take(self._before + "".join(call.raw), parts)
        if call.done or call.broken:
            self._before, self._state = "", _State.COMMA if call.done else _State.OUTSIDE
        return call.done or call.broken


_NEXT = {
    (_State.BRACKET, "["): _State.OBJECT,
    (_State.OBJECT, "{"): _State.INSIDE,
    (_State.COMMA, ","): _State.OBJECT,
    (_State.COMMA, "]"): _State.OUTSIDE,
}
"""By what is awaited and the next character, what follows."""
