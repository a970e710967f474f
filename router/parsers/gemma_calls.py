"""A parser of Gemma 4's calls: ``<|tool_call>call:NAME{key:VALUE,...}<tool_call|>``.

Values are as in JSON, but for strings, which stand between two ``<|"|>``, and keys, which are bare. Arguments become
the text of a JSON object while they are written.

The grammar of Gemma 4's calls: a JSON schema as rules of Lark's notation, as keys and strings aren't JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.router.parsers.answer_parts import (
    SPACE,
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentAround,
    SteppedParser,
    cut_at,
    quoted,
)

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


Schema = dict[str, Any]

_ANY = r"""any: string | NUMBER | "true" | "false" | "null" | any_array | any_object
any_array: "[" (any ("," any)*)? "]"
any_object: "{" (pair ("," pair)*)? "}"
pair: KEY ":" any
KEY: /[A-Za-z0-9_.$-]{1,64}/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"""
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated", "type"})
_PLAIN = ("integer", "number", "boolean", "null")


class GemmaRules:
    """The rules of calls. `as_json` gives the rule of a value that is written as JSON is."""

    def __init__(self, as_json: Callable[[Schema], str]) -> None:
        self._as_json = as_json
        self._rules: list[str] = []
        self._definitions: dict[tuple[int, str], str] = {}
        self._root: Schema = {}

    def calls(self, tools: Sequence[tuple[str, Schema]], several: bool) -> str:
        """Return the rule `calls`, of what follows the first mark, and all others.

        Raises `RequestError` for a keyword that this can't enforce.
        """
        names = []
        for name, schema in tools:
            self._root = schema
            begin, arguments = quoted(NAMED + name), self._object(schema, name)
            names.append(self._rule(f"{begin} {arguments} {quoted(CALL_END)}"))
        more = f" ({quoted(CALL)} call)*" if several else ""
        string = f"string: {quoted(QUOTE)} text\ntext[suffix={quoted(QUOTE)}]: /(?s:.*)/"
        return "\n".join((f"calls: call{more}", f"call: {' | '.join(names)}", *self._rules, string, _ANY))

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Schema, where: str) -> str:
        """Return the rule of a value."""
        if "$ref" in schema:
            return self._definition(schema, where)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._refuse_others(schema, {key}, where)
                return self._rule(" | ".join(self._value(part, where) for part in schema[key]))
        if "enum" in schema or "const" in schema:
            self._refuse_others(schema, {"enum", "const"}, where)
            words = schema.get("enum", [schema.get("const")])
            return self._rule(" | ".join(_word(word, where) for word in words))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._rule(" | ".join(self._value({**schema, "type": one}, where) for one in kind))
        if kind == "string":
            self._refuse_others(schema, set(), where)
            return "string"
        if kind in _PLAIN:
            return self._rule(self._as_json(schema))
        if kind == "array":
            self._refuse_others(schema, {"items"}, where)
            item = self._value(schema.get("items") or {}, where)
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object":
            return self._object(schema, where)
        self._refuse_others(schema, set(), where)
        return "any"

    def _definition(self, schema: Schema, where: str) -> str:
        """Return the rule of a definition, which may refer to itself."""
        self._refuse_others(schema, {"$ref"}, where)
        path = str(schema["$ref"])
        place = (id(self._root), path)
        if place not in self._definitions:
            part: Any = self._root
            for step in path.removeprefix("#/").split("/"):
                part = part.get(step) if isinstance(part, dict) else None
            if not path.startswith("#/") or not isinstance(part, dict):
                raise RequestError(f"tools: {where}: the reference {path} leads nowhere", param="tools")
            name = self._definitions[place] = f"definition_{len(self._definitions)}"
            self._rules.append(f"{name}: {self._value(part, where)}")
        return self._definitions[place]

    def _object(self, schema: Schema, where: str) -> str:
        """Return the rule of an object; its keys come in order, as templates show them."""
        known = {"properties", "required", "additionalProperties", "$defs", "definitions"}
        self._refuse_others(schema, known, where)
        properties: dict[str, Schema] = schema.get("properties") or {}
        if not properties:
            return '"{}"' if schema.get("additionalProperties") is False else "any_object"
        required = schema.get("required") or ()
        # From the last key to the first: what follows a key that is the first one told, and one that isn't.
        first = following = '"}"'
        for key in sorted(properties, key=str.lower, reverse=True):
            entry = f"{quoted(key + ':')} {self._value(properties[key], f'{where}.{key}')}"
            told, told_next = f"{entry} {following}", f'"," {entry} {following}'
            optional = key not in required
            first = self._rule(f"{told} | {first}" if optional else told)
            following = self._rule(f"{told_next} | {following}" if optional else told_next)
        return self._rule(f'"{{" {first}')

    @staticmethod
    def _refuse_others(schema: Schema, known: set[str], where: str) -> None:
        if others := schema.keys() - known - _SAYS_NOTHING:
            raise RequestError(
                f"tools: {where}: {', '.join(sorted(others))} can't be enforced as this model writes calls",
                param="tools",
            )


def _word(word: object, where: str) -> str:
    if isinstance(word, str):
        return quoted(f"{QUOTE}{word}{QUOTE}")
    if isinstance(word, dict | list):
        raise RequestError(f"tools: {where}: enum can't be enforced as this model writes calls", param="tools")
    return quoted(json.dumps(word))
