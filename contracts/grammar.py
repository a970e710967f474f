"""Grammars of structured output: the engine that router and workers agree on, and the bounds of one grammar.

A grammar travels as the engine's own JSON text. The router compiles it first, and refuses what workers would.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    GRAMMAR_ENGINE = f"llguidance {version('llguidance')}"
except PackageNotFoundError:
    GRAMMAR_ENGINE = "none"
"""The structured-output engine and its version."""

GRAMMAR_BYTES = 256 * 1024
"""The longest grammar, in bytes of UTF-8."""

BOUNDS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""Limits of llguidance (`LLParserLimits`). Its fuel is work: about 20 ms to compile a grammar's lexemes, 14 ms for what
one mask adds to the lexer; a state takes up to 2 kB."""
