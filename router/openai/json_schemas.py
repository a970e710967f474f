"""JSON schemas as clients send them, made into ones that the grammar engine follows, or refused with the place.

What the engine would follow wrongly is refused: whole numbers that a double can't hold, and schemas that no value fits,
after which a model would write until its answer's length is used up. Keywords that it doesn't know are written again in
those that it does (`router/schemas/`). Objects are closed where a small model would write properties for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from twinpool.contracts.grammar import JSON_FORM
from twinpool.router.openai.client_grammar import why_not_compiled
from twinpool.router.schemas.ecma_patterns import is_hard
from twinpool.router.schemas.fault_place import Effort, fault_place
from twinpool.router.schemas.rewritten_schema import kept, rewritten
from twinpool.router.schemas.schema_parts import (
    MAX_PARTS,
    Place,
    SchemaError,
    Steps,
    places,
    shown,
    subparts,
    too_deep_place,
)
from twinpool.router.schemas.schema_ways import FORMATS

Schema = dict[str, Any]

EXACT = 2**53
"""The engine reads numbers as doubles, which hold every whole number up to here."""
TOO_DEEP = "it is nested too deeply; put parts of it below $defs and refer to them"
MAX_DEPTH = 100
"""Lists and objects within each other beside which none is at fault for being too deep."""
_WITH_NUMBERS = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_ROUNDS = 16
"""How deep references are followed: what is deeper is left to the engine, as one client's schema may not take long."""
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_FREE = frozenset({"string", "integer", "number", "boolean", "null"})
"""Types of which there is always a value, as far as is looked at here."""


def followed(schema: Schema, effort: Effort | None = None) -> Schema:
    """Return the schema that a grammar is made of: in keywords that the engine follows exactly, and of values that fit
    a client's. An object that names its properties has no others (`close`). `effort` is charged what it took. Raises
    `SchemaError`, a `ValueError`, with the place where none can be made."""
    effort = Effort() if effort is None else effort
    try:
        return _followed(schema, effort)
    except SchemaError as error:
        if error.path:
            raise
        why = error.why

    def fails(part: Schema) -> bool:
        try:
            _followed(part, effort)
        except SchemaError as error:
            return error.why == why
        return False

    raise SchemaError(shown(fault_place(schema, fails, effort)), why)


def engine_fault(schema: Schema, told: str, effort: Effort | None = None) -> SchemaError:
    """Return the error `told` of the engine's about what becomes of a client's schema, with its place there."""
    effort = Effort() if effort is None else effort

    def fails(part: Schema) -> bool:
        try:
            return why_not_compiled(grammar_of(_followed(part, effort))) == told
        except ValueError:
            return False

    return SchemaError(shown(fault_place(schema, fails, effort)), told)


def grammar_of(schema: Schema, form: Mapping[str, Any] = JSON_FORM) -> str:
    """Return the engine's grammar of a schema that `followed` made. Raises `SchemaError` where it is too deep."""
    from llguidance import LLMatcher

    overrides: Any = form
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
    except (ValueError, RecursionError):  # The engine's reader of JSON takes 127 lists and objects within each other.
        raise SchemaError(shown(too_deep_place(schema, MAX_DEPTH)), TOO_DEEP) from None


def _followed(schema: Schema, effort: Effort) -> Schema:
    try:
        found: Schema = kept(schema)
        nodes = list(nodes_of(found))
        effort.spent += len(nodes) / MAX_PARTS
        check_numbers(found)
        if _unfit(nodes):
            raise SchemaError("", "no value fits it: what it requires has none, or ends nowhere")
        if not _is_plain(nodes):
            return rewritten(found, effort)
        found.pop("$schema", None)
        close(nodes)
        return found
    except RecursionError:
        raise SchemaError(shown(too_deep_place(schema, MAX_DEPTH)), TOO_DEEP) from None


def check_numbers(schema: Schema) -> None:
    """Raise `SchemaError` for the first keyword with a whole number that can't be followed exactly."""
    left: list[tuple[Steps, Any]] = [((), schema)]
    while left:
        steps, node = left.pop()
        if not isinstance(node, dict):
            continue
        for key in node.keys() & _WITH_NUMBERS:
            if (found := next(filter(_is_inexact, places(node[key])), None)) is not None:
                why = f"{found.value} is beyond 2^53, up to which whole numbers can be followed exactly"
                raise SchemaError(shown((*steps, key)), why)
        left += [((*steps, *more), part) for more, part in subparts(node)]


def _is_plain(nodes: Sequence[Schema]) -> bool:
    """Whether the engine follows all keywords of a schema and those in it as they stand."""
    root = nodes[0]
    older = bool(_OLDER.search(str(root.get("$schema", ""))))
    return not any(_is_beyond(node, older) or ("$ref" in node and _target(root, node) is None) for node in nodes)


