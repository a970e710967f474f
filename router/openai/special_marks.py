"""Marks of a grammar as the special tokens that they are in a checkpoint's vocabulary.

Grammars of calls are made and checked with marks as text. A special token is no text to llguidance, which knows it by
its id: ``<[200005]>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_UNTIL = re.compile(r'\[suffix=("(?:[^"\\]|\\.)*")\]: /\(\?s:\.\*\)/')
"""The body of a rule that takes text up to a mark, and the mark."""
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|%json [^\n]*')


def with_special_marks(grammar: str, tokens: Mapping[str, int]) -> str:
    """Return a grammar with those marks in its own rules that are special `tokens`, each by its id.

    `grammar` is the text of one of llguidance's with Lark rules first; the grammars that they name aren't changed.
    """
    tree = json.loads(grammar)
    lark = tree["grammars"][0].get("lark_grammar")
    if lark is None or not tokens:
        return grammar
    marks = re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")
    lark = _UNTIL.sub(lambda found: _until(found, tokens), lark)
    tree["grammars"][0]["lark_grammar"] = _LITERAL.sub(lambda found: _literal(found[0], marks, tokens), lark)
    return json.dumps(tree)


def _until(found: re.Match[str], tokens: Mapping[str, int]) -> str:
    token = tokens.get(json.loads(found[1]))
    return found[0] if token is None else f": /(?s:.*)/ <[{token}]>"


def _literal(literal: str, marks: re.Pattern[str], tokens: Mapping[str, int]) -> str:
    if literal.startswith("%json"):
        return literal
    pieces = [piece for piece in marks.split(json.loads(literal)) if piece]
    if not any(piece in tokens for piece in pieces):
        return literal
    written = [f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False) for piece in pieces]
    return written[0] if len(written) == 1 else f"({' '.join(written)})"
