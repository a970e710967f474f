"""The check of a grammar: compiled before its request goes to a worker, as workers will."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from contracts.grammar import BOUNDS, engine_error

_OF_ONE = ("items", "additionalProperties")
_OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas: one, a list of them, or one a name."""


@lru_cache(maxsize=64)
def check_grammar(grammar: str) -> str:
    """Compile a grammar as workers will; return why that can't be done, empty where it can. Takes up to a second: to be
    called where that, and the memory it takes, hurts nobody else."""
    return why_not_compiled(grammar)


def why_not_compiled(grammar: str) -> str:
    """Return what `check_grammar` does, and remember nothing."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    bounds: dict[str, Any] = {**BOUNDS, "verbose_errors": False}
    limits = LLParserLimits(**bounds)
    _, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if told:
        return engine_error(told[0])
    beginning = LLMatcher(LLTokenizer("byte"), grammar, limits=limits, log_level=0)
    beginning.compute_bitmask()
    return engine_error(beginning.get_error()) if beginning.is_error() else ""


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
