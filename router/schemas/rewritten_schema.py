"""A client's schema, written again in keywords that the engine follows exactly.

Every value that may be needed is a state: the parts of the schema that it must fit, and those that it must not. A
state's forms are in the engine's keywords and name further states; states that no value fits are left out with what
needs them. The result says less than the client's schema nowhere; it may allow fewer values.
"""

from __future__ import annotations

import re
from typing import Any

from twinpool.router.schemas.fault_place import Effort
from twinpool.router.schemas.regular_terms import MAX_STEPS, TooMuchWork
from twinpool.router.schemas.schema_forms import SchemaForms
from twinpool.router.schemas.schema_parts import Schema, SchemaError, SchemaParts, ending
from twinpool.router.schemas.schema_values import MAX_LOOKS
from twinpool.router.schemas.schema_ways import MAX_PRODUCTS, SchemaWays
from twinpool.router.schemas.value_forms import Form, State, state_of

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
