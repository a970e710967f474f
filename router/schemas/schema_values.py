"""Whether a value that a schema names (`const`, `enum`, the name of a property) fits a schema: yes, no, or unknown.

Unknown is what this doesn't look at (formats, patterns that can't be read, `unevaluatedItems`): who asks may take it
neither for a yes nor for a no.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from twinpool.contracts.outside_data import read_json
from twinpool.router.schemas.ecma_patterns import UnreadPattern, searched
from twinpool.router.schemas.regular_terms import RegularTerms
from twinpool.router.schemas.schema_parts import SchemaError, SchemaParts

MAX_LOOKS = 50_000
"""Looks at a value with a part of a schema."""
MAX_NESTED = 60
"""References and parts followed one below the other."""
Known = bool | None
"""Yes, no, or unknown."""


def every(found: Iterable[Known]) -> Known:
    out: Known = True
    for each in found:
        if each is False:
            return False
        out = None if each is None else out
    return out


def some(found: Iterable[Known]) -> Known:
    return negated(every(negated(each) for each in found))


def negated(found: Known) -> Known:
    return None if found is None else not found


def canonical(value: Any) -> str:
    """Return a text that is the same for values that JSON schema takes for the same: 1 and 1.0, but not true."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(decimal(value).normalize())
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    return "{" + ",".join(f"{json.dumps(name)}:{canonical(value[name])}" for name in sorted(value)) + "}"


def is_of_type(text: str, type_: str) -> bool:
    """Whether a canonical text is of a value of a type."""
    kinds = {"n": "null", "t": "boolean", "f": "boolean", '"': "string", "[": "array", "{": "object"}
    return kinds.get(text[0], "number") == type_


def text_of(text: str) -> str:
    """Return the text of which `text` is the canonical text."""
    return str(read_json(text))


def decimal(value: Any) -> Decimal:
    """Return a number as it is written."""
    return Decimal(repr(value) if isinstance(value, float) else str(value))


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_type(value: Any, name: str) -> bool:
    if name == "integer":
        return is_number(value) and decimal(value) == decimal(value).to_integral_value()
    return type_of(value) == name


