"""What answers are to follow in tests of structured output, with a judge of each that knows nothing of its engine.

200 JSON schemas judged by `jsonschema`, 60 regular expressions judged by `regex`, 20 grammars judged by `lark`. A judge
says of a whole answer whether it is valid, and of one that was cut whether it is the beginning of a valid one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jiter
import jsonschema
import regex
from lark import Lark
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF

Schema = dict[str, Any]


@dataclass(frozen=True)
class StructuredCase:
    """One thing to follow: the fields of a request's body, and the judge of its answers."""

    name: str
    body: dict[str, Any]

    def valid(self, text: str) -> bool:
        """Whether `text` is a whole answer."""
        raise NotImplementedError

    def begins(self, text: str) -> bool:
        """Whether `text` is the beginning of a whole answer."""
        raise NotImplementedError


@dataclass(frozen=True)
class SchemaCase(StructuredCase):
    schema: Schema

    def valid(self, text: str) -> bool:
        return bool(self._check().is_valid(json.loads(text)))

    def begins(self, text: str) -> bool:
        """Judged as far as it goes: what has come whole must be valid; what is open may miss what is to come."""
        if not text.strip():
            return True
        value = jiter.from_json(text.encode(), partial_mode="trailing-strings")
        open_path: list[tuple[str | int, ...]] = [()]
        node = value
        while isinstance(node, dict | list) and node:
            step = list(node)[-1] if isinstance(node, dict) else len(node) - 1
            open_path.append((*open_path[-1], step))
            node = node[step]
        return all(tuple(error.absolute_path) in open_path for error in self._check().iter_errors(value))

    def _check(self) -> Any:
        return jsonschema.Draft202012Validator(
            self.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )


@dataclass(frozen=True)
class RegexCase(StructuredCase):
    pattern: str

    def valid(self, text: str) -> bool:
        return regex.fullmatch(self.pattern, text) is not None

    def begins(self, text: str) -> bool:
        return regex.fullmatch(self.pattern, text, partial=True) is not None


@dataclass(frozen=True)
class GrammarCase(StructuredCase):
    grammar: str

    def valid(self, text: str) -> bool:
        try:
            self._parser().parse(text)
        except (UnexpectedCharacters, UnexpectedEOF):
            return False
        return True

    def begins(self, text: str) -> bool:
        try:
            self._parser().parse(text)
        except UnexpectedEOF:
            return True
        except UnexpectedCharacters as error:
            # The last terminal may be cut; the parser says which could stand there.
            patterns = {t.name: t.pattern.to_regexp() for t in self._parser().terminals}
            rest = text[error.pos_in_stream or 0 :]
            allowed = error.allowed or ()
            return any(regex.fullmatch(patterns[name], rest, partial=True) for name in allowed if name in patterns)
        return True

    def _parser(self) -> Lark:
        return Lark(self.grammar, parser="earley", lexer="dynamic_complete")


