"""Grammars of structured output: the engine that router and workers agree on, and the bounds of one grammar.

A grammar travels as the engine's own JSON text. The router compiles it first, and refuses what workers would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    GRAMMAR_ENGINE = f"llguidance {version('llguidance')}"
except PackageNotFoundError:
    GRAMMAR_ENGINE = "none"
"""The structured-output engine and its version."""


def engine_error(told: str) -> str:
    """Return the reason in an error of the engine's, in words for a client; `told` may be of many lines."""
    reason = told.strip().removesuffix("<non-verbose/>").strip()
    if reason.startswith("recursion limit exceeded"):
        return "it is nested too deeply"
    return _REASONS.get(reason.partition("\n")[0], reason) or "the grammar can't be followed"


_REASONS = {
    "NoExtensionBias": "no text can follow it to an end",
    "ParserTooComplex": "it is too complex: a token has too many readings",
    "LexerTooComplex": "it is too complex: its regular expressions take too many states",
}

GRAMMAR_BYTES = 256 * 1024
"""The longest grammar, in bytes of UTF-8."""

JSON_FORM = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": r"\x20?",
    "json_allow_general_unicode_escapes": True,
}
"""How JSON is written where a schema is followed, as llguidance takes it (``x-guidance``): in one line, with one blank
at most between its parts. A small model that may write more writes nothing else until its answer's length is used up.
"""

BOUNDS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""Limits of llguidance (`LLParserLimits`). Its fuel is work: about 20 ms to compile a grammar's lexemes, 14 ms for what
one mask adds to the lexer; a state takes up to 2 kB."""


def is_mark(token: Mapping[str, Any]) -> bool:
    """Whether an added token of a `tokenizer.json` is a mark, which grammars name by its id: it is special, or named
    ``<...>`` or ``[NAME]``, as Qwen's ``<tool_call>`` and ``<think>``, which are published with ``special: false``.
    Others are text that a vocabulary has whole: runs of blanks, words."""
    return bool(token.get("special")) or _MARK.fullmatch(token["content"]) is not None


_MARK = re.compile(r"<(?!0x[0-9A-Fa-f]{2}>).*>|\[/?[A-Z][A-Z0-9_]*\]", re.DOTALL)