_OLDER = re.compile(r"draft-0[3467]\b")
_BEYOND = frozenset({
    "$anchor", "$dynamicRef", "additionalItems", "allOf", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "maxProperties", "minContains", "minProperties", "not", "oneOf",
    "patternProperties", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords that the engine doesn't know, or follows in some cases."""
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"})


def _is_beyond(node: Schema, older: bool) -> bool:
    if node.keys() & _BEYOND or node.get("uniqueItems") is True or isinstance(node.get("items"), list):
        return True
    if "multipleOf" in node and node.keys() & _BOUNDS:  # The engine's doubles miss 19.99 as a multiple of 0.01.
        return True
    if "$ref" in node and (not str(node["$ref"]).startswith("#/") or (older and len(node) > 1)):
        return True
    if "properties" in node and node.keys() & {"anyOf", "$ref"}:
        return True
    if node.keys() & {"properties", "required"} and not (_names_all_that_it_needs(node) or _has_no_others(node)):
        return True
    if any(isinstance(node.get(key), bool) for key in ("exclusiveMinimum", "exclusiveMaximum")):
        return True
    return ("pattern" in node and is_hard(node["pattern"])) or node.get("format") in FORMATS


def _has_no_others(node: Schema) -> bool:
    return node.get("additionalProperties") is False and set(_required(node)) <= node.get("properties", {}).keys()


def close(nodes: Iterable[Schema]) -> None:
    """Have objects that name their properties have no others, unless the schema speaks of others: what fits then fitted
    before. A small model that may write more properties writes them until its answer's length is used up."""
    for node in nodes:
        if _names_all_that_it_needs(node):
            node["additionalProperties"] = False


def _names_all_that_it_needs(node: Schema) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or not isinstance(required, list):
        return False
    return not node.keys() & _SPEAKS_OF_OTHERS and all(str(name) in named for name in required)


_SPEAKS_OF_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "enum", "const"}
)


def nodes_of(schema: Schema) -> Iterator[Schema]:
    """Yield all schemas in a schema, the outer first."""
    left = [schema]
    while left:
        node = left.pop()
        yield node
        left += [part for _, part in reversed(list(subparts(node))) if isinstance(part, dict)]


def _is_inexact(place: Place) -> bool:
    return isinstance(place.value, int) and abs(place.value) > EXACT


def _target(root: Schema, node: Schema) -> Any:
    """The schema that a reference within the same schema leads to; None where it leads elsewhere or nowhere."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in filter(None, reference.removeprefix("#").split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


# ---------------------------------------------------------------- schemas that no value fits


def _unfit(nodes: Sequence[Schema]) -> bool:
    """Whether no value of finite length fits the first of some schemas, in which the others are. What fits grows from
    the leaves until nothing is added."""
    schema = nodes[0]
    known = set(map(id, nodes))
    fit: set[int] = set()
    for _ in range(_ROUNDS):
        unfit = known - fit
        for node in reversed(nodes):  # Leaves come last, so that most are known to fit in the first round.
            if id(node) in unfit and _fits(schema, node, unfit):
                unfit.discard(id(node))
        if known - unfit == fit:
            return True
        fit = known - unfit
        if id(schema) in fit:
            return False
    return False


def _fits(root: Schema, node: Schema, unfit: set[int]) -> bool:
    """Whether a value fits a schema, where none fits those with the ids `unfit`."""

    def good(part: object) -> bool:
        return part is not False and id(part) not in unfit

    if node.get("enum") == [] or not good(_target(root, node)):
        return False
    if not all(map(good, _listed(node, "allOf"))):
        return False
    if any(_listed(node, key) and not any(map(good, node[key])) for key in ("anyOf", "oneOf")):
        return False
    types = _types(node)
    if (
        "enum" in node or "const" in node or types & _FREE or not types <= _TYPES
    ):  # A type that there isn't: the engine's.
        return True
    return ("array" in types and _fits_array(node, good)) or ("object" in types and _fits_object(node, good))


def _fits_array(node: Schema, good: Callable[[object], bool]) -> bool:
    least, first = node.get("minItems", 0), _listed(node, "prefixItems")
    if not isinstance(least, int):
        return True
    return all(map(good, first[:least])) and (least <= len(first) or good(node.get("items", True)))


def _fits_object(node: Schema, good: Callable[[object], bool]) -> bool:
    properties = node.get("properties")
    named: Mapping[str, object] = properties if isinstance(properties, dict) else {}
    others = True if node.get("patternProperties") else node.get("additionalProperties", True)
    return all(good(named.get(name, others)) for name in _required(node))


def _listed(node: Schema, key: str) -> list[Any]:
    given = node.get(key)
    return given if isinstance(given, list) else []


def _types(node: Schema) -> set[str]:
    given = node.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {each for each in given if isinstance(each, str)}
    values = [node["const"]] if "const" in node else node.get("enum")
    return {_type_of(value) for value in values} if isinstance(values, list) else set(_TYPES)


def _type_of(value: Any) -> str:
    names: Mapping[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _required(node: Schema) -> list[str]:
    given = node.get("required")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
