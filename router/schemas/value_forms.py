"""The forms that values take: a plain schema, an array, an object; each is written in the engine's keywords.

Of an object a form says which properties are there, and what holds of names that the schema doesn't know. The engine
tells names apart by patterns alone, so every combination of a schema's patterns is a pattern of its own, and where
properties are counted every choice of them is a form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import Any

from twinpool.router.schemas.ecma_patterns import is_hard
from twinpool.router.schemas.regular_terms import ALL, text_of_others
from twinpool.router.schemas.schema_parts import Schema, SchemaError, SchemaParts
from twinpool.router.schemas.schema_values import is_of_type, text_of
from twinpool.router.schemas.schema_ways import Demand, Fact, SchemaWays

State = frozenset[Demand]
"""What holds of one value."""
MAX_FORMS = 256
"""Forms of one value."""
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


def state_of(parts: SchemaParts, demands: Iterable[Demand]) -> State:
    """Return what `demands` say together, without those that say nothing."""
    return frozenset(d for d in demands if parts.schema(d[0]) is not d[1] and parts.schema(d[0]) != {})


def few_in_all(numbers: Iterable[int], most: int) -> bool:
    """Whether numbers add up to `most` or less. They may be long, and aren't computed once they are more."""
    total = 0
    for number in numbers:
        total += number
        if total > most:
            return False
    return True


MAX_PATTERNS = 4
"""Patterns of names whose every combination is a case of its own."""
_TOO_MANY = "it has too many ways to choose from so many properties; require some of them"
_REPEATED = (
    "properties without names may repeat each other, so that only one more than the named can be asked for; name them "
    "in properties"
)


@dataclass(slots=True)
class ObjectForms:
    """The forms of objects of which some facts hold."""

    ways: SchemaWays
    facts: list[Fact]
    denied: set[str]
    sources: list[int] = field(init=False)
    others: list[Fact] = field(init=False)
    properties: dict[str, list[Demand]] = field(default_factory=dict, init=False)
    """What holds of properties, by their names."""

    def __post_init__(self) -> None:
        self.sources = list(dict.fromkeys(fact[1] for fact in self.facts if fact[0] == "object"))
        self.others = [fact for fact in self.facts if fact[0] == "others"]
        for fact in self.facts:
            if fact[0] == "property":
                self.properties.setdefault(fact[1], []).append(fact[2])

    def forms(self) -> list[Form]:
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
        return state_of(self.ways.parts, found)

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
        if len(patterns) > MAX_PATTERNS:
            raise SchemaError(
                self._pattern_path(), f"more than {MAX_PATTERNS} patterns on one object can't be combined"
            )
        terms = self.ways.terms
        rest = self._of_names(set())
        if not patterns and not names:
            # The engine's additionalProperties would take a known name again, with a character of it escaped.
            return (((text_of_others(known), rest),), None) if known else ((), rest)
        known = list(known)
        read = {pattern: self.ways.term(pattern, self._pattern_path()) for pattern in patterns}
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
        return state_of(self.ways.parts, found)

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
                    texts = [text_of(text) for text in each[1] if is_of_type(text, "string")]
                    parts.append(terms.other_than(terms.either(map(terms.literal, texts))))
                elif each[0] == "length":
                    parts.append(terms.repeat(terms.chars(ALL), each[1], -1 if each[2] is None else each[2]))
                elif each[0] == "pattern":
                    term = self.ways.term(each[1], each[3])
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
        if not few_in_all((comb(len(may), size) for size in sizes), MAX_FORMS):
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
        if len(found) > MAX_FORMS:
            raise SchemaError(path, _TOO_MANY)
        if not found and free and missing > len(may):
            raise SchemaError(path, _REPEATED)
        return found
