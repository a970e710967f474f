"""The fields by which clients ask for structured output, read into one grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, SGLang's `json_schema`, `regex` and `ebnf` all
become the text of one llguidance grammar, which workers compile. It is compiled here first, so that what the engine
refuses is said with its place in what the client sent. Nothing in a schema is ignored: what can't be followed is
refused, and so is what a client may tell the engine itself (``x-guidance``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from twinpool.contracts.errors import RequestError
from twinpool.contracts.grammar import GRAMMAR_BYTES, JSON_FORM
from twinpool.contracts.outside_data import read_json
from twinpool.router.openai.client_grammar import ClientGrammar, check_grammar, is_endless, line_and_column, regex_error
from twinpool.router.openai.json_schemas import MAX_DEPTH, TOO_DEEP, engine_fault, followed, grammar_of
from twinpool.router.openai.request_fields import MAX_CHOICES, STRUCTURED_OUTPUT, describe
from twinpool.router.schemas.fault_place import Effort
from twinpool.router.schemas.schema_parts import (
    SchemaError,
    Steps,
    first_place,
    has_surrogate,
    is_huge,
    large_place,
    shown,
    too_deep_place,
)

_COMPACT = {**JSON_FORM, "whitespace_pattern": None, "whitespace_flexible": False}
_NAMED = re.compile(
    b'"(?:' + "|".join((*STRUCTURED_OUTPUT, "tools", "output_config", "format")).encode() + rb')"|\\u00[5-7]'
)
_NO_WHITESPACE, _WHITESPACE, _OLDER_WHITESPACE = (
    "disable_any_whitespace", "whitespace_pattern", "guided_whitespace_pattern"
)  # fmt: skip
_SPACES = re.compile(r"(?:[ \t\n\r]|\\[ tnrs]|\\x(?:20|09|0[aAdD])|[\[\]()?*+|]|\?:|\{\d{1,3}(?:,\d{0,3})?\}){1,200}")
"""Regular expressions of nothing but JSON's whitespace."""
_OBJECT = {"type": "object"}
_ENGINES_OWN = "x-guidance"
_SCHEMAS_EFFORT = 1.5
"""What the schemas within one grammar may take together; 1 is as much as one schema may."""


def may_need_grammar(raw: bytes) -> bool:
    """Whether a body may name a field that takes a grammar, of any API. A name's letters may be escaped there."""
    return _NAMED.search(raw) is not None


class RequestedGrammar(NamedTuple):
    """A grammar, and the field of the body that asks for it; both empty where none does."""

    text: str = ""
    field: str = ""


def read_grammar(body: Mapping[str, Any]) -> RequestedGrammar:
    """Return the grammar that a body asks for.

    Raises `RequestError` naming the field that is wrong, and the place in it, or two that both ask for one. Takes up to
    a second, as `router.openai.client_grammar` does.
    """
    found: list[RequestedGrammar] = []
    older = body.get(_OLDER_WHITESPACE)
    form = JSON_FORM if older is None else _with_whitespace(older, _OLDER_WHITESPACE)
    for field in STRUCTURED_OUTPUT:
        value = body.get(field)
        if value is None or field == _OLDER_WHITESPACE:
            continue
        text = _GUIDED[field](value, field, form) if field in _GUIDED else _READERS[field](value, field)
        if text:
            found.append(RequestedGrammar(text, field))
    if older is not None and not any(grammar.field in _GUIDED for grammar in found):
        raise RequestError(f"{_OLDER_WHITESPACE} needs {' or '.join(_GUIDED)}", param=_OLDER_WHITESPACE)
    if len(found) > 1:
        fields = " and ".join(grammar.field for grammar in found)
        raise RequestError(f"{fields} can't be combined: give one", param=found[1].field)
    return found[0] if found else RequestedGrammar()


