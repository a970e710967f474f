"""A parser of Gemma 4's calls: ``<|tool_call>call:NAME{key:VALUE,...}<tool_call|>``.

Values are as in JSON, but for strings, which stand between two ``<|"|>``, and keys, which are bare. Arguments become
the text of a JSON object while they are written.
"""

from __future__ import annotations

import json
import re

from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, cut_at
from twinpool.router.parsers.content_around import SPACE, ContentAround
from twinpool.router.parsers.stepped_parser import SteppedParser

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
NAMED = "call:"
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}


class _JsonText:
    """Turns an object's text outside of strings into JSON."""

    def __init__(self) -> None:
        self._open = ["{"]
        self._word = ""
        self._key, self._quoted = True, False
        """Whether a key is to come, and whether a string stood in the place of the word."""

    @property
    def done(self) -> bool:
        return not self._open

    def quoted(self) -> None:
        """Note that a string stands here."""
        self._quoted = True

    def feed(self, text: str) -> str:
        """Take text up to a string or the end; returns what it is in JSON."""
        return "".join(self._take(char) for char in text)

    def _take(self, char: str) -> str:
        if self.done:
            return ""
        if self._key and char == ":":
            word = self._ended(json.dumps(self._word.strip(SPACE), ensure_ascii=False))
            self._key = False
            return word + ": "
        if self._key and char not in "},]":
            self._word += char
            return ""
        if char in "{[" and not self._word.strip(SPACE):
            self._open.append(char)
            self._key, self._word = char == "{", ""
            return char
        if char in ",}]":
            word = "" if self._key else self._ended(self._value())
            self._word = ""
            return word + self._mark(char)
        self._word += char
        return ""

    def _mark(self, char: str) -> str:
        if char == ",":
            self._key = self._open[-1] == "{"
            return ", "
        opened = self._open.pop()
        self._key = False
        return "}" if opened == "{" else "]"

    def _value(self) -> str:
        word = self._word.strip(SPACE)
        if word in _WORDS:
            return _WORDS[word]
        return word if not word or _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)

    def _ended(self, word: str) -> str:
        """Return a word, empty where a string stood in its place."""
        quoted, self._word, self._quoted = self._quoted, "", False
        return "" if quoted else word


class GemmaCalls(SteppedParser):
    """Implements `router.parsers.answer_parts.PartsParser`. Marks are tokens of their own, which no text holds."""

    def __init__(self) -> None:
        super().__init__()
        self._content = ContentAround()
        self._in_name = self._in_string = False
        self._json: _JsonText | None = None
        """The arguments of the call that is read."""

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._json is None:
            self._content.take((CALL if self._in_name else "") + self._held, parts)
        elif self._in_string:
            parts.append(ArgumentsPart(_escaped(self._held)))
        self._held = ""
        self._content.finish(parts)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        if self._json is not None:
            return self._read_arguments(self._json, parts)
        if self._in_name:
            return self._read_name(parts)
        before, mark, self._held = cut_at(self._held, (CALL,))
        self._content.take(before, parts)
        self._in_name = bool(mark)
        return bool(mark)

    def _read_name(self, parts: list[AnswerPart]) -> bool:
        name, mark, behind = cut_at(self._held, ("{", CALL_END, CALL))
        if not mark:
            return False
        self._in_name = False
        found = name.strip(SPACE).removeprefix(NAMED)
        if mark == "{" and found and name.strip(SPACE).startswith(NAMED):
            self._content.called()
            parts += (CallPart(found), ArgumentsPart("{"))
            self._held, self._json = behind, _JsonText()
        else:
            self._content.take(CALL + name, parts)
            self._held = mark + behind
            if mark == CALL_END:
                self._content.take(mark, parts)
                self._held = behind
        return True

    def _read_arguments(self, arguments: _JsonText, parts: list[AnswerPart]) -> bool:
        text, mark, self._held = cut_at(self._held, (QUOTE,) if self._in_string else (QUOTE, CALL_END))
        if self._in_string:
            parts.append(ArgumentsPart(_escaped(text) + ('"' if mark else "")))
            self._in_string = not mark
            return bool(mark)
        parts.append(ArgumentsPart(arguments.feed(text)))
        if mark == QUOTE and not arguments.done:
            arguments.quoted()
            parts.append(ArgumentsPart('"'))
            self._in_string = True
        elif mark == CALL_END:
            self._json = None
        return bool(mark)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
