"""Marks of a grammar as the tokens that they are in a checkpoint's vocabulary.

Grammars of calls are made and checked with marks as text. A mark that is a token (`contracts.grammar.is_mark`) is no
text to llguidance, which knows it by its id: ``<[200005]>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

_UNTIL = re.compile(r'(\w+)\[suffix=("(?:[^"\\]|\\.)*")\]: (/\(\?s:\.\*\)/)')
"""A rule that takes text up to a mark: its name, the mark and the text."""
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/|%json ')
"""A literal, a regular expression, or the beginning of a schema."""


def with_special_marks(grammar: str, tokens: Mapping[str, int]) -> str:
    """Return a grammar with those marks in its own rules that are `tokens`, each by its id.

    `grammar` is the text of one of llguidance's with Lark rules first; the grammars that they name aren't changed.
    """
    tree = json.loads(grammar)
    lark = tree["grammars"][0].get("lark_grammar")
    if lark is None or not tokens:
        return grammar
    marks = re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")
    lark = _UNTIL.sub(lambda found: _until(found, marks), lark)
    tree["grammars"][0]["lark_grammar"] = "".join(_pieces(lark, marks, tokens))
    return json.dumps(tree)


def _pieces(lark: str, marks: re.Pattern[str], tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield the text of the rules, with other literals."""
    at = 0
    while (found := _PIECE.search(lark, at)) is not None:
        yield lark[at : found.start()]
        end = found.end()
        if found[0].startswith("%json"):
            _, end = json.JSONDecoder().raw_decode(lark, end)
        piece = lark[found.start() : end]
        yield _literal(piece, marks, tokens) if piece.startswith('"') else piece
        at = end
    yield lark[at:]


def _until(found: re.Match[str], marks: re.Pattern[str]) -> str:
    name, mark, text = found.groups()
    if (first := marks.search(json.loads(mark))) is None:
        return found[0]
    before = json.dumps(json.loads(mark)[: first.start()], ensure_ascii=False)
    rest = json.dumps(json.loads(mark)[first.start() :], ensure_ascii=False)
    if first.start() == 0:
        return f"{name}: {text} {rest}"
    # Text may have what stands before the special token, and go on.
    return f"{name}: {name}_part+ {rest}\n{name}_part[suffix={before}]: {text}"


def _literal(literal: str, marks: re.Pattern[str], tokens: Mapping[str, int]) -> str:
    pieces = [piece for piece in marks.split(json.loads(literal)) if piece]
    if not any(piece in tokens for piece in pieces):
        return literal
    written = [f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False) for piece in pieces]
    return written[0] if len(written) == 1 else f"({' '.join(written)})"
