"""The check of a grammar: compiled before its request goes to a worker, as workers will, with the place of an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from contracts.grammar import BOUNDS, engine_error

_TRIED_AT_MOST = 200
"""Parts of a schema that are compiled alone to find the one at fault."""
_OF_ONE = ("items", "additionalProperties")
_OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas: one, a list of them, or one a name."""


@lru_cache(maxsize=64)
def check_grammar(grammar: str) -> str:
    """Compile a grammar as workers will; return why that can't be done, empty where it can. Takes up to a second: to be
    called where that, and the memory it takes, hurts nobody else."""
    if not (told := _compile(grammar)):
        return ""
    schema = json.loads(grammar)["grammars"][0].get("json_schema")
    place = _place(schema, told) if schema is not None else ""
    return f"at {place}: {told}" if place else told


def _compile(grammar: str) -> str:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    bounds: dict[str, Any] = {**BOUNDS, "verbose_errors": False}
    limits = LLParserLimits(**bounds)
    _, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if told:
        return engine_error(told[0])
    beginning = LLMatcher(LLTokenizer("byte"), grammar, limits=limits, log_level=0)
    beginning.compute_bitmask()
    return engine_error(beginning.get_error()) if beginning.is_error() else ""


def _place(schema: dict[str, Any], told: str) -> str:
    """Return the path of the smallest part of `schema` that alone gives the error `told`; empty where that is all of
    it, or the error comes from more than one part."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    path, part, left = "", schema, _TRIED_AT_MOST
    while True:
        for step, child in subschemas(part):
            left -= 1
            if left < 0:
                return path
            if _compile(json.dumps({"grammars": [{"json_schema": {**shared, **child}}]})) == told:
                path, part = f"{path}.{step}" if path else step, child
                break
        else:
            return path


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas right below `schema`, each with its step of the path."""
    for key in _OF_ONE:
        if isinstance(part := schema.get(key), dict):
            yield key, part
    for key in _OF_MANY:
        parts = schema.get(key)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                yield f"{key}[{number}]", part
    for key in _OF_NAMES:
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, dict) else ():
            if isinstance(part, dict):
                yield f"{key}.{name[:64]}", part
