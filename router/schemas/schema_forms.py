"""The forms of values in the engine's keywords: each way to fit, type by type, as a schema of that type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, permutations
from math import comb, gcd, lcm, perm
from typing import Any

from contracts.outside_data import read_json
from router.schemas.ecma_patterns import is_hard, searched
from router.schemas.regular_terms import ALL, text_of_others
from router.schemas.schema_parts import Schema, SchemaError
from router.schemas.schema_values import canonical, decimal
from router.schemas.schema_ways import Demand, Fact, SchemaWays, Way, about

State = frozenset[Demand]
"""What holds of one value."""
FORMS_AT_MOST = 256
"""Forms of one value."""
UNIQUE_AT_MOST = 400
"""Arrays that are listed where no item may be there twice."""
PATTERNS_AT_MOST = 4
"""Patterns of names whose every combination is a case of its own."""
FEW_WORDS = 32
"""Texts left out that are looked at for whether any text is left."""
FEW_NUMBERS = 64
"""Numbers that are listed rather than described."""
ITEMS_AT_MOST = 1000
"""Items of an array that are described one by one."""
PLACES_AT_MOST = 16 * ITEMS_AT_MOST
"""Items of all arrays that are described for one value."""
Reference = Callable[[State], Schema | None]
"""Gives the schema of a state; None where no value fits it."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """A schema without others in it."""

    schema: Schema

    def needs(self) -> Iterable[State]:
        return ()

    def states(self) -> Iterable[State]:
        return ()

    def written(self, refer: Reference) -> Schema:
        return self.schema


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """An array: its first items, the others, and how many there are."""

    first: tuple[State, ...]
    rest: State
    least: int
    most: int | None

    def needs(self) -> Iterable[State]:
        yield from self.first[: self.least]
        if self.least > len(self.first):
            yield self.rest

    def states(self) -> Iterable[State]:
        yield from self.first
        if self.most is None or self.most > len(self.first):
            yield self.rest

    def written(self, refer: Reference) -> Schema:
        first: list[Schema] = []
        for state in self.first:
            if (item := refer(state)) is None:
                return {"type": "array", "prefixItems": first, "items": False, "minItems": self.least}
            first.append(item)
        out: Schema = {"type": "array", "minItems": self.least}
        if first:
            out["prefixItems"] = first
        rest = refer(self.rest) if self.most is None or self.most > len(first) else None
        out["items"] = False if rest is None else rest
        if self.most is not None:
            out["maxItems"] = self.most if rest is not None else min(self.most, len(first))
        return out


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """An object: its named properties, names that it hasn't, others by patterns of their names, and all others."""

    named: tuple[tuple[str, State, bool], ...]
    """Name, value, and whether it must be there."""
    absent: tuple[str, ...] = ()
    patterns: tuple[tuple[str, State], ...] = ()
    rest: State | None = None
    """None: there are no others."""
    least: int = 0
    most: int | None = None

    def needs(self) -> Iterable[State]:
        return (state for _, state, required in self.named if required)

    def states(self) -> Iterable[State]:
        yield from (state for _, state, _ in self.named)
        yield from (state for _, state in self.patterns)
        yield from () if self.rest is None else (self.rest,)

    def written(self, refer: Reference) -> Schema | None:
        properties: dict[str, Any] = {}
        for name, state, _ in self.named:
            found = refer(state)
            properties[name] = False if found is None else found
        rest = None if self.rest is None else refer(self.rest)
        patterns = {pattern: refer(state) for pattern, state in self.patterns}
        if rest is not None or any(found is not None for found in patterns.values()):
            properties |= dict.fromkeys(self.absent, False)  # Or others might have these names.
        elif self.least > len(self.named):
            return None
        out: Schema = {"type": "object", "properties": properties}
        if required := [name for name, _, needed in self.named if needed]:
            out["required"] = required
        if patterns:
            out["patternProperties"] = {pattern: False if at is None else at for pattern, at in patterns.items()}
        out["additionalProperties"] = False if rest is None else rest
        if self.least > len(required):
            out["minProperties"] = self.least
        if self.most is not None:
            out["maxProperties"] = self.most
        return out


