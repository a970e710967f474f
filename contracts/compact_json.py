"""JSON without whitespace, by orjson: what answers and logs are written with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson


def compact_json(tree: object, default: Callable[[Any], object] | None = None) -> str:
    """Return `tree` as JSON. `default` makes something of what JSON has no form for.

    Numbers that aren't finite are null. Raises `TypeError` for what has no form, where there is no `default`.
    """
    try:
        return orjson.dumps(tree, default).decode()
    except (
        TypeError
    ):  # Lone surrogates, integers of more than 64 bits, keys that aren't text: json has a form for these.
        return json.dumps(tree, default=default, separators=(",", ":"))
