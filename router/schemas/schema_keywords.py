"""The keywords of JSON schema: what the value of each must be, which say nothing about values, which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from twinpool.router.schemas.schema_parts import SchemaError, Steps, shown, subparts

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_REFUSED = frozenset({
    "$recursiveRef", "allRequired", "anyRequired", "deepProperties", "deepRequired", "disallow", "divisibleBy",
    "extends", "formatExclusiveMaximum", "formatExclusiveMinimum", "formatMaximum", "formatMinimum", "instanceof",
    "oneRequired", "patternRequired", "prohibited", "propertyDependencies", "range", "regexp", "select", "typeof",
    "uniqueItemProperties",
})  # fmt: skip
"""Keywords of older drafts and of validators' own that constrain values, and aren't followed."""


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: object) -> bool:
    return _number(value) and value >= 0 and value == int(value)  # type: ignore[operator, call-overload]


def _schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(_schema, value))


def _named(value: object) -> bool:
    return isinstance(value, dict) and all(map(_schema, value.values()))


def _names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _type(value: object) -> bool:
    return (
        value in TYPES if isinstance(value, str) else isinstance(value, list) and all(each in TYPES for each in value)
    )


def _dependencies(value: object) -> bool:
    return isinstance(value, dict) and all(_schema(each) or _names(each) for each in value.values())


_Shape = tuple[Callable[[object], bool], str]
_NUMBER: _Shape = _number, "a number"
_COUNT: _Shape = _count, "a whole number of at least 0"
_SCHEMA: _Shape = _schema, "a schema"
_SCHEMAS: _Shape = _schemas, "an array of schemas"
_NAMED: _Shape = _named, "an object of schemas"
_NAMES: _Shape = _names, "an array of strings"
_TEXT: _Shape = (lambda value: isinstance(value, str)), "a string"
_FORMAT: _Shape = (lambda value: isinstance(value, str) and value != "unknown"), "the name of a format"
"""The engine takes the format called unknown for any text."""
_BOUND: _Shape = (lambda value: isinstance(value, bool) or _number(value)), "a number"
SHAPES: dict[str, _Shape] = {
    "$ref": _TEXT, "$dynamicRef": _TEXT, "$defs": _NAMED, "definitions": _NAMED, "type": (_type, "a type or several"),
    "enum": ((lambda value: isinstance(value, list)), "an array"), "const": ((lambda _: True), "any value"),
    "allOf": _SCHEMAS, "anyOf": _SCHEMAS, "oneOf": _SCHEMAS, "not": _SCHEMA, "if": _SCHEMA, "then": _SCHEMA,
    "else": _SCHEMA, "minimum": _NUMBER, "maximum": _NUMBER, "exclusiveMinimum": _BOUND, "exclusiveMaximum": _BOUND,
    "multipleOf": ((lambda value: _number(value) and value > 0), "a number above 0"),  # type: ignore[operator]
    "minLength": _COUNT, "maxLength": _COUNT, "pattern": _TEXT, "format": _FORMAT,
    "minItems": _COUNT, "maxItems": _COUNT, "uniqueItems": ((lambda value: isinstance(value, bool)), "true or false"),
    "prefixItems": _SCHEMAS, "items": ((lambda value: _schema(value) or _schemas(value)), "a schema"),
    "additionalItems": _SCHEMA, "contains": _SCHEMA, "minContains": _COUNT, "maxContains": _COUNT,
    "unevaluatedItems": _SCHEMA, "properties": _NAMED, "patternProperties": _NAMED, "additionalProperties": _SCHEMA,
    "propertyNames": _SCHEMA, "required": _NAMES, "minProperties": _COUNT, "maxProperties": _COUNT,
    "unevaluatedProperties": _SCHEMA,
    "dependentRequired": ((lambda value: isinstance(value, dict) and all(map(_names, value.values()))),
                          "an object of arrays of strings"),
    "dependentSchemas": _NAMED,
    "dependencies": (_dependencies, "an object of schemas and arrays of strings"),
}  # fmt: skip
"""The keywords that are followed, each with what its value must be. What isn't here says nothing about values, as JSON
schema has it, unless it is refused."""
_ALIKE = {name.lower(): name for name in SHAPES}


def kept(schema: Any) -> Any:
    """Return a schema without what says nothing about values. Raises `SchemaError` for a keyword that is refused, one
    that is likely another one misspelt, and one whose value is of the wrong kind."""
    out = _kept_here((), schema)
    left: list[tuple[Steps, Any]] = [((), out)]
    while left:
        steps, node = left.pop()
        for more, part in list(subparts(node)):
            holder = node
            for step in more[:-1]:
                holder = holder[step]
            holder[more[-1]] = _kept_here((*steps, *more), part)
            left.append(((*steps, *more), holder[more[-1]]))
    return out


_NAMING = frozenset({"$schema", "$id", "id", "$anchor", "$dynamicAnchor"})


def _kept_here(steps: Steps, schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    for path, why in _wrong(steps, schema):
        raise SchemaError(path, why)
    return {
        key: _copied(key, value)
        for key, value in schema.items()
        if (key in SHAPES or (key in _NAMING and isinstance(value, str))) and not (key == "uniqueItems" and not value)
    }


def _copied(key: str, value: Any) -> Any:
    if SHAPES.get(key) is _COUNT:
        return int(value)
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


def _wrong(steps: Steps, schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in schema.items():
        if key in SHAPES:
            right, what = SHAPES[key]
            if not right(value):
                yield shown((*steps, key)), f"it must be {what}; got {json.dumps(value)[:64]}"
        elif key in _REFUSED:
            yield shown((*steps, key)), "this keyword can't be followed; leave it out, or say it in others"
        elif (meant := _ALIKE.get(key.replace("_", "").replace("-", "").lower())) is not None:
            yield shown((*steps, key)), f"there is no such keyword; {meant} is one"
