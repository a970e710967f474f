"""The fields by which clients ask for structured output, read into one grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, SGLang's `json_schema`, `regex` and `ebnf` all
become the text of one llguidance grammar, which workers compile. Nothing in a schema is ignored: the engine refuses
what it doesn't know, and what a client may tell the engine itself (``x-guidance``) is refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from contracts.errors import RequestError
from contracts.grammar import GRAMMAR_BYTES, JSON_FORM
from contracts.outside_data import read_json
from router.openai.request_fields import STRUCTURED_OUTPUT, describe

CHOICES_AT_MOST = 4096
_COMPACT = {**JSON_FORM, "whitespace_pattern": None, "whitespace_flexible": False}
_NAMED = re.compile(
    b'"(?:' + "|".join((*STRUCTURED_OUTPUT, "tools", "output_config", "format")).encode() + rb')"|\\u00[5-7]'
)
_NO_WHITESPACE = "disable_any_whitespace"
_OBJECT = {"type": "object"}
_ENGINES_OWN = "x-guidance"


def may_need_grammar(raw: bytes) -> bool:
    """Whether a body may name a field that takes a grammar, of any API. A name's letters may be escaped there."""
    return _NAMED.search(raw) is not None


class RequestedGrammar(NamedTuple):
    """A grammar, and the field of the body that asks for it; both empty where none does."""

    text: str = ""
    field: str = ""


def read_grammar(body: Mapping[str, Any]) -> RequestedGrammar:
    """Return the grammar that a body asks for.

    Raises `RequestError` naming the field that is wrong, or two that both ask for one. Whether the grammar can be
    compiled is `router.openai.grammar_check`'s to say.
    """
    found: list[RequestedGrammar] = []
    for field in STRUCTURED_OUTPUT:
        value = body.get(field)
        if value is not None and (text := _READERS[field](value, field)):
            found.append(RequestedGrammar(text, field))
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
    form = _COMPACT if value.get(_NO_WHITESPACE) is True else JSON_FORM
    for name, asked in value.items():
        if asked is None or asked is False:
            continue
        if name in _JSON_OF_VLLM:
            found[name] = _JSON_OF_VLLM[name](asked, f"{field}.{name}", form)
        elif name in _OF_VLLM:
            found[name] = _OF_VLLM[name](asked, f"{field}.{name}")
        elif name != _NO_WHITESPACE or asked is not True:
            known = ", ".join((*_JSON_OF_VLLM, *_OF_VLLM))
            raise RequestError(
                f"{field}.{name[:64]} is not supported; {known} are, and {_NO_WHITESPACE}: true", param=field
            )
    if len(found) > 1:
        raise RequestError(f"{field}: {' and '.join(found)} can't be combined: give one", param=field)
    return next(iter(found.values()), "")


def _schema(value: object, field: str, form: dict[str, Any] = JSON_FORM) -> str:
    """Read a JSON schema, an object or the JSON text of one."""
    from llguidance import LLMatcher

    schema = value
    if isinstance(value, str):
        try:
            schema = read_json(value)
        except ValueError as error:
            raise RequestError(f"{field} is not valid JSON: {error}", param=_top(field)) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{field} must be a JSON schema, an object; got {describe(schema)}", param=_top(field))
    refuse_surrogates(schema, field)
    if names_engine(schema):
        raise RequestError(f"{field}: {_ENGINES_OWN} is no keyword of JSON schema", param=_top(field))
    overrides: Any = form
    return bounded(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides), field)


def _json_object(value: object, field: str, form: dict[str, Any] = JSON_FORM) -> str:
    if value is not True and value is not False:
        raise RequestError(f"{field} must be true or false; got {describe(value)}", param=_top(field))
    return _schema(_OBJECT, field, form) if value else ""


def _regex(value: object, field: str) -> str:
    from llguidance import LLMatcher

    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} must be a regular expression, a string; got {describe(value)}", param=_top(field))
    refuse_surrogates(value, field)
    return bounded(LLMatcher.grammar_from_regex(value), field)


def _choice(value: object, field: str) -> str:
    good = isinstance(value, list) and value and all(isinstance(c, str) and c for c in value)
    if not isinstance(value, list) or not good or len(value) > CHOICES_AT_MOST:
        raise RequestError(
            f"{field} must be an array of 1 to {CHOICES_AT_MOST} strings; got {describe(value)}", param=_top(field)
        )
    refuse_surrogates(value, field)
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(value))
    return _lark(f"start: {choices}", field)


def _grammar(value: object, field: str) -> str:
    """Read a grammar: Lark's, or GBNF with its rules as ``name ::= ...``."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{field} must be a grammar, a string; got {describe(value)}", param=_top(field))
    refuse_surrogates(value, field)
    bounded(value, field)
    if named := next((name for name in ("%llguidance", _ENGINES_OWN) if name in value), ""):
        raise RequestError(f"{field}: {named} is not supported", param=_top(field))
    try:
        return _lark(any_to_lark(value), field)
    except (GbnfToLarkError, RecursionError) as error:
        raise RequestError(f"{field}: {str(error).strip()[:300]}", param=_top(field)) from None


def _lark(text: str, field: str) -> str:
    return bounded(json.dumps({"grammars": [{"lark_grammar": text}]}), field)


def bounded(grammar: str, field: str) -> str:
    """Return a grammar. Raises `RequestError` where it is too long."""
    size = len(grammar.encode())
    if size > GRAMMAR_BYTES:
        raise RequestError(f"{field} has {size} bytes; at most {GRAMMAR_BYTES} are allowed", param=_top(field))
    return grammar


def refuse_surrogates(value: object, field: str) -> None:
    """Raise `RequestError` where a text in `value` holds half of a surrogate pair, which the engine can't read."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field} holds lone surrogates, which no Unicode text has", param=_top(field)) from None


def names_engine(schema: object) -> bool:
    """Whether a schema tells the engine how to read it. No recursion: a client decides how deep a schema is."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if _ENGINES_OWN in node:
                return True
            left += node.values()
        elif isinstance(node, list):
            left += node
    return False


def _top(field: str) -> str:
    return field.partition(".")[0]


_JSON_OF_VLLM: dict[str, Callable[[object, str, dict[str, Any]], str]] = {"json": _schema, "json_object": _json_object}
_OF_VLLM: dict[str, Callable[[object, str], str]] = {
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: dict[str, Callable[[object, str], str]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
}
