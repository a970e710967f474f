"""Parsers of calls that are written as JSON objects: between tags (Hermes, Qwen), or as the whole answer (Llama 3).

What stands in the place of a call and is none stays content, with its tags, unless its name was told already.
"""

from __future__ import annotations

from twinpool.router.parsers.answer_parts import AnswerPart, ContentAround, cut_at
from twinpool.router.parsers.call_object import CallObject


class TaggedJsonCalls:
    """Implements `router.parsers.answer_parts.PartsParser` for objects between `begin` and `end`, which are part of an
    object where they stand in its strings."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._held = ""
        self._content = ContentAround()
        self._object: CallObject | None = None

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and (self._outside(parts) if self._object is None else self._inside(self._object, parts)):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        call, self._object = self._object, None
        if call is None:
            self._content.take(self._held, parts)
        elif not call.told:
            self._content.take(self._begin + "".join(call.raw) + self._held, parts)
        self._held = ""
        self._content.finish(parts)
        return parts

    def _outside(self, parts: list[AnswerPart]) -> bool:
        """Read up to the next call; returns whether there is one."""
        before, mark, self._held = cut_at(self._held, (self._begin,))
        self._content.take(before, parts)
        if mark:
            self._object = CallObject()
        return bool(mark)

    def _inside(self, call: CallObject, parts: list[AnswerPart]) -> bool:
        """Read on in a call, or from its object's end to its end tag; returns whether there may be more to read."""
        if not (call.done or call.broken):
            used, found = call.feed(self._held)
            self._held = self._held[used:]
            if found:
                self._content.called()
                parts += found
        if call.broken and not call.told:
            self._content.take(self._begin + "".join(call.raw), parts)
            self._object = None
            return True
        if not (call.done or call.broken):
            return False
        _, mark, self._held = cut_at(self._held, (self._end,))
        if mark:
            self._object = None
        return bool(mark)


class WholeJsonCalls:
    """Implements `router.parsers.answer_parts.PartsParser` for answers that are calls from their first character on,
    maybe behind one of `marks`: objects, with semicolons or whitespace between them. Any other answer is content."""

    def __init__(self, marks: tuple[str, ...] = ()) -> None:
        self._marks = marks
        self._held = ""
        self._content = ContentAround()
        self._object: CallObject | None = None
        self._plain = False
        """Whether the rest is content."""

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and not self._plain and self._advance(parts):
            pass
        if self._plain:
            self._content.take(self._held, parts)
            self._held = ""
        return parts

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._object is None:
            self._content.take(self._held, parts)
        elif not self._object.told:
            self._content.take("".join(self._object.raw) + self._held, parts)
        self._held = ""
        self._content.finish(parts)
        return parts

    def _advance(self, parts: list[AnswerPart]) -> bool:
        if self._object is None:
            return self._begin(parts)
        used, found = self._object.feed(self._held)
        self._held = self._held[used:]
        if found:
            self._content.called()
            parts += found
        if self._object.broken:
            if not self._object.told:
                self._content.take("".join(self._object.raw), parts)
            self._plain = True
        if self._object.done or self._object.broken:
            self._object = None
            return True
        return False

    def _begin(self, parts: list[AnswerPart]) -> bool:
        """Look for the next object; returns whether it begins here."""
        rest = self._held.lstrip(" \t\r\n;" if self._content.after_call else " \t\r\n")
        for mark in self._marks:
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
                return True
        if not rest or any(mark.startswith(rest) for mark in self._marks):
            return False
        if rest[0] == "{":
            self._held, self._object = rest, CallObject()
            return True
        self._plain = True
        return False