# ---------------------------------------------------------------- schemas


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def _string(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _array(items: Schema, least: int = 0, most: int = 4) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _scalars() -> Iterator[Schema]:
    yield from ({"type": kind} for kind in ("boolean", "null"))
    yield {"type": ["boolean", "null"]}
    for low, high in ((0, 9), (-5, 5), (1, 120), (1900, 2100), (-1000, -1), (100, 100), (0, 255), (7, 70_000)):
        yield {"type": "integer", "minimum": low, "maximum": high}
    for low, high in ((0, 10), (-3, 3), (99, 1001)):
        yield {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for step in (2, 5, 10):
        yield {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 1000}
    for least, most in ((0, 1), (-0.5, 0.5), (1.25, 9.75)):
        yield {"type": "number", "minimum": least, "maximum": most}
    constants: list[Any] = [5, "five", None, True, [1, 2], {"a": {"b": []}}]
    yield from ({"const": value} for value in constants)


def _strings() -> Iterator[Schema]:
    yield from (_string(most) for most in (0, 1, 5, 20))
    yield from (_string(most, minLength=least) for least, most in ((1, 1), (3, 6), (10, 12)))
    for pattern in (
        "^[a-z]+$", "^[A-Z][a-z]{2,8}$", "^[0-9]{4}-[0-9]{2}$", "^(ab|cd)+$", "^a?b*c{2}$", "^[^aeiou ]{3,5}$",
        "^#[0-9a-f]{6}$", "^\\+[1-9][0-9]{6,9}$", "^v[0-9]+\\.[0-9]+$", "^[äöüß]{1,3}$", "^[α-ω]{2,4}$", "^(?:да|нет)$",
    ):  # fmt: skip
        yield _string(20, pattern=pattern)
    yield from ({"type": "string", "format": kind} for kind in ("date", "time", "date-time", "ipv4", "uuid", "email"))


def _enums() -> Iterator[Schema]:
    yield {"enum": ["red", "green", "blue"]}
    yield {"enum": [1, 2.5, "3", None, False, [], {}]}
    yield {"enum": ["日本", "한국", "中国", "🙂", 'quo"te', "back\\slash", "new\nline", ""]}
    for count in (50, 300, 1000, 2500):
        yield {"type": "string", "enum": [f"item-{number * 7919 % 10007}-{number}" for number in range(count)]}
    yield {"enum": [number * number for number in range(500)]}
    yield {"enum": ["a" * number for number in range(1, 40)]}
    yield {"type": "string", "enum": [f"{one}{two}" for one in "abcdefgh" for two in "éèêëàâ"]}


def _arrays() -> Iterator[Schema]:
    integer: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
    for least, most in ((0, 0), (0, 1), (1, 1), (2, 5), (5, 5), (0, 8)):
        yield _array(integer, least, most)
    yield _array(_array(integer, 1, 3), 1, 3)
    yield _array(_array(_array({"type": "boolean"}, 1, 2), 1, 2), 1, 2)
    yield _array({"enum": ["a", "b", "c"]}, 3, 6)
    yield _array({"anyOf": [integer, {"type": "null"}, _string(4)]}, 2, 5)
    yield _array(_object(x=integer, y=integer), 1, 3)
    yield {"type": "array", "prefixItems": [integer, _string(5), {"type": "boolean"}], "items": False, "minItems": 3}
    yield {"type": "array", "prefixItems": [{"const": "head"}], "items": integer, "minItems": 2, "maxItems": 4}
    yield {"type": "array", "prefixItems": [integer], "items": _string(3), "minItems": 1, "maxItems": 3}
    yield _array(_string(3, pattern="^[xyz]{1,3}$"), 2, 4)


def _objects() -> Iterator[Schema]:
    integer: Schema = {"type": "integer", "minimum": -9, "maximum": 999}
    for count in (1, 2, 4, 8, 12):
        yield _object(**{f"field_{number}": integer for number in range(count)})
    yield _object(name=_string(16), age={"type": "integer", "minimum": 0, "maximum": 130}, alive={"type": "boolean"})
    yield _object(point=_object(x=integer, y=integer), label=_string(8))
    yield _object(a=_object(b=_object(c=_object(d=_object(e={"type": "null"})))))
    yield _object(**{"with space": integer, 'quo"te': integer, "back\\slash": integer, "": integer})
    yield _object(**{"naïve": integer, "名前": _string(5), "🙂": {"type": "boolean"}, "Ω": integer})
    for required in ([], ["b"], ["a", "c"]):
        properties = {"a": integer, "b": {"type": "boolean"}, "c": _string(5)}
        yield {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    yield {"type": "object", "additionalProperties": integer, "maxProperties": 3}
    many = {f"setting_{number}": integer for number in range(800)}
    yield {"type": "object", "properties": many, "additionalProperties": False}
    yield {"type": "object", "properties": {"a": integer}, "required": ["a"], "additionalProperties": {"type": "null"}}
    yield {"type": "object", "patternProperties": {"^x[0-9]$": integer}, "additionalProperties": False}
    yield {"properties": {"kind": {"const": "only typed by its keywords"}}, "type": "object", "required": ["kind"]}
    yield _object(list=_array(_object(id=integer, tags=_array({"enum": ["x", "y"]}, 0, 2)), 1, 2), total=integer)
    yield _object(title=_string(10), scores=_array({"type": "number", "minimum": 0, "maximum": 1}, 1, 3))
    yield _object(when={"type": "string", "format": "date"}, who={"type": "string", "format": "uuid"})
    yield _object(
        function={"enum": ["get_weather", "get_time", "search"]},
        arguments=_object(
            city=_string(10), unit={"enum": ["C", "F"]}, days={"type": "integer", "minimum": 1, "maximum": 7}
        ),
    )
    yield _object(
        order=_object(
            lines=_array(_object(sku={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, count=integer), 1, 3),
            ship_to=_object(street=_string(12), zip={"type": "string", "pattern": "^[0-9]{5}$"}),
            gift={"type": ["boolean", "null"]},
        )
    )


def _combined() -> Iterator[Schema]:
    integer: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
    yield {"anyOf": [integer, _string(5), {"type": "null"}]}
    yield {"anyOf": [_object(kind={"const": "a"}, n=integer), _object(kind={"const": "b"}, s=_string(5))]}
    yield {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "string", "maxLength": 3}]}
    yield {"oneOf": [_object(x=integer), _object(y=integer), _object(z=_array(integer, 1, 2))]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]}
    yield {"allOf": [_object(a=integer, b=_string(4)), {"properties": {"a": {"maximum": 50}}}]}
    yield {**_object(v={"$ref": "#/$defs/v"}), "$defs": {"v": {"anyOf": [integer, {"type": "null"}]}}}
    yield _object(a=integer, b={"$ref": "#/properties/a"})
    yield {"$defs": {"p": _object(x=integer), "q": _array({"$ref": "#/$defs/p"}, 1, 3)}, "$ref": "#/$defs/q"}
    yield {
        "definitions": {"s": _string(6)},
        **_object(one={"$ref": "#/definitions/s"}, two={"$ref": "#/definitions/s"}),
    }
    for count in (3, 6, 10):
        yield {"anyOf": [_object(**{f"kind_{number}": {"const": number}}) for number in range(count)]}
    yield _object(value={"anyOf": [{"type": "null"}, _object(inner={"anyOf": [integer, {"type": "boolean"}]})]})


def _recursive() -> Iterator[Schema]:
    integer: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
    for least, most in ((0, 1), (0, 2), (0, 3)):
        tree = {
            "type": "object",
            "properties": {"v": integer, "kids": _array({"$ref": "#/$defs/tree"}, least, most)},
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
        yield {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    chain = {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "properties": {"n": integer, "next": {"$ref": "#/$defs/chain"}},
                "required": ["n", "next"],
                "additionalProperties": False,
            },
        ]
    }
    yield {"$ref": "#/$defs/chain", "$defs": {"chain": chain}}
    expression = {
        "anyOf": [
            integer,
            {
                "type": "object",
                "properties": {
                    "op": {"enum": ["+", "-", "*"]},
                    "left": {"$ref": "#/$defs/e"},
                    "right": {"$ref": "#/$defs/e"},
                },
                "required": ["op", "left", "right"],
                "additionalProperties": False,
            },
        ]
    }
    yield {"$ref": "#/$defs/e", "$defs": {"e": expression}}
    yield {**_object(e={"$ref": "#/$defs/e"}), "$defs": {"e": expression}}
    lists = {"anyOf": [integer, _array({"$ref": "#/$defs/l"}, 0, 2)]}
    yield {"$ref": "#/$defs/l", "$defs": {"l": lists}}
    element = {
        "type": "object",
        "properties": {
            "tag": {"enum": ["div", "p", "b"]},
            "children": _array({"anyOf": [_string(6), {"$ref": "#/$defs/element"}]}, 0, 2),
        },
        "required": ["tag", "children"],
        "additionalProperties": False,
    }
    yield {"$ref": "#/$defs/element", "$defs": {"element": element}}
    yield {**element, "$defs": {"element": element}}
    even = {"anyOf": [{"type": "null"}, _array({"$ref": "#/$defs/odd"}, 1, 1)]}
    odd = _array({"$ref": "#/$defs/even"}, 1, 1)
    yield {"$ref": "#/$defs/even", "$defs": {"even": even, "odd": odd}}


def _mixed(count: int) -> Iterator[Schema]:
    """Objects put together from the schemas above, which says that keywords don't get in each other's way."""
    parts = [*_scalars(), *_strings(), *_enums(), *_arrays()]
    for number in range(count):
        chosen = [parts[(number * 17 + step * 31) % len(parts)] for step in range(2 + number % 4)]
        properties = {f"p{step}": part for step, part in enumerate(chosen)}
        required = [name for step, name in enumerate(properties) if (number >> step) % 2 == 0]
        schema: Schema = {
            "type": "object", "properties": properties, "required": required, "additionalProperties": False
        }  # fmt: skip
        yield schema if number % 3 else _array(schema, 1, 2)


SCHEMAS_COUNT = 200


def schemas() -> list[SchemaCase]:
    families = (_scalars, _strings, _enums, _arrays, _objects, _combined, _recursive)
    found = [(family.__name__[1:], schema) for family in families for schema in family()]
    found += [("mixed", schema) for schema in _mixed(SCHEMAS_COUNT - len(found))]
    return [
        SchemaCase(f"{family} {number}", _body_of(schema, number), schema)
        for number, (family, schema) in enumerate(found)
    ]


def _body_of(schema: Schema, number: int) -> dict[str, Any]:
    """Ask in each of the ways in turn; most without free whitespace, of which a small model writes a lot."""
    match number % 5:
        case 0:
            strict = {"name": "answer", "strict": True, "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": strict}}
        case 1:
            return {"guided_json": schema} if number % 2 else {"json_schema": json.dumps(schema)}
        case _:
            return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