Form = PlainForm | ArrayForm | ObjectForm


class SchemaForms:
    """The forms of the values of one schema."""

    def __init__(self, ways: SchemaWays) -> None:
        self._ways = ways
        self._parts, self._values, self._terms = ways.parts, ways.values, ways.terms
        self._finite: dict[State, list[Any] | None] = {}

    def of(self, state: State) -> list[Form]:
        """Return the forms of the values of which `state` holds."""
        ordered = sorted(state)
        found: dict[str, Form] = {}
        for way in self._ways.all_of(ordered):
            for form in self._of_way(way, ordered):
                found.setdefault(repr(form), form)
        if len(found) > FORMS_AT_MOST:
            raise SchemaError(self._path(state), f"it has more than {FORMS_AT_MOST} alternatives; have fewer")
        return list(found.values())

    def _path(self, state: State) -> str:
        return self._parts.path(min(state)[0]) if state else ""

    def _of_way(self, way: Way, state: list[Demand]) -> list[Form]:
        if (values := self._named_values(way, state)) is not None:
            return [PlainForm({"enum": values})] if values else []
        denied = {text for fact in way.facts if fact[0] == "no values" for text in fact[1]}
        facts: dict[str, list[Fact]] = {}
        for fact in way.facts:
            facts.setdefault(about(fact) or "", []).append(fact)
        ordered = ("string", "number", "boolean", "null", "array", "object")
        free = [name for name in ordered if name in way.types and not facts.get(name)]
        free = [name for name in free if not any(_denies(name, text) for text in denied)]
        found: list[Form] = [PlainForm({"type": free} if len(free) > 1 else {"type": free[0]})] if free else []
        for name in sorted(way.types - set(free)):
            mine = facts.get(name, [])
            match name:
                case "null":
                    pass
                case "boolean":
                    found += [PlainForm({"const": value}) for value in (True, False) if canonical(value) not in denied]
                case "number":
                    found += self._numbers(mine, denied)
                case "string":
                    found += self._strings(mine, denied)
                case "array":
                    found += self._arrays(mine, denied)
                case "object":
                    found += self._objects(mine, denied)
        return found

    def _named_values(self, way: Way, state: list[Demand]) -> list[Any] | None:
        """The values that a way names, as far as they fit; None where it names none."""
        named = [fact[1] for fact in way.facts if fact[0] == "values"]
        if not named:
            return None
        both = set.intersection(*({text for text, _ in values} for values in named))
        return [
            kept.value
            for text, kept in min(named, key=len)
            if text in both and self._fits(state, kept.value)
        ]  # fmt: skip

    def _fits(self, state: Iterable[Demand], value: Any) -> bool:
        return all(self._values.fits(part, value) is fits for part, fits in state)

    def finite(self, state: State) -> list[Any] | None:
        """The values of which `state` holds where they are few and known; None where they aren't."""
        if state not in self._finite:
            found: dict[str, Any] | None = {}
            for way in self._ways.all_of(sorted(state)):
                for form in self._of_scalars(way, sorted(state)):
                    few = _few(form)
                    if few is None or found is None:
                        found = None
                    else:
                        found |= {canonical(value): value for value in few}
            self._finite[state] = None if found is None else list(found.values())
        return self._finite[state]

    def _of_scalars(self, way: Way, state: list[Demand]) -> list[Form]:
        if way.types & {"array", "object"} and not any(fact[0] == "values" for fact in way.facts):
            return [PlainForm({})]
        return self._of_way(way, state)

    # ------------------------------------------------------------ numbers

    def _numbers(self, facts: list[Fact], denied: set[str]) -> list[Form]:
        low = max(((fact[1], fact[2]) for fact in facts if fact[0] == "low"), default=None)
        high = min(((fact[1], not fact[2]) for fact in facts if fact[0] == "high"), default=None)
        steps = [Fraction(fact[1]) for fact in facts if fact[0] == "multiple"]
        whole = any(fact[0] == "integer" for fact in facts)
        step = _common_multiple([*steps, *([Fraction(1)] if whole else [])])
        out = sorted(Decimal(text) for text in denied if _denies("number", text))
        bounds = [low, *((each, True) for each in out)]
        ends = [*((each, False) for each in out), None if high is None else (high[0], high[1])]
        found: list[Form] = []
        for below, above in zip(bounds, ends, strict=True):
            from_ = low if below is not None and low is not None and below[0] < low[0] else below
            to = high if above is not None and high is not None and above[0] > high[0] else above
            found += _range(from_, to, step, whole)
        if no_multiple := [Fraction(fact[1]) for fact in facts if fact[0] == "no multiple"]:
            few = [value for form in found for value in _few(form) or []]
            if any(_few(form) is None for form in found):
                return []  # There is no saying so of endlessly many.
            left = [each for each in few if not any(Fraction(decimal(each)) % step == 0 for step in no_multiple)]
            return [PlainForm({"enum": left})] if left else []
        return found

    # ------------------------------------------------------------ strings

    def _strings(self, facts: list[Fact], denied: set[str]) -> list[Form]:
        least = max((fact[1] for fact in facts if fact[0] == "length"), default=0)
        most = min((fact[2] for fact in facts if fact[0] == "length" and fact[2] is not None), default=None)
        if most is not None and least > most:
            return []
        patterns: list[str] = []
        readable: list[int] = []
        for fact in facts:
            if fact[0] == "pattern":
                patterns += self._pattern(fact, readable)
        out = [_text(text) for text in denied if _denies("string", text)]
        if out:
            patterns.append(text_of_others(out))
            if len(out) <= FEW_WORDS:
                readable.append(self._terms.other_than(self._terms.either(map(self._terms.literal, out))))
        if len(readable) > 1 or (readable and (least or most is not None)):
            length = self._terms.repeat(self._terms.chars(ALL), least, -1 if most is None else most)
            bounded = [length] if max(least, most or 0) <= 100 else []
            if self._terms.is_empty(self._terms.both([*readable, *bounded])):
                return []
        schema: Schema = {"type": "string"}
        if least:
            schema["minLength"] = least
        if most is not None:
            schema["maxLength"] = most
        kinds = dict.fromkeys(fact[1] for fact in facts if fact[0] == "format")
        more = [*({"pattern": each} for each in dict.fromkeys(patterns)), *({"format": each} for each in kinds)]
        if len(more) == 1:
            schema |= more[0]
        elif more:
            schema["allOf"] = [{"type": "string", **each} for each in more]
        return [PlainForm(schema)]

    def _pattern(self, fact: Fact, readable: list[int]) -> list[str]:
        _, pattern, wanted, path = fact
        if wanted and not is_hard(pattern):
            try:
                if (term := self._values.pattern(pattern)) is not None:
                    readable.append(term)
            except SchemaError:
                raise
            except ValueError:
                pass  # Too long to be looked at; the engine reads it.
            return [pattern]
        term = self.term(pattern, path)
        term = term if wanted else self._terms.other_than(term)
        readable.append(term)
        if self._terms.is_empty(term):
            return ["[^\\x{0}-\\x{10ffff}]"]
        return self._written(term, path)

    def term(self, pattern: str, path: str) -> int:
        """Return the texts that a pattern is found in. Raises `SchemaError` where it can't be read."""
        return read_pattern(self._ways, pattern, path)

    def _written(self, term: int, path: str) -> list[str]:
        try:
            return self._terms.texts(term)
        except ValueError as error:
            raise SchemaError(path, str(error)) from None

    # ------------------------------------------------------------ arrays

    def _arrays(self, facts: list[Fact], denied: set[str]) -> list[Form]:
        least = max((fact[1] for fact in facts if fact[0] == "size"), default=0)
        most = min((fact[2] for fact in facts if fact[0] == "size" and fact[2] is not None), default=None)
        lists = [(self._values.first_items(fact[1]), self._values.other_items(fact[1]))
                 for fact in facts if fact[0] == "items"]  # fmt: skip
        each = {fact[1] for fact in facts if fact[0] == "each"}
        single: dict[int, set[Demand]] = {}
        for fact in facts:
            if fact[0] == "item":
                single.setdefault(fact[1], set()).add(fact[2])
        tails = [(fact[1], fact[2]) for fact in facts if fact[0] == "rest"]
        count = max((0, *(len(first) for first, _ in lists), *(at + 1 for at in single), *(at for at, _ in tails)))
        if max(count, least) > ITEMS_AT_MOST:
            path = self._parts.path(next((fact[1] for fact in facts if fact[0] == "items"), 0))
            raise SchemaError(path, f"more than {ITEMS_AT_MOST} items can't be described one by one")

        def at(number: int) -> set[Demand]:
            found = each | single.get(number, set()) | {demand for first, demand in tails if number >= first}
            for first, rest in lists:
                if number < len(first):
                    found = found | {(first[number], True)}
                elif rest is not None:
                    found = found | {(rest, True)}
            return found

        shapes = [([at(number) for number in range(count)], at(count), least, most)]
        for fact in facts:
            if fact[0] == "contains":
                found, items = [], 0
                for shape in (shape for before in shapes for shape in self._containing(before, fact)):
                    found.append(shape)
                    items += len(shape[0])
                    if len(found) > FORMS_AT_MOST or items > PLACES_AT_MOST:
                        why = "too many places for what it asks for; have fewer of them, or of prefixItems"
                        raise SchemaError(fact[4], why)
                shapes = found
        for text in denied:
            if _denies("array", text):
                shapes = _of_other_sizes(shapes, _items_of(text))
        forms: list[Form] = []
        unique = next((fact[1] for fact in facts if fact[0] == "unique"), None)
        for first, rest, low, high in shapes:
            if high is not None and low > high:
                continue
            form = ArrayForm(tuple(map(self.state, first[:high])), self.state(rest), low, high)
            forms += [form] if unique is None else self._unique(form, unique)
        return forms

    def state(self, demands: Iterable[Demand]) -> State:
        return frozenset(d for d in demands if self._parts.schema(d[0]) is not d[1] and self._parts.schema(d[0]) != {})

    def _containing(self, shape: _Shape, fact: Fact) -> Iterator[_Shape]:
        """Return the shapes in which enough items fit what `contains` asks for, and not too many: they stand together,
        at each place among the first items."""
        first, rest, low, high = shape
        _, (part, fits), least, most, _ = fact
        if most is not None and least > most:
            return
        for start in range(len(first) + 1) if least or most is not None else [0]:
            end = start + (least if most is None else most)
            if end > ITEMS_AT_MOST:
                raise SchemaError(fact[4], f"it may ask for {ITEMS_AT_MOST} items")
            items = [set(each) for each in first]
            items += [set(rest) for _ in range(end - len(items))]
            others = set(rest)
            for number in range(len(items)):
                if start <= number < start + least:
                    items[number].add((part, fits))
                elif most is not None and not start <= number < end:
                    items[number].add((part, not fits))
            if most is not None:
                others.add((part, not fits))
            yield items, others, max(low, start + least if least else 0), high

    def _unique(self, form: ArrayForm, path: str) -> list[Form]:
        """Return the arrays of a form in which no item is there twice: listed, as far as they are few."""
        if form.most is not None and form.most <= 1:
            return [form]
        options = [self.finite(state) for state in form.first]
        last = self.finite(form.rest) if form.most is None or form.most > len(form.first) else []
        if all(each is not None for each in options) and last is not None:
            known = [each for each in options if each is not None]
            return self._listed(form, known, last, path)
        bounded = form.most is not None and form.most <= len(form.first)
        if bounded and all(
            not types & others
            for types, others in combinations([self._types(state) for state in form.first], 2)
        ):  # fmt: skip
            return [form]
        raise SchemaError(path, "it can be followed for items of few known values (enum), or of one item at most")

    def _types(self, state: State) -> frozenset[str]:
        return frozenset().union(*(way.types for way in self._ways.all_of(sorted(state))))

    def _listed(self, form: ArrayForm, options: list[list[Any]], last: list[Any], path: str) -> list[Form]:
        most = len(options) + len(last)
        most = most if form.most is None else min(most, form.most)
        if not options:
            size = len(last)
            counts = range(form.least, min(most, size) + 1)
            if _few_in_all((perm(size, count) for count in counts), UNIQUE_AT_MOST):
                found = [list(each) for count in counts for each in permutations(last, count)]
            elif _few_in_all((comb(size, count) for count in counts), 4 * UNIQUE_AT_MOST):  # In their order alone.
                found = [list(each) for count in counts for each in combinations(last, count)]
            else:
                raise SchemaError(
                    path, f"{size} values can be put together in too many ways; allow fewer, or set maxItems"
                )
            return [PlainForm({"enum": found})] if found else []
        found, level = [], [list[Any]()]
        for number in range(most + 1):
            found += level if number >= form.least else []
            choices = options[number] if number < len(options) else last
            level = [[*begun, value] for begun in level for value in choices
                     if canonical(value) not in set(map(canonical, begun))]  # fmt: skip
            if len(found) + len(level) > UNIQUE_AT_MOST:
                raise SchemaError(path, "its items can be put together in too many ways; allow fewer, or set maxItems")
        return [PlainForm({"enum": found})] if found else []

    # ------------------------------------------------------------ objects

    def _objects(self, facts: list[Fact], denied: set[str]) -> list[Form]:
        return ObjectForms(self, self._ways, facts, denied).forms()


