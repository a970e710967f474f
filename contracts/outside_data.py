"""Readers of JSON and YAML from outside: either text is read, or a `ValueError` says why not.

The parsers go one call deeper for each list and object, and end with `RecursionError`, which is no `ValueError`; YAML's
has errors of its own, and a date such as 2026-99-99 ends it with one that isn't among them. What is nested nearly as
deep is read and then breaks whoever walks through it or writes it again with less of the stack left. So nesting has a
bound of its own, far above what anybody writes and far below what the stack takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_NESTED = 128
"""Lists and objects within each other."""
TOO_DEEP = f"it is nested too deeply: more than {MAX_NESTED} lists and objects within each other"


def read_json(text: str | bytes, parse: Callable[[str | bytes], Any] = json.loads) -> Any:
    """Read a JSON text with `parse`. Raises `ValueError` for anything else, and for what is nested too deeply."""
    tree = _parsed(text, parse)
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > MAX_NESTED and _too_deep(tree):  # Most texts have fewer, and need no search.
        raise ValueError(TOO_DEEP)
    return tree


def read_yaml(text: str) -> Any:
    """Read a YAML text of plain values. Raises as `read_json` does, also for a list or an object within itself."""
    import yaml  # Scripts that read JSON have the standard library only.

    try:
        tree = _parsed(text, yaml.safe_load)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if _too_deep(tree):
        raise ValueError(TOO_DEEP)
    return tree


def _parsed(text: str | bytes, parse: Callable[[Any], Any]) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _too_deep(tree: object) -> bool:
    level = [tree] if isinstance(tree, dict | list) else []
    for _ in range(MAX_NESTED):
        if not level:
            return False
        inner = [
            child
            for part in level
            for child in (part.values() if isinstance(part, dict) else part)
            if isinstance(child, dict | list)
        ]
        level = list({id(child): child for child in inner}.values())  # YAML can name one part many times.
    return bool(level)