# ---------------------------------------------------------------- regular expressions

REGEXES = r"""
[0-9]{3}-[0-9]{4}
(?:[0-9]{1,3}\.){3}[0-9]{1,3}
[a-z]{1,8}@[a-z]{1,8}\.(?:com|org)
yes|no|maybe
a
b|
a?
(?:ab){3}
a{2,4}b{0,3}c
[01]{8}
-?[0-9]{1,5}(?:\.[0-9]{1,2})?
[A-Z]{2}[0-9]{2} ?[A-Z]{3}
(?:[A-Z][a-z]{1,6} ){2}[A-Z]\.
"(?:[^"\\]|\\.){0,10}"
<b>[^<>]{1,12}</b>
\([0-9]{3}\) [0-9]{3}
(?:0|[1-9][0-9]{0,3})
(?i)hello|(?i)world
[^a-z]{3}
[\x20-\x7e]{5}
\t[a-z]\n[a-z]
(?:é|è|ê){2}
[а-я]{3,6}
[α-ωΑ-Ω]{2}
[一-三]{2}
(?:🙂|🙁){1,3}
ß{1,2}|ẞ
[à-ÿ]+?!
(?:na){1,4} batman
x=[0-9];y=[0-9];
[a-f0-9]{8}-[a-f0-9]{4}
#(?:[0-9a-fA-F]{3}){1,2}
(?:Mon|Tue|Wed|Thu|Fri)day
[0-2][0-9]:[0-5][0-9](?::[0-5][0-9])?
20[0-9]{2}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])
v[0-9]\.[0-9]\.[0-9]
https?://[a-z]{2,8}\.(?:io|net)/
[.?!]{3}
(?:a|b|c|d|e){6}
(?:a(?:b(?:c(?:d)?)?)?)
(?:(?:x|y)z){1,3}
[a-z]+ [a-z]+\.
(?:one|two|three)(?:, (?:one|two|three)){0,2}
\{"a": [0-9]\}
\[(?:[0-9](?:, [0-9]){0,3})?\]
[^\n]{1,10}\n
(?:[^,]{1,4},){2}[^,]{1,4}
\\[nrt]
\$[0-9]{1,3}(?:,[0-9]{3})?
[+-][1-9]e[0-9]
00*1
(?:10|01){4}
[aeiou][^aeiou\s][aeiou]
.{4}
(?s).{4}
(?:the|a) (?:cat|dog) (?:sat|ran)\.
A{20}
(?:[a-c]{2}-){3}[a-c]{2}
[ \t]{2}x
Chapter [IVX]{1,4}\.
""".strip("\n").splitlines()