_Shape = tuple[list[set[Demand]], set[Demand], int, int | None]


@dataclass(slots=True)
class ObjectForms:
    """The forms of objects of which some facts hold."""

    of: SchemaForms
    ways: SchemaWays
    facts: list[Fact]
    denied: set[str]
    sources: list[int] = field(init=False)
    others: list[Fact] = field(init=False)
    properties: dict[str, list[Demand]] = field(default_factory=dict, init=False)
    """What holds of properties, by their names."""

    def forms(self) -> list[Form]:
        self.sources = list(dict.fromkeys(fact[1] for fact in self.facts if fact[0] == "object"))
        self.others = [fact for fact in self.facts if fact[0] == "others"]
        for fact in self.facts:
            if fact[0] == "property":
                self.properties.setdefault(fact[1], []).append(fact[2])
        names = [fact for fact in self.facts if fact[0] == "names"]
        absent = {fact[1] for fact in self.facts if fact[0] == "absent"}
        required = dict.fromkeys(fact[1] for fact in self.facts if fact[0] == "required")
        known = dict.fromkeys(
            name for part in self.sources for name in self.ways.parts.schema(part).get("properties", ())
        )
        known |= required | dict.fromkeys(fact[1] for fact in self.facts if fact[0] == "property")
        known |= dict.fromkeys(name for fact in self.others for name in fact[1])
        refused = [name for name in known if name in absent or not self._may_be_called(name, names, name in required)]
        if any(name in required for name in refused):
            return []
        named = [(name, self._value(name), name in required) for name in known if name not in refused]
        absent |= set(refused)
        least = max((fact[1] for fact in self.facts if fact[0] == "count"), default=0)
        most = min((fact[2] for fact in self.facts if fact[0] == "count" and fact[2] is not None), default=None)
        if any(text == "{}" for text in self.denied):
            least = max(1, least)
        patterns, rest = self._free(known, names, least)
        path = next((fact[3] for fact in self.facts if fact[0] == "count"), "")
        return self._counted(named, tuple(sorted(absent)), patterns, rest, least, most, path)

    def _may_be_called(self, name: str, names: list[Fact], required: bool) -> bool:
        told = [self.ways.values.fits(fact[1][0], name) for fact in names]
        if required and None in told and False not in told:
            path = next(fact[2] for fact in names)
            raise SchemaError(path, f"whether {name[:64]} fits it can't be told")
        return all(each is True for each in told)

    def _value(self, name: str) -> State:
        found: set[Demand] = set(self.properties.get(name, ()))
        for part in self.sources:
            for inner in self.ways.values.of_property(part, name):
                if inner is None:
                    path = self.ways.parts.path(part, "patternProperties")
                    raise SchemaError(path, f"whether {name[:64]} has one of its patterns can't be told")
                found.add((inner, True))
        for _, known, patterns, demand in self.others:
            told = [self.ways.values.found(pattern, name) for pattern in patterns]
            if name not in known and True not in told:
                found.add(demand)
        return self.of.state(found)

    def _free(
        self, known: Iterable[str], names: list[Fact], least: int
    ) -> tuple[tuple[tuple[str, State], ...], State | None]:
        """Return patterns of names that aren't known, each with its value, and the value of all others."""
        schemas = [self.ways.parts.schema(part) for part in self.sources]
        patterns = list(dict.fromkeys(pattern for schema in schemas for pattern in schema.get("patternProperties", ())))
        patterns += [p for fact in self.others for p in fact[2] if p not in patterns]
        speaks = patterns or names or any("additionalProperties" in schema for schema in schemas) or self.others
        if known and not speaks and not any(fact[0] == "count" and fact[1] for fact in self.facts):
            return (), None
        if len(patterns) > PATTERNS_AT_MOST:
            raise SchemaError(
                self._pattern_path(), f"more than {PATTERNS_AT_MOST} patterns on one object can't be combined"
            )
        terms = self.ways.terms
        rest = self._of_names(set())
        if not patterns and not names:
            # The engine's additionalProperties would take a known name again, with a character of it escaped.
            return (((text_of_others(known), rest),), None) if known else ((), rest)
        known = list(known)
        read = {pattern: self.of.term(pattern, self._pattern_path()) for pattern in patterns}
        with_pattern = {
            pattern: {name for name in known if terms.matches(term, name)} for pattern, term in read.items()
        }
        if len(patterns) == 1 and not names and self._is_never(rest):
            (pattern,) = patterns
            if not with_pattern[pattern]:
                text = self._text(read[pattern]) if is_hard(pattern) else pattern
                return ((text, self._of_names({pattern})),), None
        allowed = terms.both(self._name_term(fact) for fact in names)
        found: list[tuple[str, State]] = []
        for count in range(len(patterns), -1, -1):
            for chosen in combinations(patterns, count):
                state = self._of_names(set(chosen))
                parts = [read[each] if each in chosen else terms.other_than(read[each]) for each in patterns]
                # The engine takes a known name for no other, and where it allows no more names it finds no way on.
                taken = set(known).intersection(*(with_pattern[each] for each in chosen))
                if taken:
                    parts.append(terms.other_than(terms.either(map(terms.literal, sorted(taken)))))
                region = terms.both((allowed, *parts))
                if not self._is_never(state) and not terms.is_empty(region):
                    found.append((self._text(region), state))
        return tuple(found), None

    def _is_never(self, state: State) -> bool:
        return any(self.ways.parts.schema(part) is not fits for part, fits in state if self._is_bool(part))

    def _is_bool(self, part: int) -> bool:
        return isinstance(self.ways.parts.schema(part), bool)

    def _pattern_path(self) -> str:
        part = next((p for p in self.sources if "patternProperties" in self.ways.parts.schema(p)), None)
        if part is not None:
            return self.ways.parts.path(part, "patternProperties")
        return next(
            (fact[2] for fact in self.facts if fact[0] == "names"), self.ways.parts.path((self.sources or [0])[0])
        )

    def _text(self, term: int) -> str:
        try:
            return self.ways.terms.text(term)
        except ValueError as error:
            raise SchemaError(self._pattern_path(), str(error)) from None

    def _of_names(self, patterns: set[str]) -> State:
        """What holds of properties that no keyword names and whose names have just these patterns."""
        found: set[Demand] = set()
        for part in self.sources:
            schema = self.ways.parts.schema(part)
            mine = [pattern for pattern in schema.get("patternProperties", ()) if pattern in patterns]
            found |= {(self.ways.parts.child(part, "patternProperties", pattern), True) for pattern in mine}
            if not mine and "additionalProperties" in schema:
                found.add((self.ways.parts.child(part, "additionalProperties"), True))
        for _, _, evaluated, demand in self.others:
            if not patterns & set(evaluated):
                found.add(demand)
        return self.of.state(found)

    def _name_term(self, fact: Fact) -> int:
        """The names that `propertyNames` allows."""
        terms = self.ways.terms
        found = []
        for way in self.ways.of(*fact[1]):
            if "string" not in way.types:
                continue
            parts = []
            for each in way.facts:
                if each[0] == "values":
                    texts = [kept.value for _, kept in each[1] if isinstance(kept.value, str)]
                    parts.append(terms.either(map(terms.literal, texts)))
                elif each[0] == "no values":
                    texts = [_text(text) for text in each[1] if _denies("string", text)]
                    parts.append(terms.other_than(terms.either(map(terms.literal, texts))))
                elif each[0] == "length":
                    parts.append(terms.repeat(terms.chars(ALL), each[1], -1 if each[2] is None else each[2]))
                elif each[0] == "pattern":
                    term = self.of.term(each[1], each[3])
                    parts.append(term if each[2] else terms.other_than(term))
                elif each[0] == "format":
                    raise SchemaError(each[2], "a format of names can't be followed; give a pattern")
            found.append(terms.both(parts))
        return terms.either(found)

    def _counted(
        self,
        named: list[tuple[str, State, bool]],
        absent: tuple[str, ...],
        patterns: tuple[tuple[str, State], ...],
        rest: State | None,
        least: int,
        most: int | None,
        path: str,
    ) -> list[Form]:
        """Return the forms with enough properties and not too many. Other properties may repeat a name, so that one of
        them counts at most."""
        must = [each for each in named if each[2]]
        may = [name for name, _, required in named if not required]
        free = rest is not None or bool(patterns)

        def form(there: Iterable[str], optional: Iterable[str], low: int, high: int | None, open_: bool) -> ObjectForm:
            there, optional = set(there), set(optional)
            kept = tuple((name, state, needed or name in there) for name, state, needed in named
                         if needed or name in there or name in optional)  # fmt: skip
            names = {name for name, _, _ in kept}
            gone = (*absent, *(name for name, _, _ in named if name not in names))
            return ObjectForm(kept, gone, patterns if open_ else (), rest if open_ else None, low, high)

        if least <= len(must) and (most is None or (most >= len(named) and not free)):
            return [form((), may, 0, None, free)]
        if most is not None and most < max(least, len(must)):
            return []
        missing = max(0, least - len(must))
        if most is None and not free and not must and least == 1:
            return [form((), may, 1, None, False)]  # The engine's own.
        sizes = range(missing, missing + 1) if most is None else range(max(0, missing - 1), most - len(must) + 1)
        sizes = range(sizes.start, min(sizes.stop, len(may) + 1))
        if not _few_in_all((comb(len(may), size) for size in sizes), FORMS_AT_MOST):
            raise SchemaError(path, _TOO_MANY)
        found: list[Form] = []
        if most is None:
            chosen_ones = combinations(may, missing) if missing <= len(may) else ()
            found += [form(chosen, set(may) - set(chosen), 0, None, free) for chosen in chosen_ones]
            if free and missing > len(may):
                if missing > len(may) + 1:
                    raise SchemaError(path, _REPEATED)
                found.append(form(may, (), least, None, True))
            elif free and missing == 1:
                found.append(form((), (), least, None, True))
            return found
        for count in range(missing, min(len(may), most - len(must)) + 1):
            for chosen in combinations(may, count):
                found.append(form(chosen, (), 0, None, False))
        if free:
            for count in range(max(0, missing - 1), min(len(may), most - len(must) - 1) + 1):
                low, high = max(least, len(must) + count + 1), most
                for chosen in combinations(may, count):
                    found.append(form(chosen, (), low, high, True))
        if len(found) > FORMS_AT_MOST:
            raise SchemaError(path, _TOO_MANY)
        if not found and free and missing > len(may):
            raise SchemaError(path, _REPEATED)
        return found


