"""The ways to fit a schema, and the ways not to: lists of facts about a value, all of which hold in one way.

Keywords that choose (`anyOf`, `oneOf`, `not`, `if`, `dependentRequired`, ...) become several ways; the others a fact in
each. A way may say more than the schema does and never less: a value of any way fits. What can't be said is left out of
the ways not to fit, so that some values that would do are never written; where nothing is left, the schema is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from twinpool.router.schemas.ecma_patterns import searched
from twinpool.router.schemas.regular_terms import RegularTerms
from twinpool.router.schemas.schema_parts import SchemaError, SchemaParts
from twinpool.router.schemas.schema_values import SchemaValues, canonical, decimal, is_number, type_of

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
MAX_WAYS = 256
"""Ways of one schema."""
MAX_PRODUCTS = 30_000
"""Combinations of ways that are tried for one client's schema."""
MAX_LAID = 60
"""Schemas within or behind each other that are all about one value."""
MAX_NAMES = 32
"""Names of properties that are tried where a schema asks for one that another doesn't have."""

Fact = tuple[Any, ...]
"""Its kind, then what it says. All but the first three kinds are about values of one type:

| kind | of | says |
|---|---|---|
| ``values`` | any | canonical values: it is one of them; beside each the value itself |
| ``no values`` | any | it is none of them |
| ``integer`` | number | it is whole |
| ``low``, ``high`` | number | a bound, and whether that itself is out |
| ``multiple``, ``no multiple`` | number | it is a multiple, or none |
| ``length`` | string | the least and the most characters |
| ``pattern`` | string | a pattern, whether it is found, the path |
| ``format`` | string | a format's name, the path |
| ``items`` | array | a part whose `prefixItems` and `items` hold |
| ``item``, ``each``, ``rest`` | array | what holds of the item at an index, of each, of those from an index on |
| ``size`` | array | the least and the most items |
| ``contains`` | array | what items fit, how many at least and at most, the path |
| ``unique`` | array | no item is there twice; the path |
| ``object`` | object | a part whose `properties` and the like hold; whether it counts for `unevaluatedProperties` |
| ``property`` | object | a name, and what holds of that property if it is there |
| ``others`` | object | names and patterns, and what holds of all other properties |
| ``required``, ``absent`` | object | a name |
| ``count`` | object | the least and the most properties, the path |
| ``names`` | object | what holds of all names, the path |
"""
_TYPE_OF = {
    **dict.fromkeys(("integer", "low", "high", "multiple", "no multiple"), "number"),
    **dict.fromkeys(("length", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "item", "each", "rest", "size", "contains", "unique"), "array"),
    **dict.fromkeys(("object", "property", "others", "required", "absent", "count", "names"), "object"),
}
Demand = tuple[int, bool]
"""A part of the schema, and whether it is to fit or not to."""


class Way(NamedTuple):
    """One way: the types that a value may have, and what holds of it."""

    types: frozenset[str] = ALL_TYPES
    facts: tuple[Fact, ...] = ()


Ways = list[Way]
ANY: Ways = [Way()]


def about(fact: Fact) -> str | None:
    """The type that a fact is about; None for any."""
    return _TYPE_OF.get(fact[0])


