"""The place of a fault that shows in a whole schema alone: no value fits it, or the engine refuses what becomes of it.

The schema is read from its beginning, keyword by keyword. The fault is where it first fails: that keyword is named, or,
within its value, the schema and keyword there. Each try is a rewriting of its own, so that they are few (the keywords
are halved again and again), and what they cost together is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twinpool.router.schemas.schema_parts import Schema, SchemaError, SchemaParts, Step, Steps, subparts

MAX_TRIES = 48
"""Schemas that are tried to find one fault."""
MAX_EFFORT = 2.0
"""What those may cost: as much as two schemas that take as much as one may."""
_ALWAYS = frozenset({"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions"})
"""Keywords that say nothing about values themselves."""


@dataclass(slots=True)
class Effort:
    """What work on schemas took: 1 is as much as one may take."""

    spent: float = 0.0


_FIRST = frozenset({"type", "required", "minItems", "minProperties"})
"""Keywords that are at fault only where another one, which is then named, leaves nothing that they could ask for."""


def fault_place(schema: Schema, fails: Callable[[Schema], bool], effort: Effort) -> Steps:
    """Return the steps to the keyword with which `schema` begins to fail. `fails` charges `effort` for each try."""
    steps: Steps = ()
    seen: set[Steps] = {()}
    end = effort.spent + MAX_EFFORT
    left = MAX_TRIES

    def failing(count: int) -> bool:
        nonlocal left
        left -= 1
        return fails(_cut(schema, steps, order[:count]))

    while True:
        node = _at(schema, steps)
        order = _entries(node, steps)
        if not order or (steps and failing(0)):
            break
        low, high = 0, len(order)
        while high - low > 1 and left > 0 and effort.spent < end:
            middle = (low + high) // 2
            low, high = (low, middle) if failing(middle) else (middle, high)
        schema = _cut(schema, steps, order[:high])
        last = order[high - 1]
        steps = (*steps, high - 1 if isinstance(node, list) else last)
        found = _at(schema, steps)
        if last == "$ref":
            target = _target(schema, steps)
            if target is None or target in seen or not isinstance(_at(schema, target), dict):
                break
            seen.add(target)
            steps = target
        elif not _holds_schemas(steps, found) or left <= 0 or effort.spent >= end:
            break
    return steps or _first(schema)


def _at(schema: Any, steps: Steps) -> Any:
    for step in steps:
        schema = schema[step]
    return schema


def _is_schema(steps: Steps) -> bool:
    """Whether `steps` lead to a schema, rather than to an object or a list of some."""
    found = False
    node = True
    for step in steps:
        found = node and step in _HOLDERS
        node = not found
    return not found


_HOLDERS = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties", "allOf", "anyOf",
    "oneOf", "prefixItems",
})  # fmt: skip
"""Keywords whose values hold schemas, by names or in a list."""


def _entries(node: Any, steps: Steps) -> list[Step]:
    """What a schema, or an object or a list of schemas, is made of, in the order in which it is read."""
    if isinstance(node, list):
        return list(range(len(node)))
    if not isinstance(node, dict):
        return []
    if not _is_schema(steps):
        return list(node)
    return sorted((key for key in node if key not in _ALWAYS), key=lambda key: key not in _FIRST)


def _cut(schema: Any, steps: Steps, kept: list[Step]) -> Any:
    """Return a copy of a schema in which the part at `steps` has only the entries `kept`."""
    if steps:
        copy: Any = dict(schema) if isinstance(schema, dict) else list(schema)
        copy[steps[0]] = _cut(schema[steps[0]], steps[1:], kept)
        return copy
    if isinstance(schema, list):
        return schema[: len(kept)]
    chosen = set(kept)
    return {key: value for key, value in schema.items() if key in chosen or key in _ALWAYS}


def _holds_schemas(steps: Steps, found: Any) -> bool:
    if not isinstance(found, dict | list):
        return False
    if not _is_schema(steps):
        return True
    holder = steps[:-1]
    if not _is_schema(holder):  # An entry of properties or allOf.
        return isinstance(found, dict)
    return any(more[0] == steps[-1] for more, _ in subparts({steps[-1]: found}))


def _target(schema: Schema, steps: Steps) -> Steps | None:
    """Where the reference at `steps` leads."""
    try:
        parts = SchemaParts(schema)
        return parts.steps(parts.target(parts.number(steps[:-1], _at(schema, steps[:-1])), "$ref"))
    except SchemaError:
        return None


def _first(schema: Schema) -> Steps:
    return next(((key,) for key in schema if key not in _ALWAYS), ())
