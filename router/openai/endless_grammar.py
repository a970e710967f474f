"""Grammars in Lark's notation that no finite text fits: each way through `start` needs a rule that never ends.

The engine finds no fault with ``start: "a" start``, and a model would write until its answer's length is used up. Only
what a rule is made of is looked at; where the notation has something that isn't known here, nothing is said.
"""

from __future__ import annotations

import json
import re

from twinpool.router.schemas.schema_parts import ending

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)
    |(?P<line>\n)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\n]*>|@[\w-]+|\.\.)
    |(?P<json>%(?:json|regex)\s*)
    |(?P<directive>%(?:ignore|import|declare)[^\n]*)
    |(?P<optional>[*?]|~\s*0{1,9}(?![0-9])(?:\s*\.\.\s*[0-9]*)?|\{\s*0*\s*,[^}\n]*\})
    |(?P<repeated>\+|~\s*[0-9]{1,9}(?:\s*\.\.\s*[0-9]*)?|\{[0-9, ]*\})
    |(?P<rule>[!?]?[A-Za-z_][\w-]*(?:\.-?[0-9]+)?(?:\s*\[[^\]\n]*\])?\s*:(?!:))
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<alias>->\s*\w+)
    |(?P<sign>[|()\[\]])""",
    re.VERBOSE,
)
_DEEP = 64
"""Groups within each other that are read."""
_Ways = list[list["str | _Ways"]]
"""Alternatives, each with the rules and groups that it needs."""


def is_endless(lark: str) -> bool:
    """Whether no text is whole by a grammar; False where that isn't known."""
    rules = _rules(lark)
    if rules is None or "start" not in rules:
        return False
    return "start" not in ending(rules, lambda name, ended: _missing(rules[name], ended, rules))


def _missing(ways: _Ways, ended: set[str], rules: dict[str, _Ways]) -> list[str] | None:
    """Return rules of which one must be over first, one a way; None where some way needs none."""
    found: list[str] = []
    for way in ways:
        blocking: list[str] | None = None
        for part in way:
            if isinstance(part, str):
                blocking = [part] if part in rules and part not in ended else None
            else:
                blocking = _missing(part, ended, rules)
            if blocking is not None:
                found += blocking
                break
        if blocking is None:
            return None
    return found


def _rules(lark: str) -> dict[str, _Ways] | None:
    """Read the rules; None for a notation that isn't known here."""
    rules: dict[str, _Ways] = {}
    stack: list[_Ways] = []
    at, fresh = 0, True
    while at < len(lark):
        if (found := _TOKEN.match(lark, at)) is None:
            return None
        at, kind, text = found.end(), found.lastgroup, found[0]
        if kind == "json":
            try:
                _, at = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError):
                return None
        if kind == "rule" and fresh:
            if len(stack) > 1:
                return None
            stack = [rules.setdefault(re.split(r"[.\[:\s]", text.lstrip("!?"))[0], [])]
            stack[0].append([])
        elif kind == "directive" and fresh:
            stack = []
        elif kind in ("rule", "directive") or (not stack and kind not in ("skip", "line")):
            return None
        elif kind == "name":
            stack[-1][-1].append(text)
        elif kind in ("text", "json"):
            stack[-1][-1].append([[]])
        elif kind == "optional":
            if not stack[-1][-1]:
                return None
            stack[-1][-1][-1] = [[]]
        elif text == "|":
            stack[-1].append([])
        elif kind == "sign" and text in "([":
            stack.append([[]])
            if len(stack) > _DEEP:
                return None
        elif kind == "sign":
            if len(stack) < 2:
                return None
            group = stack.pop()
            stack[-1][-1].append([[]] if text == "]" else group)
        fresh = kind == "line" or (fresh and kind == "skip")
    return rules if len(stack) < 2 else None