class SchemaWays:
    """The ways of the parts of one schema."""

    def __init__(self, parts: SchemaParts) -> None:
        self.parts = parts
        self.terms = RegularTerms()
        self.values = SchemaValues(parts, self.terms)
        self.products = 0
        """Combinations that were tried."""
        self.unsaid: dict[str, None] = {}
        """Paths of what couldn't be said, the first found first."""
        self._known: dict[Demand, Ways] = {}
        self._open: set[Demand] = set()
        self._told_apart: dict[tuple[int, int], bool] = {}
        self._denials = 0
        """Times that ways not to fit something were asked for: they may lack some."""
        self._narrower: set[Demand] = set()
        """Demands whose ways may lack some."""

    def term(self, pattern: str, path: str) -> int:
        """Return the texts in which a pattern is found. Raises `SchemaError` with the reason where it can't be read."""
        try:
            return searched(pattern, self.terms)
        except ValueError as error:
            raise SchemaError(path, str(error)) from None

    def of(self, part: int, fits: bool) -> Ways:
        """Return the ways in which a value fits a part, or doesn't."""
        demand = (part, fits)
        if not fits or demand in self._narrower:
            self._denials += 1
        if demand not in self._known:
            before = self._denials
            if demand in self._open:
                raise SchemaError(self.parts.path(part), "it refers to itself for the same value, which says nothing")
            if len(self._open) > MAX_LAID:
                raise SchemaError(self.parts.path(part), f"more than {MAX_LAID} schemas are laid on one value")
            self._open.add(demand)
            schema = self.parts.schema(part)
            if isinstance(schema, bool):
                found = ANY if schema is fits else []
            else:
                found = self._fit(part, schema) if fits else self._unfit(part, schema)
            self._known[demand] = found
            self._open.discard(demand)
            if self._denials > before:
                self._narrower.add(demand)
        return self._known[demand]

    def all_of(self, demands: Iterable[Demand]) -> Ways:
        """Return the ways in which all demands hold."""
        out = ANY
        for part, fits in demands:
            out = self.both(out, self.of(part, fits), self.parts.path(part))
        return out

    def both(self, one: Ways, other: Ways, path: str) -> Ways:
        """Return the ways that are ways of both, but for those that are seen to be impossible."""
        found: dict[tuple[frozenset[str], frozenset[Fact]], Way] = {}
        weights = [_weight(way) for way in other]
        for first in one:
            own = _weight(first)
            for second, weight in zip(other, weights, strict=True):
                self.products += 1 + (own + weight) // 8
                if self.products > MAX_PRODUCTS:
                    raise SchemaError(path, "its alternatives take too many combinations; have fewer of them, or ones "
                                            "that a constant property tells apart")  # fmt: skip
                way = _joined(first, second)
                if way is not None and (way := self._without_clashes(way)) is not None:
                    found.setdefault((way.types, frozenset(way.facts)), way)
        if len(found) > MAX_WAYS:
            raise SchemaError(path, f"it has more than {MAX_WAYS} alternatives once they are combined; have fewer")
        return list(found.values())

    def _without_clashes(self, way: Way) -> Way | None:
        """Return a way without objects where a property that it requires would have two values at once."""
        if "object" not in way.types:
            return way
        required = {fact[1] for fact in way.facts if fact[0] == "required"}
        parts = [fact[1] for fact in way.facts if fact[0] == "object"]
        for name in required if len(parts) > 1 else ():
            allowed: set[str] | None = None
            types = ALL_TYPES
            for part in parts:
                schema = self.parts.schema(part)
                if name not in schema.get("properties", ()):
                    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
                        types = frozenset()
                else:
                    inner = self._plain(self.parts.child(part, "properties", name))
                    types &= inner[0]
                    if inner[1] is not None:
                        allowed = inner[1] if allowed is None else allowed & inner[1]
            if not types or allowed == set():
                types = way.types - {"object"}
                return _joined(way, Way(types)) if types else None
        return way

    def _plain(self, part: int) -> tuple[frozenset[str], set[str] | None]:
        """The types and the values that a part has at first sight, behind its references."""
        for _ in range(16):
            schema = self.parts.schema(part)
            if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() & {"type", "enum", "const"}:
                break
            part = self.parts.target(part, "$ref")
        if not isinstance(schema, dict):
            return ALL_TYPES if schema else frozenset(), None
        types = ALL_TYPES
        if "type" in schema:
            given = schema["type"]
            names = given if isinstance(given, list) else [given]
            types = frozenset("number" if name == "integer" else name for name in names)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        return types, None if values is None else set(map(canonical, values))

    def either(self, *many: Ways) -> Ways:
        found = {(way.types, frozenset(way.facts)): way for ways in many for way in ways}
        return list(found.values())

    # ------------------------------------------------------------ to fit

    def _fit(self, part: int, schema: dict[str, Any]) -> Ways:
        if self.parts.older and "$ref" in schema:
            return self.of(self.parts.target(part, "$ref"), True)
        ways, done = ANY, set[str]()
        for key in schema:
            group = _GROUPS.get(key, key)
            if group in done:
                continue
            done.add(group)
            if (more := self._fit_keyword(part, schema, group)) is not None:
                ways = self.both(ways, more, self.parts.path(part, key))
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if key in schema:
                rest = (self.parts.child(part, key), True)
                ways = [self._evaluated(way, key, rest) for way in ways]
        return ways

    def _fit_keyword(self, part: int, schema: dict[str, Any], key: str) -> Ways | None:
        value: Any = schema.get(key)
        child, of, path = self.parts.child, self.of, self.parts.path(part, key)
        match key:
            case "$ref" | "$dynamicRef":
                return of(self.parts.target(part, key), True)
            case "type":
                return _of_types(value)
            case "const":
                return _of_values([value])
            case "enum":
                return _of_values(value)
            case "allOf":
                return self.all_of((child(part, key, number), True) for number in range(len(value)))
            case "anyOf":
                return self.either(*(of(child(part, key, number), True) for number in range(len(value))))
            case "oneOf":
                return self._one_of(part, len(value))
            case "not":
                return self._uncounted(self._needed(of(child(part, key), False), (child(part, key),), path))
            case "if":
                return self._if(part, schema)
            case "minimum" | "exclusiveMinimum":
                return _facts(*_low(schema))
            case "maximum" | "exclusiveMaximum":
                return _facts(*_high(schema))
            case "multipleOf":
                return _facts(("multiple", decimal(value)))
            case "minLength":
                return _facts(("length", int(value), None))
            case "maxLength":
                return _facts(("length", 0, int(value)))
            case "pattern":
                return _facts(("pattern", value, True, path))
            case "format" if value in _FORMAT_PATTERNS:
                return _facts(("pattern", _FORMAT_PATTERNS[value], True, path))
            case "format" if value in ("email", "idn-email"):
                return _facts(("format", "email", path), ("pattern", _SHORT_LOCAL_PART, True, path))
            case "format" if value in ("date-time", "time"):
                return _facts(("format", value, path), ("pattern", _LEAP_SECOND, False, path))
            case "format":
                return _facts(("format", _NARROWER_FORMATS.get(value, value), path))
            case "items":
                return _facts(("items", part))
            case "minItems":
                return _facts(("size", int(value), None))
            case "maxItems":
                return _facts(("size", 0, int(value)))
            case "contains" if "contains" in schema:
                return _facts(("contains", (child(part, key), True), int(schema.get("minContains", 1)),
                               _whole(schema.get("maxContains")), path))  # fmt: skip
            case "uniqueItems":
                return _facts(("unique", path)) if value else None
            case "properties":
                return _facts(("object", part, True))
            case "required":
                return _facts(*(("required", name) for name in value))
            case "minProperties":
                return _facts(("count", int(value), None, path))
            case "maxProperties":
                return _facts(("count", 0, int(value), path))
            case "propertyNames":
                return _facts(("names", (child(part, key), True), path))
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                return self._dependent(part, key, value)
        return None

    def _one_of(self, part: int, count: int) -> Ways:
        branches = [self.parts.child(part, "oneOf", number) for number in range(count)]
        found: list[Ways] = []
        for number, branch in enumerate(branches):
            ways = mine = self.of(branch, True)
            doubtful = []
            for other in branches[:number] + branches[number + 1 :]:
                if ways and not self._apart(branch, other):
                    doubtful.append(other)
                    ways = self.both(ways, self._uncounted(self.of(other, False)), self.parts.path(branch))
            if mine and not ways:
                self._needed([], doubtful, self.parts.path(branch))
            found.append(ways)
        return self.either(*found)

    def _apart(self, one: int, other: int) -> bool:
        """Whether what is known of two parts shows that no value fits both."""
        pair = (min(one, other), max(one, other))
        if pair not in self._told_apart:
            ways = self.of(one, True), self.of(other, True)
            exact = not {(one, True), (other, True)} & self._narrower
            self._told_apart[pair] = exact and not self.both(*ways, self.parts.path(one))
        return self._told_apart[pair]

    def _needed(self, ways: Ways, parts: Sequence[int], path: str) -> Ways:
        """Return the ways; raises `SchemaError` where there are none because something can't be said."""
        if ways:
            return ways
        for part in parts:
            before = self.parts.path(part)
            inner = next((said for said in self.unsaid if said.startswith(before)), None)
            if inner is not None:
                raise SchemaError(
                    path, f"what doesn't fit {inner} can't be told in advance; say what is wanted instead"
                )
        return ways

    def _if(self, part: int, schema: dict[str, Any]) -> Ways:
        if "if" not in schema or not schema.keys() & {"then", "else"}:
            return ANY
        asked = self.parts.child(part, "if")
        then = self.of(self.parts.child(part, "then"), True) if "then" in schema else ANY
        other = self.of(self.parts.child(part, "else"), True) if "else" in schema else ANY
        path = self.parts.path(part, "if")
        denied = self._needed(self._uncounted(self.of(asked, False)), (asked,), path)
        return self.either(self.both(self.of(asked, True), then, path), self.both(denied, other, path))

    def _dependent(self, part: int, key: str, value: dict[str, Any]) -> Ways:
        ways = ANY
        for name, needs in value.items():
            if isinstance(needs, list):
                there = _facts(("required", name), *(("required", each) for each in needs), of="object")
            else:
                needed = self.of(self.parts.child(part, key, name), True)
                there = self.both(_facts(("required", name), of="object"), needed, self.parts.path(part, key, name))
            ways = self.both(ways, self.either(_facts(("absent", name)), there), self.parts.path(part, key, name))
        return ways

    def _uncounted(self, ways: Ways) -> Ways:
        """Return ways whose properties and items don't count as evaluated, as those below `not` don't."""
        return [
            way._replace(facts=tuple(("object", fact[1], False) if fact[0] == "object" else
                                     ("items", fact[1], False) if fact[0] == "items" else fact for fact in way.facts))
            for way in ways
        ]  # fmt: skip

    def _evaluated(self, way: Way, key: str, rest: Demand) -> Way:
        """Return a way in which `rest` holds of what no other keyword looks at."""
        if key == "unevaluatedItems":
            first = 0
            for fact in way.facts:
                if fact[0] == "items" and len(fact) == 2:
                    if self.values.other_items(fact[1]) is not None:
                        return way
                    first = max(first, len(self.values.first_items(fact[1])))
                elif fact[0] == "rest" and len(fact) == 3:
                    return way
            return way._replace(facts=(*way.facts, ("rest", first, rest)))
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        for fact in way.facts:
            if fact[0] == "others":
                return way
            if fact[0] == "object" and fact[2]:
                schema = self.parts.schema(fact[1])
                if "additionalProperties" in schema:
                    return way
                names.update(dict.fromkeys(schema.get("properties", ())))
                patterns.update(dict.fromkeys(schema.get("patternProperties", ())))
        return way._replace(facts=(*way.facts, ("others", tuple(names), tuple(patterns), rest)))

    # ------------------------------------------------------------ not to fit

    def _unfit(self, part: int, schema: dict[str, Any]) -> Ways:
        if self.parts.older and "$ref" in schema:
            return self.of(self.parts.target(part, "$ref"), False)
        found: list[Ways] = []
        done: set[str] = set()
        for key in schema:
            group = _GROUPS.get(key, key)
            if group not in done:
                done.add(group)
                found.append(self._unfit_keyword(part, schema, group))
        ways = self.either(*found)
        if len(ways) > MAX_WAYS:
            raise SchemaError(self.parts.path(part), f"there are more than {MAX_WAYS} ways not to fit it")
        return ways

    def _unfit_keyword(self, part: int, schema: dict[str, Any], key: str) -> Ways:
        value: Any = schema.get(key)
        child, of, path = self.parts.child, self.of, self.parts.path(part, key)
        match key:
            case "$ref" | "$dynamicRef":
                return of(self.parts.target(part, key), False)
            case "type":
                return self._not_of_types(value, path)
            case "const":
                return [Way(facts=(("no values", (canonical(value),)),))]
            case "enum":
                return [Way(facts=(("no values", tuple(map(canonical, value))),))]
            case "allOf":
                return self.either(*(of(child(part, key, number), False) for number in range(len(value))))
            case "anyOf":
                return self.all_of((child(part, key, number), False) for number in range(len(value)))
            case "oneOf":
                branches = [child(part, key, number) for number in range(len(value))]
                none = self.all_of((branch, False) for branch in branches)
                two = [self.all_of(((one, True), (other, True)))
                       for number, one in enumerate(branches) for other in branches[:number]]  # fmt: skip
                return self.either(none, *two)
            case "not":
                return of(child(part, key), True)
            case "if" if "if" in schema:
                asked = child(part, "if")
                ways = [self.both(of(asked, holds), of(child(part, then), False), path)
                        for holds, then in ((True, "then"), (False, "else")) if then in schema]  # fmt: skip
                return self.either(*ways)
            case "minimum" | "exclusiveMinimum":
                return self.either(*(_facts(("high", bound, not out), of="number") for _, bound, out in _low(schema)))
            case "maximum" | "exclusiveMaximum":
                return self.either(*(_facts(("low", bound, not out), of="number") for _, bound, out in _high(schema)))
            case "minLength":
                return _facts(("length", 0, int(value) - 1), of="string") if value >= 1 else []
            case "maxLength":
                return _facts(("length", int(value) + 1, None), of="string")
            case "pattern":
                return _facts(("pattern", value, False, path), of="string")
            case "items":
                return self._not_of_items(part)
            case "minItems":
                return _facts(("size", 0, int(value) - 1), of="array") if value >= 1 else []
            case "maxItems":
                return _facts(("size", int(value) + 1, None), of="array")
            case "contains" if "contains" in schema:
                return self.either(*_not_contained(schema, child(part, key), path))
            case "properties":
                return self._not_of_properties(part, schema)
            case "required":
                return self.either(*(_facts(("absent", name), of="object") for name in value))
            case "minProperties":
                return _facts(("count", 0, int(value) - 1, path), of="object") if value >= 1 else []
            case "maxProperties":
                return _facts(("count", int(value) + 1, None, path), of="object")
            case "propertyNames":
                self.unsaid.setdefault(path)
                inner = child(part, key)
                wrong = [name for name in self.parts.names[:MAX_NAMES] if self.values.fits(inner, name) is False]
                return self.either(*(_facts(("required", name), of="object") for name in wrong))
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                return self._not_dependent(part, key, value)
            case "multipleOf":
                self.unsaid.setdefault(path)
                return _facts(("no multiple", decimal(value)), of="number")
            case "format" | "unevaluatedItems" | "unevaluatedProperties":
                self.unsaid.setdefault(path)
            case "uniqueItems" if value:
                self.unsaid.setdefault(path)
        return []

    def _not_of_types(self, value: Any, path: str) -> Ways:
        types = set(value if isinstance(value, list) else [value])
        if "integer" in types and "number" not in types:
            self.unsaid.setdefault(path)  # Numbers with a fraction are no type of the engine's.
            types |= {"number"}
        left = ALL_TYPES - types
        return [Way(left)] if left else []

    def _not_of_items(self, part: int) -> Ways:
        first, rest = self.values.first_items(part), self.values.other_items(part)
        wanted = [*first, *([rest] if rest is not None else [])]
        return self.either(*(
            _facts(("size", number + 1, None), ("item", number, (each, False)), of="array")
            for number, each in enumerate(wanted)
            if self.parts.schema(each) is not True
        ))  # fmt: skip

    def _not_of_properties(self, part: int, schema: dict[str, Any]) -> Ways:
        found: list[Ways] = []
        named = list(schema.get("properties", ()))
        for name in named:
            inner = self.parts.child(part, "properties", name)
            if self.parts.schema(inner) is not True:
                found.append(_facts(("required", name), ("property", name, (inner, False)), of="object"))
        if "patternProperties" in schema or "additionalProperties" in schema:
            self.unsaid.setdefault(self.parts.path(part))
            for name in [name for name in self.parts.names if name not in named][:MAX_NAMES]:
                for other in self.values.of_property(part, name):
                    if other is not None and self.parts.schema(other) is not True:
                        found.append(_facts(("required", name), ("property", name, (other, False)), of="object"))
        return self.either(*found)

    def _not_dependent(self, part: int, key: str, value: dict[str, Any]) -> Ways:
        found: list[Ways] = []
        for name, needs in value.items():
            if isinstance(needs, list):
                found += [_facts(("required", name), ("absent", each), of="object") for each in needs]
            else:
                inner = self.of(self.parts.child(part, key, name), False)
                there = _facts(("required", name), of="object")
                found.append(self.both(there, inner, self.parts.path(part, key, name)))
        return self.either(*found)


