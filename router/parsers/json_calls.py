"""Parsers of calls that are written as JSON: objects between tags (Hermes, Qwen), or as the whole answer (Llama 3), and
one array of objects behind a mark (Nemotron Nano 2, Mistral's models of 2024).

What stands in the place of a call and is none stays content, with its tags, unless its name was told already.

A call (`CallObject`) is one JSON object, read character by character: its name, and its arguments as they come.
``{"name": "f", "arguments": {...}}``; the arguments may be called ``parameters``, may come first, and may be a string
with the JSON text of an object. Arguments are passed on as they were written, from the name's end on.
"""

from __future__ import annotations

import json
from enum import StrEnum

from twinpool.router.parsers.answer_parts import (
    SPACE,
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentAround,
    SteppedParser,
    cut_at,
)

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _ObjectState(StrEnum):
    BEGIN = "before the object"
    KEY = "before a key, or the end"
    IN_KEY = "in a key"
    COLON = "before a colon"
    VALUE = "before a value"
    IN_TEXT = "in a value that is a string"
    IN_NEST = "in a value that is an object or an array"
    IN_WORD = "in a number or a word"
    COMMA = "before a comma, or the end"
    DONE = "behind the object"
    BROKEN = "in what is no call"


class CallObject:
    """The reader of one object."""

    def __init__(self) -> None:
        self.raw: list[str] = []
        """All characters so far."""
        self._state = _ObjectState.BEGIN
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = False
        self._named = False
        self._early: list[str] = []
        """Arguments that came before the name."""
        self._argued = self._arguing = False

    @property
    def done(self) -> bool:
        return self._state is _ObjectState.DONE

    @property
    def broken(self) -> bool:
        """Whether this is no call, or one without a name or arguments that are an object."""
        return self._state is _ObjectState.BROKEN

    @property
    def told(self) -> bool:
        """Whether the call's name was told: there is no way back."""
        return self._named

    def feed(self, text: str) -> tuple[int, list[AnswerPart]]:
        """Read on; returns how many characters were taken, all unless the object has ended or is broken, and what they
        say."""
        parts: list[AnswerPart] = []
        for used, char in enumerate(text, 1):
            self.raw.append(char)
            self._read(char, parts)
            if self._state in (_ObjectState.DONE, _ObjectState.BROKEN):
                return used, parts
        return len(text), parts

    def _read(self, char: str, parts: list[AnswerPart]) -> None:
        state = self._state
        if state is _ObjectState.IN_KEY:
            if self._in_string(char):
                return
            self._state = _ObjectState.COLON
            self._key = self._decoded()
        elif state is _ObjectState.IN_TEXT:
            if not self._in_string(char):
                self._end_text(parts)
        elif state is _ObjectState.IN_NEST:
            self._read_nest(char, parts)
        elif state is _ObjectState.IN_WORD and char not in ",}" + _SPACE:
            self._value.append(char)
        elif char in _SPACE:
            if state is _ObjectState.IN_WORD:
                self._state = _ObjectState.COMMA
        else:
            self._read_mark(char, parts)

    def _read_mark(self, char: str, parts: list[AnswerPart]) -> None:
        state = _ObjectState.COMMA if self._state is _ObjectState.IN_WORD else self._state
        if state is _ObjectState.BEGIN and char == "{":
            self._state = _ObjectState.KEY
        elif state is _ObjectState.KEY and char == '"':
            self._begin_string(_ObjectState.IN_KEY)
        elif state is _ObjectState.COLON and char == ":":
            self._state = _ObjectState.VALUE
        elif state is _ObjectState.COMMA and char == ",":
            self._state = _ObjectState.KEY
        elif state in (_ObjectState.COMMA, _ObjectState.KEY) and char == "}":
            self._state = _ObjectState.DONE if self._named else _ObjectState.BROKEN
            if self.done and not self._argued:
                parts.append(ArgumentsPart("{}"))
        elif state is _ObjectState.VALUE:
            self._begin_value(char, parts)
        else:
            self._state = _ObjectState.BROKEN

    def _begin_value(self, char: str, parts: list[AnswerPart]) -> None:
        arguments = self._key in _ARGUMENTS and not self._argued
        if char == '"':
            self._begin_string(_ObjectState.IN_TEXT)
        elif char in "{[" and (char == "{" or not arguments):
            self._state, self._depth, self._quoted, self._arguing = _ObjectState.IN_NEST, 0, False, arguments
            self._read_nest(char, parts)
        elif self._key == "name" or arguments:
            self._state = _ObjectState.BROKEN
        else:
            self._state, self._value = _ObjectState.IN_WORD, [char]

    def _read_nest(self, char: str, parts: list[AnswerPart]) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._arguing:
            self._argue(char, parts)
        if self._depth == 0 and not self._quoted:
            self._state = _ObjectState.COMMA

    def _argue(self, text: str, parts: list[AnswerPart]) -> None:
        self._argued = True
        if self._named:
            parts.append(ArgumentsPart(text))
        else:
            self._early.append(text)

    def _end_text(self, parts: list[AnswerPart]) -> None:
        self._state = _ObjectState.COMMA
        text = self._decoded()
        if self._state is _ObjectState.BROKEN:
            return
        if self._key == "name" and not self._named:
            if not text:
                self._state = _ObjectState.BROKEN
                return
            self._named = True
            parts.append(CallPart(text))
            parts.append(ArgumentsPart("".join(self._early)))
        elif self._key in _ARGUMENTS and not self._argued:
            self._argue(text, parts)

    def _begin_string(self, state: _ObjectState) -> None:
        self._state, self._value, self._escaped = state, [], False

    def _in_string(self, char: str) -> bool:
        """Take a character of a string; False for the quotation mark that ends it."""
        if self._escaped:
            self._escaped = False
        elif char == '"':
            return False
        else:
            self._escaped = char == "\\"
        self._value.append(char)
        return True

    def _decoded(self) -> str:
        try:
            return str(json.loads(f'"{"".join(self._value)}"', strict=False))
        except ValueError:
            self._state = _ObjectState.BROKEN
            return ""


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


