"""JSON without whitespace and in ASCII, by orjson: what answers and logs are written with.

ASCII alone, as many clients take some characters beyond it for the end of a line (U+0085, U+2028), and would cut an
event of a stream there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson


def compact_json(tree: object, default: Callable[[Any], object] | None = None) -> str:
    """Return `tree` as JSON. `default` makes something of what JSON has no form for.

    Raises `TypeError` for what has no form, where there is no `default`.
    """
    try:
        written = orjson.dumps(tree, default)
        if written.isascii():
            return written.decode()
    except TypeError:  # Lone surrogates, long integers, keys that aren't text: json can write these.
        pass
    return json.dumps(tree, default=default, separators=(",", ":"))