_GROUPS = {
    "additionalItems": "items", "prefixItems": "items", "additionalProperties": "properties",
    "patternProperties": "properties", "then": "if", "else": "if", "minContains": "contains", "maxContains": "contains",
    "exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum",
}  # fmt: skip
"""Keywords that are read with another one."""


_POINTER = r"(/([^~/]|~[01])*)*"
_FORMAT_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
"""RFC 6901 and draft-bhutton-relative-json-pointer."""
_NARROWER_FORMATS = {
    **dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), "uri"),
    "idn-hostname": "hostname",
}
"""Formats that the engine doesn't know, each with one that it does and all of whose texts have both."""
_SHORT_LOCAL_PART = "^[^@]{1,64}@"
"""RFC 5321, 4.5.3.1.1, which the engine doesn't keep."""
_LEAP_SECOND = ":60"
"""There are few of them (RFC 3339, 5.7), and the engine doesn't know which."""
FORMATS = frozenset({"date-time", "email", "idn-email", "time", *_FORMAT_PATTERNS, *_NARROWER_FORMATS})
"""Formats that become something else."""


def _weight(way: Way) -> int:
    """About how much work a way is to join: its facts, and the values that they list."""
    return len(way.facts) + sum(len(fact[1]) for fact in way.facts if fact[0] in ("values", "no values")) // 4