_TOO_MANY = "it has too many ways to choose from so many properties; require some of them"
_REPEATED = (
    "properties without names may repeat each other, so that only one more than the named can be asked for; name them "
    "in properties"
)


def read_pattern(ways: SchemaWays, pattern: str, path: str) -> int:
    """Return the texts in which a pattern is found. Raises `SchemaError` with the reason where it can't be read."""
    try:
        return searched(pattern, ways.terms)
    except ValueError as error:
        raise SchemaError(path, str(error)) from None


def _few_in_all(numbers: Iterable[int], most: int) -> bool:
    """Whether numbers add up to `most` or less. They may be long, and aren't computed once they are more."""
    total = 0
    for number in numbers:
        total += number
        if total > most:
            return False
    return True


def _denies(type_: str, text: str) -> bool:
    """Whether a canonical text is of a value of a type."""
    kinds = {"n": "null", "t": "boolean", "f": "boolean", '"': "string", "[": "array", "{": "object"}
    return kinds.get(text[0], "number") == type_


def _text(canonical_text: str) -> str:
    return str(read_json(canonical_text))


def _items_of(text: str) -> int:
    """How many items an array has, of its canonical text."""
    depth, count, quoted, escaped = 0, 0, False, False
    for char in text[1:-1]:
        if quoted:
            quoted, escaped = not (char == '"' and not escaped), char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            count += 1
    return count + 1 if len(text) > 2 else 0


