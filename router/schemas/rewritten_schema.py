"""A client's schema, written again in keywords that the engine follows exactly.

Every value that may be needed is a state: the parts of the schema that it must fit, and those that it must not. A
state's forms are in the engine's keywords and name further states; states that no value fits are left out with what
needs them. The result says less than the client's schema nowhere; it may allow fewer values.

Before that comes what the value of each keyword of JSON schema must be, and which ones are left out or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from twinpool.router.schemas.fault_place import Effort
from twinpool.router.schemas.regular_terms import MAX_STEPS, TooMuchWork
from twinpool.router.schemas.schema_forms import SchemaForms
from twinpool.router.schemas.schema_parts import Schema, SchemaError, SchemaParts, Steps, ending, shown, subparts
from twinpool.router.schemas.schema_values import MAX_LOOKS
from twinpool.router.schemas.schema_ways import MAX_PRODUCTS, SchemaWays
from twinpool.router.schemas.value_forms import Form, State, state_of

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


MAX_STATES = 4096
"""States of one schema."""


def rewritten(schema: Schema, effort: Effort | None = None) -> Schema:
    """Return a schema all of whose values fit `schema`; `effort` is charged what it took. Raises `SchemaError` where
    none can be made: with the place, or without one where no part of it alone is at fault."""
    parts = SchemaParts(schema)
    ways = SchemaWays(parts)
    states: dict[State, list[Form]] = {}
    try:
        return _rewritten(schema, parts, ways, states)
    finally:
        if effort is not None:
            effort.spent += max(ways.products / MAX_PRODUCTS, ways.terms.steps / MAX_STEPS,
                                ways.values.looks / MAX_LOOKS, len(states) / MAX_STATES)  # fmt: skip


def _rewritten(schema: Schema, parts: SchemaParts, ways: SchemaWays, states: dict[State, list[Form]]) -> Schema:
    forms = SchemaForms(ways)
    root: State = state_of(parts, [(parts.number((), schema), True)])
    left = [root]
    while left:
        state = left.pop()
        if state in states:
            continue
        if len(states) >= MAX_STATES:
            raise SchemaError(
                _path(parts, state),
                f"it takes more than {MAX_STATES} kinds of values once it is combined; make it simpler",
            )
        try:
            states[state] = forms.of(state)
        except TooMuchWork as error:
            raise SchemaError(_path(parts, state), str(error)) from None
        left += [inner for form in states[state] for inner in form.states()]
    alive = _alive(states)
    if root not in alive:
        unsaid = next(iter(ways.unsaid), "")
        more = f" once what doesn't fit {unsaid}, which can't be told in advance, is left out" if unsaid else ""
        raise SchemaError("", f"no value fits it{more}")
    return _written(parts, root, states, alive)


def _alive(states: dict[State, list[Form]]) -> set[State]:
    """The states that some value fits."""

    def missing(state: State, alive: set[State]) -> list[State] | None:
        found = []
        for form in states[state]:
            need = next((need for need in form.needs() if need not in alive), None)
            if need is None:
                return None
            found.append(need)
        return found

    return ending(states, missing)


def _written(parts: SchemaParts, root: State, states: dict[State, list[Form]], alive: set[State]) -> Schema:
    names: dict[State, str] = {}
    uses: dict[State, int] = {}
    for forms in states.values():
        for form in forms:
            for inner in form.states():
                uses[inner] = uses.get(inner, 0) + 1

    def refer(state: State) -> Schema | None:
        if state not in alive:
            return None
        if not state:
            return {}
        if (simple := _simple(states[state])) is not None and uses.get(state, 0) < 8:
            return simple
        if state not in names:
            names[state] = _name(_path(parts, state), len(names))
            waiting.append(state)
        return {"$ref": f"#/$defs/{names[state]}"}

    def shape(state: State) -> Schema:
        found = [form.written(refer) for form in states[state] if all(need in alive for need in form.needs())]
        known = [each for each in found if each is not None]
        return known[0] if len(known) == 1 else {"anyOf": known}

    waiting: list[State] = []
    out: Schema = shape(root) if root else {}
    definitions: dict[str, Any] = {}
    while waiting:
        state = waiting.pop()
        definitions[names[state]] = shape(state)
    return {**out, "$defs": definitions} if definitions else out


def _simple(forms: list[Form]) -> Schema | None:
    """The schema of a state that has one form, without others in it."""
    return forms[0].written(lambda _: {}) if len(forms) == 1 and not list(forms[0].states()) else None


def _name(path: str, number: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', path)[:48]}_{number}"


def _path(parts: SchemaParts, state: State) -> str:
    return parts.path(min(state)[0]) if state else ""