def _joined(one: Way, other: Way) -> Way | None:
    """Return what holds in both ways; None where that is seen to be impossible."""
    types = one.types & other.types
    known = set(one.facts)
    facts = (*one.facts, *(fact for fact in other.facts if fact not in known))
    if len(types) < len(one.types) or len(types) < len(other.types):
        facts = tuple(fact for fact in facts if about(fact) is None or about(fact) in types)
    values: set[str] | None = None
    for fact in facts:
        if fact[0] == "values":
            here = {each for each, _ in fact[1]}
            values = here if values is None else values & here
    for fact in facts if values is not None else ():
        if fact[0] == "no values" and values is not None:
            values -= set(fact[1])
    if not types or values == set():
        return None
    types = _without_contradictions(types, facts)
    return Way(types, facts) if types else None


def _without_contradictions(types: frozenset[str], facts: tuple[Fact, ...]) -> frozenset[str]:
    """Return the types of which a value may be as far as bounds and the presence of properties show."""
    kinds = {fact[0] for fact in facts}
    if {"required", "absent"} <= kinds:
        there = {fact[1] for fact in facts if fact[0] == "required"}
        if any(fact[0] == "absent" and fact[1] in there for fact in facts):
            types -= {"object"}
    for kind, type_ in (("length", "string"), ("size", "array"), ("count", "object")):
        if kind in kinds:
            bounds = [fact for fact in facts if fact[0] == kind]
            ceilings = [fact[2] for fact in bounds if fact[2] is not None]
            if ceilings and max(fact[1] for fact in bounds) > min(ceilings):
                types -= {type_}
    if {"low", "high"} <= kinds:
        low = max((fact[1], fact[2]) for fact in facts if fact[0] == "low")
        high = min((fact[1], not fact[2]) for fact in facts if fact[0] == "high")
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1])):
            types -= {"number"}
    return types


