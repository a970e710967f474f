"""The check of a grammar: compiled before its request goes to a worker, as workers will."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from twinpool.contracts.grammar import BOUNDS, engine_error


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
