"""Literals of grammars in Lark's notation."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    """Return the literal of a text."""
    return json.dumps(text, ensure_ascii=False)