class SchemaValues:
    """Answers for the values of one schema."""

    def __init__(self, parts: SchemaParts, terms: RegularTerms) -> None:
        self.looks = 0
        self._parts, self._terms = parts, terms
        self._patterns: dict[str, int | None] = {}
        self._enums: dict[int, frozenset[str]] = {}
        self._depth = 0

    def pattern(self, text: str) -> int | None:
        """Return the texts in which a pattern is found; None where it can't be read."""
        if text not in self._patterns:
            try:
                self._patterns[text] = searched(text, self._terms)
            except UnreadPattern:
                self._patterns[text] = None
        return self._patterns[text]

    def found(self, pattern: str, text: str) -> Known:
        """Whether a pattern is found in a text."""
        term = self.pattern(pattern)
        return None if term is None else self._terms.matches(term, text)

    def fits(self, part: int, value: Any) -> Known:
        """Whether a value fits a part of the schema."""
        self.looks += 1
        if self.looks > MAX_LOOKS:
            raise SchemaError(self._parts.path(part), "its values take too many steps to look through")
        schema = self._parts.schema(part)
        if isinstance(schema, bool):
            return schema
        if self._depth >= MAX_NESTED:
            return None
        self._depth += 1
        try:
            return every(self._by_keyword(part, schema, value))
        finally:
            self._depth -= 1

    def _by_keyword(self, part: int, schema: dict[str, Any], value: Any) -> Iterable[Known]:
        child, fits = self._parts.child, self.fits
        if "$ref" in schema:
            yield fits(self._parts.target(part, "$ref"), value)
            if self._parts.older:
                return
        if "$dynamicRef" in schema:
            yield fits(self._parts.target(part, "$dynamicRef"), value)
        if "type" in schema:
            given = schema["type"]
            yield any(has_type(value, name) for name in (given if isinstance(given, list) else [given]))
        if "const" in schema:
            yield canonical(value) == canonical(schema["const"])
        if "enum" in schema:
            if part not in self._enums:
                self._enums[part] = frozenset(map(canonical, schema["enum"]))
            yield canonical(value) in self._enums[part]
        for key in ("allOf", "anyOf"):
            if key in schema:
                found = [fits(child(part, key, number), value) for number in range(len(schema[key]))]
                yield every(found) if key == "allOf" else some(found)
        if "oneOf" in schema:
            told = [fits(child(part, "oneOf", number), value) for number in range(len(schema["oneOf"]))]
            yes = told.count(True)
            yield False if yes > 1 else None if None in told else yes == 1
        if "not" in schema:
            yield negated(fits(child(part, "not"), value))
        if "if" in schema:
            asked = fits(child(part, "if"), value)
            then = fits(child(part, "then"), value) if "then" in schema else True
            other = fits(child(part, "else"), value) if "else" in schema else True
            yield then if asked is True else other if asked is False else then if then is other else None
        if is_number(value):
            yield self._number(schema, value)
        elif isinstance(value, str):
            yield from self._string(schema, value)
        elif isinstance(value, list):
            yield from self._array(part, schema, value)
        elif isinstance(value, dict):
            yield from self._object(part, schema, value)

    def _number(self, schema: dict[str, Any], value: Any) -> bool:
        number = decimal(value)
        low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return not (
            (
                "minimum" in schema
                and (number < decimal(schema["minimum"]) or (low is True and number == schema["minimum"]))
            )
            or (
                "maximum" in schema
                and (number > decimal(schema["maximum"]) or (high is True and number == schema["maximum"]))
            )
            or (is_number(low) and number <= decimal(low))
            or (is_number(high) and number >= decimal(high))
            or ("multipleOf" in schema and Fraction(number) % Fraction(decimal(schema["multipleOf"])) != 0)
        )

    def _string(self, schema: dict[str, Any], value: str) -> Iterable[Known]:
        yield schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        if "pattern" in schema:
            yield self.found(schema["pattern"], value)
        if "format" in schema:
            yield None

    def _array(self, part: int, schema: dict[str, Any], value: list[Any]) -> Iterable[Known]:
        child, fits = self._parts.child, self.fits
        yield schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        if schema.get("uniqueItems") is True:
            yield len({canonical(each) for each in value}) == len(value)
        first = self.first_items(part)
        yield every(fits(each, item) for each, item in zip(first, value, strict=False))
        if (rest := self.other_items(part)) is not None:
            yield every(fits(rest, item) for item in value[len(first) :])
        if "contains" in schema:
            found = [fits(child(part, "contains"), item) for item in value]
            least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
            yes, unknown = found.count(True), found.count(None)
            yield (
                False
                if yes > most or yes + unknown < least
                else True
                if least <= yes and yes + unknown <= most
                else None
            )
        if "unevaluatedItems" in schema:
            yield None

    def first_items(self, part: int) -> list[int]:
        """The schemas of an array's first items."""
        schema = self._parts.schema(part)
        key = "prefixItems" if "prefixItems" in schema else "items"
        given = schema.get(key)
        return [self._parts.child(part, key, number) for number in range(len(given))] if isinstance(given, list) else []

    def other_items(self, part: int) -> int | None:
        """The schema of the items after those; None where they may be anything."""
        schema = self._parts.schema(part)
        key = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        return self._parts.child(part, key) if isinstance(schema.get(key), dict | bool) else None

    def _object(self, part: int, schema: dict[str, Any], value: dict[str, Any]) -> Iterable[Known]:
        child, fits = self._parts.child, self.fits
        yield schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
        yield all(name in value for name in schema.get("required", ()) if isinstance(name, str))
        if "propertyNames" in schema:
            yield every(fits(child(part, "propertyNames"), name) for name in value)
        for name, each in value.items():
            for of in self.of_property(part, name):
                yield None if of is None else fits(of, each)
        for trigger, names in {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}.items():
            if trigger in value and isinstance(names, list):
                yield all(name in value for name in names)
        for key in ("dependencies", "dependentSchemas"):
            for trigger, of in schema.get(key, {}).items():
                if trigger in value and isinstance(of, dict | bool):
                    yield fits(child(part, key, trigger), value)
        if "unevaluatedProperties" in schema:
            yield None

    def of_property(self, part: int, name: str) -> list[int | None]:
        """The schemas that a part has for a property; None is one of which it is unknown whether it has it."""
        schema = self._parts.schema(part)
        out: list[int | None] = []
        if name in schema.get("properties", ()):
            out.append(self._parts.child(part, "properties", name))
        for pattern in schema.get("patternProperties", ()):
            known = self.found(pattern, name)
            if known is None:
                out.append(None)
            elif known:
                out.append(self._parts.child(part, "patternProperties", pattern))
        if not out and "additionalProperties" in schema:
            out.append(self._parts.child(part, "additionalProperties"))
        return out
