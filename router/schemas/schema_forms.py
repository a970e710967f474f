"""The forms of values in the engine's keywords: each way to fit, type by type, as a schema of that type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, permutations
from math import comb, gcd, lcm, perm
from typing import Any

from twinpool.router.schemas.ecma_patterns import is_hard
from twinpool.router.schemas.regular_terms import ALL, text_of_others
from twinpool.router.schemas.schema_parts import Schema, SchemaError
from twinpool.router.schemas.schema_values import canonical, decimal, is_of_type, text_of
from twinpool.router.schemas.schema_ways import Demand, Fact, SchemaWays, Way, about
from twinpool.router.schemas.value_forms import (
    MAX_FORMS,
    ArrayForm,
    Form,
    ObjectForms,
    PlainForm,
    State,
    few_in_all,
    state_of,
)

MAX_UNIQUE = 400
"""Arrays that are listed where no item may be there twice."""
FEW_WORDS = 32
"""Texts left out that are looked at for whether any text is left."""
FEW_NUMBERS = 64
"""Numbers that are listed rather than described."""
MAX_ITEMS = 1000
"""Items of an array that are described one by one."""
MAX_PLACES = 16 * MAX_ITEMS
"""Items of all arrays that are described for one value."""


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
        if len(found) > MAX_FORMS:
            raise SchemaError(self._path(state), f"it has more than {MAX_FORMS} alternatives; have fewer")
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
        free = [name for name in free if not any(is_of_type(text, name) for text in denied)]
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
        out = sorted(Decimal(text) for text in denied if is_of_type(text, "number"))
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
        out = [text_of(text) for text in denied if is_of_type(text, "string")]
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
        term = self._ways.term(pattern, path)
        term = term if wanted else self._terms.other_than(term)
        readable.append(term)
        if self._terms.is_empty(term):
            return ["[^\\x{0}-\\x{10ffff}]"]
        return self._written(term, path)

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
        if max(count, least) > MAX_ITEMS:
            path = self._parts.path(next((fact[1] for fact in facts if fact[0] == "items"), 0))
            raise SchemaError(path, f"more than {MAX_ITEMS} items can't be described one by one")

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
                    if len(found) > MAX_FORMS or items > MAX_PLACES:
                        why = "too many places for what it asks for; have fewer of them, or of prefixItems"
                        raise SchemaError(fact[4], why)
                shapes = found
        for text in denied:
            if is_of_type(text, "array"):
                shapes = _of_other_sizes(shapes, _items_of(text))
        forms: list[Form] = []
        unique = next((fact[1] for fact in facts if fact[0] == "unique"), None)
        for first, rest, low, high in shapes:
            if high is not None and low > high:
                continue
            listed = tuple(state_of(self._parts, item) for item in first[:high])
            form = ArrayForm(listed, state_of(self._parts, rest), low, high)
            forms += [form] if unique is None else self._unique(form, unique)
        return forms

    def _containing(self, shape: _Shape, fact: Fact) -> Iterator[_Shape]:
        """Return the shapes in which enough items fit what `contains` asks for, and not too many: they stand together,
        at each place among the first items."""
        first, rest, low, high = shape
        _, (part, fits), least, most, _ = fact
        if most is not None and least > most:
            return
        for start in range(len(first) + 1) if least or most is not None else [0]:
            end = start + (least if most is None else most)
            if end > MAX_ITEMS:
                raise SchemaError(fact[4], f"it may ask for {MAX_ITEMS} items")
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
            if few_in_all((perm(size, count) for count in counts), MAX_UNIQUE):
                found = [list(each) for count in counts for each in permutations(last, count)]
            elif few_in_all((comb(size, count) for count in counts), 4 * MAX_UNIQUE):  # In their order alone.
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
            if len(found) + len(level) > MAX_UNIQUE:
                raise SchemaError(path, "its items can be put together in too many ways; allow fewer, or set maxItems")
        return [PlainForm({"enum": found})] if found else []

    # ------------------------------------------------------------ objects

    def _objects(self, facts: list[Fact], denied: set[str]) -> list[Form]:
        return ObjectForms(self._ways, facts, denied).forms()


_Shape = tuple[list[set[Demand]], set[Demand], int, int | None]


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
