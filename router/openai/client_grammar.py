"""A client's grammar as the engine takes it: GBNF made into Lark's notation, and the schemas in it written again.

The engine reads what follows ``%json`` itself, so that each such schema is checked and rewritten as those of other
fields are. That ``%json`` stands nowhere else is made sure of: within texts and regular expressions its first character
is written by its code, so that whatever the engine takes for a schema is one that was read here. An error of the
engine's is told with its line and column in what the client sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from twinpool.contracts.outside_data import read_json
from twinpool.router.schemas.schema_parts import SchemaError

SCHEMAS_AT_MOST = 64
"""Schemas within one grammar."""
_JSON = "%json"
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<mark><[^<>\s]+>)
    |(?P<json>%json)
    |(?P<other>[^"/#<%]+|.)""",
    re.VERBOSE,
)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_SHOWN_LINES = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_RULE_NAMED = re.compile(r"Rule '([\w-]+)'")
_REGEX_PLACE = re.compile(r"regex parse error:\n    (?P<shown>[^\n]*)\n(?P<under> +)\^")


class _Piece(NamedTuple):
    """A piece of the engine's text, and where it comes from in the client's."""

    made: int
    sent: int
    moved: bool
    """Whether the client's text isn't the same here."""


class ClientGrammar(NamedTuple):
    """A grammar that a client sent, as text and as the engine takes it."""

    sent: str
    lark: str
    pieces: tuple[_Piece, ...]
    """In their order; of a grammar in GBNF none."""

    @classmethod
    def read(cls, sent: str, schema_text: Callable[[object, str], str]) -> ClientGrammar:
        """Read a grammar. `schema_text` makes the engine's schema of a client's, given its line and column. Raises
        `SchemaError` for what is neither notation, and for a schema that isn't JSON."""
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            lark = any_to_lark(sent)
        except (GbnfToLarkError, RecursionError) as error:
            raise SchemaError("", str(error).strip()[:300]) from None
        except Exception as error:  # Its errors of rules that aren't there have no class of their own.
            name = _RULE_NAMED.search(str(error))
            named = None if name is None else list(re.finditer(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", sent))
            raise SchemaError(line_and_column(sent, named[-1].start()) if named else "", f"{error}"[:300]) from None
        if _JSON not in lark:
            return cls(sent, lark, (_Piece(0, 0, False),) if lark == sent else ())
        made, pieces = _with_schemas(lark, schema_text if lark == sent else _none)
        return cls(sent, made, pieces if lark == sent else ())

    def told(self, error: str) -> str:
        """Return an error of the engine's with its place in the client's text."""
        error = _SHOWN_LINES.sub("", error).strip()
        if (found := _PLACE.match(error)) is None:
            return error
        line, column, why = int(found[1]), int(found[2]), found[3]
        at = _offset(self.lark, line, column)
        if self.pieces:
            piece = [each for each in self.pieces if each.made <= at][-1]
            return f"at {line_and_column(self.sent, piece.sent + (0 if piece.moved else at - piece.made))}: {why}"
        rule = re.findall(r"^([A-Za-z_]\w*)\s*:", self.lark[: at + 1], re.MULTILINE)
        place = self._rule_place(rule[-1]) if rule else ""
        return f"at {place}: {why}" if place else why

    def _rule_place(self, name: str) -> str:
        """The line and column of the GBNF rule that became a rule."""
        wanted = "root" if name == "start" else name.lower().replace("_", "-")
        for found in re.finditer(r"^[ \t]*([A-Za-z][\w-]*)\s*::=", self.sent, re.MULTILINE):
            if found[1].lower().replace("_", "-") == wanted:
                return line_and_column(self.sent, found.start(1))
        return ""


def line_and_column(text: str, at: int) -> str:
    """Return a place in a text in words, both counted from 1."""
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - (text.rfind(chr(10), 0, at) + 1) + 1}"


def regex_error(told: str, pattern: str) -> str:
    """Return the engine's error about a client's regular expression, with the place in that."""
    told = _SHOWN_LINES.sub("", told).strip()
    why = told.rpartition("\nerror: ")[2] if "\nerror: " in told else (_PLACE.sub(r"\3", told))
    found = _REGEX_PLACE.search(told)
    if found is None or found["shown"] not in pattern:
        return f"regular expression: {why}"
    at = pattern.index(found["shown"]) + len(found["under"]) - 4
    return f"at {line_and_column(pattern, at)}: regular expression: {why}"


def _none(schema: object, where: str) -> str:
    raise SchemaError("", f"{_JSON} is no part of GBNF")


def _offset(text: str, line: int, column: int) -> int:
    begin = 0
    for _ in range(line - 1):
        begin = text.find("\n", begin) + 1
    return min(begin + column - 1, len(text))


def _with_schemas(lark: str, schema_text: Callable[[object, str], str]) -> tuple[str, tuple[_Piece, ...]]:
    made: list[str] = []
    pieces: list[_Piece] = []
    size = at = count = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        assert found is not None or lark[at] == "\n"
        end = at + 1 if found is None else found.end()
        kind = None if found is None else found.lastgroup
        text, moved = lark[at:end], False
        if kind == "json":
            count += 1
            where = line_and_column(lark, at)
            if count > SCHEMAS_AT_MOST:
                raise SchemaError(where, f"at most {SCHEMAS_AT_MOST} schemas may be in one grammar")
            schema, end = _schema_at(lark, end, where)
            text, moved = f"{_JSON} {schema_text(schema, where)}", True
        elif _JSON in text:
            if kind == "mark":
                raise SchemaError(line_and_column(lark, at), f"{_JSON} can't be in the name of a mark")
            text, moved = _coded(text, kind or ""), True
        pieces.append(_Piece(size, at, moved))
        made.append(text)
        size += len(text)
        at = end
    return "".join(made), tuple(pieces)


def _schema_at(lark: str, at: int, where: str) -> tuple[object, int]:
    while at < len(lark) and lark[at] in " \t\r\n":
        at += 1
    try:
        _, end = json.JSONDecoder().raw_decode(lark, at)
        return read_json(lark[at:end]), end
    except (ValueError, RecursionError) as error:
        told = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(": line")[0]
        raise SchemaError(where, f"what follows {_JSON} is no JSON: {told}") from None


def _coded(text: str, kind: str) -> str:
    """Return a text, regular expression or comment that means the same and in which the engine finds no schema."""
    if kind == "comment":
        return text.replace("%", " ")
    code = r"\u0025" if kind == "text" else r"\x25"
    return re.sub(r"\\.|%", lambda found: code if found[0] in ("%", r"\%") else found[0], text, flags=re.DOTALL)
