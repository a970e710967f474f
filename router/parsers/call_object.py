"""A call of a tool as one JSON object, read character by character: its name, and its arguments as they come.

``{"name": "f", "arguments": {...}}``; the arguments may be called ``parameters``, may come first, and may be a string
with the JSON text of an object. Arguments are passed on as they were written, from the name's end on.
"""

from __future__ import annotations

import json
from enum import StrEnum

from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _State(StrEnum):
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
        self._state = _State.BEGIN
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
        return self._state is _State.DONE

    @property
    def broken(self) -> bool:
        """Whether this is no call, or one without a name or arguments that are an object."""
        return self._state is _State.BROKEN

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
            if self._state in (_State.DONE, _State.BROKEN):
                return used, parts
        return len(text), parts

    def _read(self, char: str, parts: list[AnswerPart]) -> None:
        state = self._state
        if state is _State.IN_KEY:
            if self._in_string(char):
                return
            self._state = _State.COLON
            self._key = self._decoded()
        elif state is _State.IN_TEXT:
            if not self._in_string(char):
                self._end_text(parts)
        elif state is _State.IN_NEST:
            self._read_nest(char, parts)
        elif state is _State.IN_WORD and char not in ",}" + _SPACE:
            self._value.append(char)
        elif char in _SPACE:
            if state is _State.IN_WORD:
                self._state = _State.COMMA
        else:
            self._read_mark(char, parts)

    def _read_mark(self, char: str, parts: list[AnswerPart]) -> None:
        state = _State.COMMA if self._state is _State.IN_WORD else self._state
        if state is _State.BEGIN and char == "{":
            self._state = _State.KEY
        elif state is _State.KEY and char == '"':
            self._begin_string(_State.IN_KEY)
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.COMMA and char == ",":
            self._state = _State.KEY
        elif state in (_State.COMMA, _State.KEY) and char == "}":
            self._state = _State.DONE if self._named else _State.BROKEN
            if self.done and not self._argued:
                parts.append(ArgumentsPart("{}"))
        elif state is _State.VALUE:
            self._begin_value(char, parts)
        else:
            self._state = _State.BROKEN

    def _begin_value(self, char: str, parts: list[AnswerPart]) -> None:
        arguments = self._key in _ARGUMENTS and not self._argued
        if char == '"':
            self._begin_string(_State.IN_TEXT)
        elif char in "{[" and (char == "{" or not arguments):
            self._state, self._depth, self._quoted, self._arguing = _State.IN_NEST, 0, False, arguments
            self._read_nest(char, parts)
        elif self._key == "name" or arguments:
            self._state = _State.BROKEN
        else:
            self._state, self._value = _State.IN_WORD, [char]

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
            self._state = _State.COMMA

    def _argue(self, text: str, parts: list[AnswerPart]) -> None:
        self._argued = True
        if self._named:
            parts.append(ArgumentsPart(text))
        else:
            self._early.append(text)

    def _end_text(self, parts: list[AnswerPart]) -> None:
        self._state = _State.COMMA
        text = self._decoded()
        if self._state is _State.BROKEN:
            return
        if self._key == "name" and not self._named:
            if not text:
                self._state = _State.BROKEN
                return
            self._named = True
            parts.append(CallPart(text))
            parts.append(ArgumentsPart("".join(self._early)))
        elif self._key in _ARGUMENTS and not self._argued:
            self._argue(text, parts)

    def _begin_string(self, state: _State) -> None:
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
            self._state = _State.BROKEN
            return ""
