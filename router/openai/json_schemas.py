"""JSON schemas as clients send them, made into ones that the grammar engine follows, or refused with the place.

What the engine would follow wrongly is refused: whole numbers that a double can't hold, and schemas that no value fits,
after which a model would write until its answer's length is used up. What it doesn't know and is the same as something
else is rewritten: `oneOf` whose alternatives exclude each other is `anyOf`. Objects are closed where a small model
would write properties for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import combinations
from typing import Any

from router.openai.grammar_check import subschemas

Schema = dict[str, Any]

EXACT = 2**53
"""The engine reads numbers as doubles, which hold every whole number up to here."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ROUNDS = 16
"""How deep references are followed: what is deeper is left to the engine, as one client's schema may not take long."""
_PAIRS = 8192
"""Pairs of alternatives that are compared with each other; `oneOf` beyond them stays as it is."""
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_FREE = frozenset({"string", "integer", "number", "boolean", "null"})
"""Types of which there is always a value, as far as is looked at here."""


def followed(schema: Schema) -> Schema:
    """Return the schema that a grammar is made of: of the same values as a client's, but for the properties that an
    object doesn't name (`closed`). Raises `ValueError` with the place where none can be made."""
    found = rewritten(schema)
    if wrong := problem_of(found):
        raise ValueError(wrong)
    return closed(found)


def problem_of(schema: Schema) -> str:
    """Why a schema can't be followed, with the place; empty where nothing is found. The engine finds more."""
    for path, node in _nodes(schema):
        values = node["enum"] if isinstance(node.get("enum"), list) else []
        if "const" in node:
            values = [*values, node["const"]]
        values += [node[name] for name in _NUMBERS if name in node]
        if (number := next(_inexact(values), None)) is not None:
            return _at(path, f"{number} is beyond 2^53, up to which whole numbers can be followed exactly")
    unfit = _unfit(schema)
    if unfit is not None:
        return _at(unfit, "no value fits it: what it requires has none, or ends nowhere")
    return ""


def rewritten(schema: Schema) -> Schema:
    """Return a schema of the same values without what the engine doesn't know, as far as that is possible."""
    if not any("oneOf" in node for _, node in _nodes(schema)):
        return schema
    copy, left = deepcopy(schema), _PAIRS
    for _, node in list(_nodes(copy)):
        branches = node.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in node or not all(isinstance(b, dict) for b in branches):
            continue
        left -= len(branches) * (len(branches) - 1) // 2
        if left < 0:
            break
        if all(_exclude(copy, one, other) for one, other in combinations(branches, 2)):
            node["anyOf"] = node.pop("oneOf")
    return copy


def closed(schema: Schema) -> Schema:
    """Return a schema in which an object that names its properties has no others, unless the schema speaks of others.

    What follows it follows `schema`, too. A small model that may write more properties writes them until its answer's
    length is used up. Returns `schema` where it lays several schemas on one object, as one's property may be a stranger
    to another.
    """
    found: list[Schema] = []
    copy = deepcopy(schema)
    left = [copy]
    while left:
        node = left.pop()
        if node.keys() & _LAID_ON_ONE or ("properties" in node and node.keys() & _IN_PLACE):
            return schema
        found.append(node)
        left += [part for _, part in subschemas(node)]
    for node in found:
        if _names_all_that_it_needs(node):
            node["additionalProperties"] = False
    return copy


def _names_all_that_it_needs(node: Schema) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or not isinstance(required, list):
        return False
    return not node.keys() & _SPEAKS_OF_OTHERS and all(str(name) in named for name in required)


_LAID_ON_ONE = frozenset(
    {"allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "unevaluatedProperties"}
)
_IN_PLACE = frozenset({"anyOf", "$ref", "$dynamicRef"})
_SPEAKS_OF_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "enum", "const"}
)


def _at(path: str, why: str) -> str:
    return f"at {path}: {why}" if path else why


def _nodes(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield all schemas in a schema, the outer first, each with its path."""
    left = [("", schema)]
    while left:
        path, node = left.pop()
        yield path, node
        left += [(f"{path}.{step}" if path else step, part) for step, part in reversed(list(subschemas(node)))]


def _inexact(values: list[Any]) -> Iterator[float | int]:
    """Yield the whole numbers in values, or within them, that are too large."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, int) and abs(value) > EXACT:
            yield value


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


# ---------------------------------------------------------------- alternatives that exclude each other


def _exclude(root: Schema, one: Schema, other: Schema) -> bool:
    """Whether no value fits both schemas, as their types, values or the values of a property that both require show."""
    one, other = _resolved(root, one), _resolved(root, other)
    types = _types(one), _types(other)
    if not _as_numbers(types[0]) & _as_numbers(types[1]):
        return True
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    properties = one.get("properties"), other.get("properties")
    if not isinstance(properties[0], dict) or not isinstance(properties[1], dict):
        return False
    for name in set(_required(one)) & set(_required(other)):
        parts = properties[0].get(name), properties[1].get(name)
        if isinstance(parts[0], dict) and isinstance(parts[1], dict):
            told = _values(_resolved(root, parts[0])), _values(_resolved(root, parts[1]))
            if told[0] is not None and told[1] is not None and not told[0] & told[1]:
                return True
    return False


def _resolved(root: Schema, node: Schema) -> Schema:
    """A schema behind its references; itself where there are none, or other keywords beside them."""
    for _ in range(16):
        target = _target(root, node)
        if not isinstance(target, dict) or node.keys() & {"type", "enum", "const", "properties"}:
            return node
        node = target
    return node


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


def _as_numbers(types: set[str]) -> set[str]:
    return {"number" if each == "integer" else each for each in types}


def _values(node: Schema) -> set[tuple[str, Any]] | None:
    """The values that a schema names, each with its type; None where it names none, or others than plain ones."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return {(_type_of(value), value) for value in values}


def _required(node: Schema) -> list[str]:
    given = node.get("required")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


# ---------------------------------------------------------------- schemas that no value fits


def _unfit(schema: Schema) -> str | None:
    """The path of a schema that no value of finite length fits, where `schema` is such a one; None where it isn't. What
    fits grows from the leaves until nothing is added."""
    nodes = list(_nodes(schema))
    known = {id(node) for _, node in nodes}
    fit: set[int] = set()
    for _ in range(_ROUNDS):
        unfit = known - fit
        for _, node in reversed(nodes):  # Leaves come last, so that most are known to fit in the first round.
            if id(node) in unfit and _fits(schema, node, unfit):
                unfit.discard(id(node))
        if known - unfit == fit:
            break
        fit = known - unfit
        if id(schema) in fit:
            return None
    else:
        return None
    inner = [path for path, node in nodes[1:] if id(node) not in fit and "$ref" not in node]
    return inner[0] if inner else ""


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