def _facts(*facts: Fact, of: str | None = None) -> Ways:
    return [Way(ALL_TYPES if of is None else frozenset({of}), facts)]


def _of_types(value: Any) -> Ways:
    names = set(value if isinstance(value, list) else [value])
    whole = "integer" in names and "number" not in names
    types = frozenset("number" if name == "integer" else name for name in names)
    return [Way(types, (("integer",),) if whole else ())] if types else []


def _of_values(values: list[Any]) -> Ways:
    told = {canonical(value): value for value in values}
    fact = ("values", tuple((text, _HashableValue(value)) for text, value in told.items()))
    return [Way(frozenset(map(type_of, values)), (fact,))] if values else []


class _HashableValue:
    """A value within a fact, which must be hashable; it is known by its canonical text beside it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashableValue)

    def __hash__(self) -> int:
        return 0


def _low(schema: dict[str, Any]) -> list[Fact]:
    return _bounds("low", schema, "minimum", "exclusiveMinimum")


def _high(schema: dict[str, Any]) -> list[Fact]:
    return _bounds("high", schema, "maximum", "exclusiveMaximum")


def _bounds(kind: str, schema: dict[str, Any], closed: str, opened: str) -> list[Fact]:
    """The bounds of one side; a draft-4 `exclusiveMinimum` is true where the bound itself is out."""
    found: list[Fact] = []
    if closed in schema:
        found.append((kind, decimal(schema[closed]), schema.get(opened) is True))
    if is_number(schema.get(opened)):
        found.append((kind, decimal(schema[opened]), True))
    return found


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _not_contained(schema: dict[str, Any], inner: int, path: str) -> Iterator[Ways]:
    """The ways of an array to have too few or too many items that fit schema `inner`."""
    if int(schema.get("minContains", 1)) >= 1:
        yield _facts(("each", (inner, False)), of="array")
    if (most := schema.get("maxContains")) is not None:
        yield _facts(("contains", (inner, True), int(most) + 1, None, path), of="array")