def regexes() -> list[RegexCase]:
    fields = ("guided_regex", "regex")
    return [
        RegexCase(
            f"regex {number}",
            {"structured_outputs": {"regex": pattern}} if number % 3 == 0 else {fields[number % 2]: pattern},
            pattern,
        )
        for number, pattern in enumerate(REGEXES)
    ]


# ---------------------------------------------------------------- grammars

GRAMMARS = r"""
start: "a" start "b" | "c"

start: "(" start ")" | "[" start "]" | "x"

start: expr
expr: term (("+" | "-") term)~0..2
term: DIGIT | "(" expr ")"
DIGIT: /[0-9]/

start: pair ("," pair)~0..3
pair: KEY "=" VALUE
KEY: /[a-z]{1,4}/
VALUE: /[0-9]{1,3}/

start: "let " NAME " = " value ";"
value: NUMBER | NAME | "f(" value ")"
NAME: /[a-z]{1,3}/
NUMBER: /[1-9][0-9]?/

start: sentence
sentence: noun " " verb " " noun "."
noun: "cat" | "dog" | "the " noun
verb: "sees" | "likes"

start: "0" start "0" | "1" start "1" | "#"

start: row~1..3
row: CELL ("|" CELL)~2 "\n"
CELL: /[a-z0-9 ]{1,4}/

start: "SELECT " COLUMN ("," COLUMN)~0..2 " FROM " TABLE (" WHERE " COLUMN "=" NUMBER)?
COLUMN: /[a-d]/
TABLE: "t1" | "t2"
NUMBER: /[0-9]{1,2}/

start: json
json: NUMBER | "null" | list
list: "[" (json ("," json)~0..1)? "]"
NUMBER: /[0-9]/

start: tag
tag: "<p>" body "</p>" | "<b>" body "</b>"
body: TEXT | tag
TEXT: /[a-z ]{1,6}/

start: and
and: not (" and " not)~0..2
not: "not " not | ATOM
ATOM: /[pqr]/

start: move~1..6
move: COLUMN ROW " "
COLUMN: /[a-h]/
ROW: /[1-8]/

start: date " " time
date: YEAR "-" MONTH
time: HOUR ":" MINUTE
YEAR: /20[0-9]{2}/
MONTH: /0[1-9]|1[0-2]/
HOUR: /[01][0-9]/
MINUTE: /[0-5][0-9]/

start: "é" start "é" | "à" | "中"

start: greeting ", " NAME "!"
greeting: "Hello" | "Bonjour" | "Привет" | "你好"
NAME: /[A-Z][a-z]{1,7}/

start: "if " cond " then " stmt (" else " stmt)?
cond: VAR ("<" | ">") VAR
stmt: VAR ":=" VAR | start
VAR: /[xyz]/

start: line~2..4
line: INDENT? KEY ": " VALUE "\n"
INDENT: "  "
KEY: /[a-z]{1,5}/
VALUE: /[a-z0-9]{1,5}/

start: "S" inner "E"
inner: (A | B)~1..5
A: "aa"
B: "ab"

start: number
number: "-"? (ZERO | NONZERO) FRACTION?
ZERO: "0"
NONZERO: /[1-9][0-9]{0,4}/
FRACTION: /\.[0-9]{1,3}/
""".strip("\n").split("\n\n")


def grammars() -> list[GrammarCase]:
    fields = ("guided_grammar", "ebnf")
    return [GrammarCase(f"grammar {number}", {fields[number % 2]: text}, text) for number, text in enumerate(GRAMMARS)]


def all_cases() -> list[StructuredCase]:
    return [*schemas(), *regexes(), *grammars()]