class _ArrayState(StrEnum):
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
        self._state = _ArrayState.OUTSIDE
        self._before = ""
        """What was taken of an array since the last object."""
        self._object = CallObject()

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._state is not _ArrayState.INSIDE:
            self._content.take(self._before + self._held, parts)
        elif not self._object.told:
            self._content.take(self._before + "".join(self._object.raw) + self._held, parts)
        self._held = self._before = ""
        self._content.finish(parts)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        if not self._held:
            return False
        if self._state is _ArrayState.INSIDE:
            return self._read_object(parts)
        if self._state is _ArrayState.OUTSIDE:
            marks = (self._begin, self._end) if self._end and self._content.after_call else (self._begin,)
            before, mark, self._held = cut_at(self._held, marks)
            self._content.take(before, parts)
            if mark == self._begin:
                self._before, self._state = mark, _ArrayState.BRACKET
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
        if following is _ArrayState.INSIDE:
            self._before += space
            self._held, self._object = text, CallObject()
        elif following is not None:
            self._before += space + text[0]
            self._held = text[1:]
        else:
            self._content.take(self._before, parts)
        if following in (None, _ArrayState.OUTSIDE):
            self._before = ""
        self._state = following or _ArrayState.OUTSIDE

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
            self._before, self._state = "", _ArrayState.COMMA if call.done else _ArrayState.OUTSIDE
        return call.done or call.broken


_NEXT = {
    (_ArrayState.BRACKET, "["): _ArrayState.OBJECT,
    (_ArrayState.OBJECT, "{"): _ArrayState.INSIDE,
    (_ArrayState.COMMA, ","): _ArrayState.OBJECT,
    (_ArrayState.COMMA, "]"): _ArrayState.OUTSIDE,
}
"""By what is awaited and the next character, what follows."""