def _of_other_sizes(shapes: list[_Shape], size: int) -> list[_Shape]:
    found: list[_Shape] = []
    for first, rest, low, high in shapes:
        if size >= low:
            found.append((first, rest, low, size - 1 if high is None else min(high, size - 1)))
        found.append((first, rest, max(low, size + 1), high))
    return [shape for shape in found if shape[3] is None or shape[2] <= shape[3]]


def _common_multiple(steps: list[Fraction]) -> Fraction | None:
    if not steps:
        return None
    out = steps[0]
    for step in steps[1:]:
        out = Fraction(lcm(out.numerator, step.numerator), gcd(out.denominator, step.denominator))
    return out


_Bound = tuple[Decimal, bool] | None
"""A bound, and whether it is out (of lower ones) or in (of upper ones)."""


def _range(low: _Bound, high: _Bound, step: Fraction | None, whole: bool) -> list[Form]:
    """Return the numbers between two bounds that are multiples of a step."""
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1]))):
        return []
    schema: Schema = {"type": "integer" if whole else "number"}
    if step is None:
        if low is not None:
            schema["exclusiveMinimum" if low[1] else "minimum"] = _json_number(Fraction(low[0]))
        if high is not None:
            schema["maximum" if high[1] else "exclusiveMaximum"] = _json_number(Fraction(high[0]))
        return [PlainForm(schema)]
    first = last = None
    if low is not None:
        first = -(-Fraction(low[0]) // step)
        first += 1 if low[1] and first * step == Fraction(low[0]) else 0
        schema["minimum"] = _json_number(first * step)
    if high is not None:
        last = Fraction(high[0]) // step
        last -= 1 if not high[1] and last * step == Fraction(high[0]) else 0
        schema["maximum"] = _json_number(last * step)
    if first is not None and last is not None:
        if first > last:
            return []
        if step != 1 and last - first < FEW_NUMBERS:
            return [PlainForm({"enum": [_json_number(number * step) for number in range(first, last + 1)]})]
    if not (whole and step == 1):
        schema["multipleOf"] = _json_number(step)
    return [PlainForm(schema)]


def _json_number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _few(form: Form) -> list[Any] | None:
    """The values of a form where they are listed, or nearly."""
    if not isinstance(form, PlainForm):
        return None
    schema = form.schema
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        few: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
        return [v for kind in kinds for v in few[kind]] if all(kind in few for kind in kinds) else None
    if kinds == "null":
        return [None]
    if kinds == "boolean":
        return [True, False]
    if kinds == "integer" and "multipleOf" not in schema and {"minimum", "maximum"} <= schema.keys():
        low, high = schema["minimum"], schema["maximum"]
        return list(range(low, high + 1)) if high - low < FEW_NUMBERS else None
    return None