def _response_format(value: object, field: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise RequestError(f"{field} must be an object with a type; got {describe(value)}", param=field)
    if kind == "text":
        return ""
    if kind == "json_object":
        return _schema(_OBJECT, field)
    if kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if schema is None:
            raise RequestError(f"{field}.json_schema.schema is missing", param=field)
        return _schema(schema, f"{field}.json_schema.schema")
    raise RequestError(f"{field}: type is text, json_object or json_schema; got {describe(kind)}", param=field)


def _structured_outputs(value: object, field: str) -> str:
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object; got {describe(value)}", param=field)
    found: dict[str, str] = {}
    form, pattern = JSON_FORM, value.get(_WHITESPACE)
    if value.get(_NO_WHITESPACE) is True:
        form = _COMPACT
    elif pattern is not None:
        form = _with_whitespace(pattern, f"{field}.{_WHITESPACE}")
    for name, asked in value.items():
        if asked is None or asked is False or name == _WHITESPACE:
            continue
        if name in _JSON_OF_VLLM:
            found[name] = _JSON_OF_VLLM[name](asked, f"{field}.{name}", form)
        elif name in _OF_VLLM:
            found[name] = _OF_VLLM[name](asked, f"{field}.{name}")
        elif name != _NO_WHITESPACE or asked is not True:
            known = ", ".join((*_JSON_OF_VLLM, *_OF_VLLM))
            raise RequestError(
                f"{field}.{name[:64]} is not supported; {known} are, and {_NO_WHITESPACE}: true or {_WHITESPACE}",
                param=field,
            )
    if len(found) > 1:
        raise RequestError(f"{field}: {' and '.join(found)} can't be combined: give one", param=field)
    if pattern is not None and not found.keys() & _JSON_OF_VLLM.keys():
        raise RequestError(f"{field}.{_WHITESPACE} needs {' or '.join(_JSON_OF_VLLM)}", param=field)
    return next(iter(found.values()), "")


def _with_whitespace(pattern: object, field: str) -> dict[str, Any]:
    """Return the form of JSON with another pattern of whitespace between its parts, which must be nothing else."""
    if not isinstance(pattern, str) or not _SPACES.fullmatch(pattern):
        raise RequestError(
            f"{field} must be a regular expression of blanks, tabs and line breaks; got {describe(pattern)}",
            param=_top(field),
        )
    return {**JSON_FORM, "whitespace_pattern": pattern.replace(r"\s", r"[\x20\x0A\x0D\x09]")}


def _schema(value: object, field: str, form: dict[str, Any] = JSON_FORM) -> str:
    """Read a JSON schema, an object or the JSON text of one."""
    schema = value
    if isinstance(value, str):
        try:
            schema = read_json(value)
        except ValueError as error:
            raise RequestError(f"{field} is not valid JSON: {error}", param=_top(field)) from None
    return _schema_grammar(schema, field, form, Effort())


def _schema_grammar(schema: object, field: str, form: dict[str, Any], effort: Effort) -> str:
    """Return the grammar of a client's schema, which the engine has compiled."""
    if not isinstance(schema, dict):
        raise RequestError(f"{field} must be a JSON schema, an object; got {describe(schema)}", param=_top(field))
    refuse_unreadable(schema, field)
    _refuse_huge(schema, field)  # Of a schema that came as a text, fractions too.
    size = len(json.dumps(schema, ensure_ascii=False).encode())
    if size > GRAMMAR_BYTES:
        raise _at(large_place(schema), f"it has {size} bytes; at most {GRAMMAR_BYTES} are allowed", field)
    if (place := names_engine(schema)) is not None:
        raise _at(place, f"{_ENGINES_OWN} is no keyword of JSON schema", field)
    try:
        grammar = grammar_of(followed(schema, effort), form)
        size = len(grammar.encode())
        if size > GRAMMAR_BYTES:
            why = f"it takes {size} bytes once it is combined; at most {GRAMMAR_BYTES} are allowed"
            raise _at(large_place(schema), why, field)
        if told := check_grammar(grammar):
            raise engine_fault(schema, told, effort)
    except SchemaError as error:
        raise RequestError(f"{field} can't be followed: {error}", param=_top(field)) from None
    return grammar


def _at(steps: Steps, why: str, field: str) -> RequestError:
    place = f"at {shown(steps)}: " if steps else ""
    return RequestError(f"{field} can't be followed: {place}{why}", param=_top(field))


def _json_object(value: object, field: str, form: dict[str, Any] = JSON_FORM) -> str:
    if value is not True and value is not False:
        raise RequestError(f"{field} must be true or false; got {describe(value)}", param=_top(field))
    return _schema(_OBJECT, field, form) if value else ""


def _regex(value: object, field: str) -> str:
    from llguidance import LLMatcher

    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} must be a regular expression, a string; got {describe(value)}", param=_top(field))
    refuse_unreadable(value, field)
    grammar = bounded(LLMatcher.grammar_from_regex(value), field)
    if told := check_grammar(grammar):
        raise RequestError(f"{field} can't be followed: {regex_error(told, value)}", param=_top(field))
    return grammar


def _choice(value: object, field: str) -> str:
    good = isinstance(value, list) and value and all(isinstance(c, str) and c for c in value)
    if not isinstance(value, list) or not good or len(value) > MAX_CHOICES:
        raise RequestError(
            f"{field} must be an array of 1 to {MAX_CHOICES} strings; got {describe(value)}", param=_top(field)
        )
    refuse_unreadable(value, field)
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(value))
    return _lark(f"start: {choices}", field)


def _grammar(value: object, field: str) -> str:
    """Read a grammar: Lark's, or GBNF with its rules as ``name ::= ...``."""
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{field} must be a grammar, a string; got {describe(value)}", param=_top(field))
    refuse_unreadable(value, field)
    bounded(value, field)
    if named := next((name for name in ("%llguidance", _ENGINES_OWN) if name in value), ""):
        where = line_and_column(value, value.index(named))
        raise RequestError(f"{field}: at {where}: {named} is not supported", param=_top(field))
    effort = Effort()

    def schema_text(schema: object, where: str) -> str:
        grammar = _schema_grammar(schema, f"{field}: at {where}: %json", JSON_FORM, effort)
        if effort.spent > _SCHEMAS_EFFORT:
            raise RequestError(f"{field}: at {where}: its schemas take too much work together", param=_top(field))
        (made,) = json.loads(grammar)["grammars"]
        return json.dumps(made["json_schema"])

    try:
        grammar = ClientGrammar.read(value, schema_text)
    except SchemaError as error:
        raise RequestError(f"{field}: {error}", param=_top(field)) from None
    if is_endless(grammar.lark):
        raise RequestError(
            f"{field}: no text can follow it to an end, as every way through start needs a rule that never ends",
            param=_top(field),
        )
    text = _lark(grammar.lark, field)
    if told := check_grammar(text):
        raise RequestError(f"{field} can't be followed: {grammar.told(told)}", param=_top(field))
    return text


def _lark(text: str, field: str) -> str:
    return bounded(json.dumps({"grammars": [{"lark_grammar": text}]}), field)


def bounded(grammar: str, field: str) -> str:
    """Return a grammar. Raises `RequestError` where it is too long."""
    size = len(grammar.encode())
    if size > GRAMMAR_BYTES:
        raise RequestError(f"{field} has {size} bytes; at most {GRAMMAR_BYTES} are allowed", param=_top(field))
    return grammar


def refuse_unreadable(value: object, field: str) -> None:
    """Raise `RequestError`, with the place, for what a client sent and the engine can't read: half of a surrogate pair,
    a whole number beyond all floats, too many lists and objects within each other."""
    with suppress(orjson.JSONEncodeError):  # It refuses these, and more; to look for the place takes 50 times as long.
        orjson.dumps(value)
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        why = "it holds lone surrogates, which no Unicode text has"
        raise _at(first_place(value, has_surrogate) or (), why, field) from None
    except RecursionError:
        raise _at(too_deep_place(value, MAX_DEPTH), TOO_DEEP, field) from None
    _refuse_huge(value, field)


def _refuse_huge(value: object, field: str) -> None:
    if (place := first_place(value, is_huge)) is not None:
        raise _at(place, f"it is a number beyond {sys.float_info.max:.1e}", field)


def names_engine(schema: object) -> Steps | None:
    """Return the steps to where a schema tells the engine how to read it; None where it doesn't."""
    with suppress(orjson.JSONEncodeError):
        if _ENGINES_OWN.encode() not in orjson.dumps(schema):
            return None
    return first_place(schema, lambda place: place.step == _ENGINES_OWN)


def _top(field: str) -> str:
    return field.partition(":")[0].partition(".")[0]


_JSON_OF_VLLM: dict[str, Callable[[object, str, dict[str, Any]], str]] = {"json": _schema, "json_object": _json_object}
_GUIDED: dict[str, Callable[[object, str, dict[str, Any]], str]] = {
    "guided_json": _schema,
    "guided_json_object": _json_object,
}
_OF_VLLM: dict[str, Callable[[object, str], str]] = {
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: dict[str, Callable[[object, str], str]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
}
