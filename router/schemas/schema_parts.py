"""The parts of a client's schema: each subschema by a number, with its path, and what references lead to.

What is wrong with a schema as JSON (too deep, too large, texts that are none) is found with its place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin

Step = str | int
Steps = tuple[Step, ...]
Schema = dict[str, Any]
K = TypeVar("K", bound=Hashable)

MAX_PARTS = 20_000
"""Subschemas of one schema that is written again."""
_ONE = frozenset({"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
                  "then", "unevaluatedItems", "unevaluatedProperties"})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas: one, a list, or one a name."""


class SchemaError(ValueError):
    """Raised where a schema can't be followed, with the place and what to do."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"at {path}: {why}" if path else why)
        self.path = path
        self.why = why


def shown(steps: Steps) -> str:
    """Return steps as errors show them: ``properties.a.anyOf[0]``."""
    out = ""
    for step in steps:
        out += f"[{step}]" if isinstance(step, int) else f"{'.' if out else ''}{step[:64]}"
    out = out if len(out) <= 256 else f"{out[:120]}...{out[-120:]}"
    return out.encode(errors="backslashreplace").decode()


def subparts(schema: Any) -> Iterator[tuple[Steps, Any]]:
    """Yield the schemas right below `schema`, each with its steps."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _NAMED:
            if isinstance(value, dict):
                yield from (((key, name), part) for name, part in value.items() if isinstance(part, dict | bool))
        elif isinstance(value, list):
            if key in _LISTS:
                yield from (((key, number), part) for number, part in enumerate(value))
        elif key in _ONE and isinstance(value, dict | bool):
            yield (key,), value


def ending(names: Iterable[K], missing: Callable[[K, set[K]], Collection[K] | None]) -> set[K]:
    """Return the names that something of finite length fits, from the innermost on: `missing` says of a name which
    others must end first, one for each way to fit it (none: no way); None where it ends."""
    ended: set[K] = set()
    waiting: dict[K, list[K]] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name in ended:
            continue
        others = missing(name, ended)
        if others is None:
            ended.add(name)
            left += waiting.pop(name, ())
        for other in set(others or ()):
            waiting.setdefault(other, []).append(name)
    return ended


class SchemaParts:
    """All parts of one schema, numbered as they are first asked for."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        draft = str(root.get("$schema", ""))
        self.older = any(f"draft-0{number}" in draft for number in (3, 4, 6, 7))
        """Whether a reference stands for itself alone, as up to draft 7."""
        self._numbers: dict[Steps, int] = {}
        self._steps: list[Steps] = []
        self._schemas: list[Any] = []
        self._bases: dict[Steps, str] = {(): ""}
        self._places: dict[str, Steps] = {"": ()}
        """What `$id` and anchors name: URIs, with the anchor as fragment."""
        self._dynamic: dict[str, list[Steps]] = {}
        self.names: list[str] = []
        """The names of properties that the schema speaks of, each once."""
        self._walk()

    def _walk(self) -> None:
        left: list[tuple[Steps, Any, str]] = [((), self.root, "")]
        names: dict[str, None] = {}
        count = 0
        while left:
            steps, schema, base = left.pop()
            count += 1
            if count > MAX_PARTS:
                raise SchemaError(shown(steps), f"there are more than {MAX_PARTS} schemas within each other")
            if not isinstance(schema, dict):
                continue
            alone = self.older and "$ref" in schema
            own = schema.get("$id", schema.get("id"))
            if isinstance(own, str) and not alone:
                if own.startswith("#"):
                    self._places.setdefault(base + own, steps)
                else:
                    base = urljoin(base, own).removesuffix("#")
                    self._bases[steps] = base
                    self._places.setdefault(base, steps)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(key), str):
                    self._places.setdefault(f"{base}#{name}", steps)
                    if key == "$dynamicAnchor":
                        self._dynamic.setdefault(name, []).append(steps)
            if isinstance(schema.get("properties"), dict):
                names.update(dict.fromkeys(schema["properties"]))
            if isinstance(schema.get("required"), list):
                names.update(dict.fromkeys(name for name in schema["required"] if isinstance(name, str)))
            left += [((*steps, *more), part, base) for more, part in reversed(list(subparts(schema)))]
        self.names = list(names)

    def number(self, steps: Steps, schema: Any) -> int:
        found = self._numbers.setdefault(steps, len(self._steps))
        if found == len(self._steps):
            if not isinstance(schema, dict | bool):
                raise SchemaError(shown(steps), f"it must be a schema; got {json.dumps(schema)[:64]}")
            self._steps.append(steps)
            self._schemas.append(schema)
        return found

    def schema(self, part: int) -> Any:
        return self._schemas[part]

    def steps(self, part: int) -> Steps:
        return self._steps[part]

    def path(self, part: int, *more: Step) -> str:
        return shown((*self._steps[part], *more))

    def child(self, part: int, *more: Step) -> int:
        """Return the part below `part` to which the steps `more` lead."""
        found = self._schemas[part]
        for step in more:
            found = found[step]
        return self.number((*self._steps[part], *more), found)

    def target(self, part: int, key: str) -> int:
        """Return the part to which a reference leads. Raises `SchemaError` where it leads nowhere."""
        given, path = self._schemas[part][key], self.path(part, key)
        if not isinstance(given, str):
            raise SchemaError(path, "a reference must be a string")
        if key == "$recursiveRef" or (key == "$dynamicRef" and self._depends_on_callers(given)):
            raise SchemaError(path, "a reference that depends on who refers can't be followed; use $ref")
        base, _, fragment = urljoin(self._base(self._steps[part]), given).partition("#")
        fragment = unquote(fragment)
        if given.startswith("#"):
            base, fragment = self._base(self._steps[part]), unquote(given[1:])
        if (named := self._places.get(f"{base}#{fragment}")) is not None and fragment:
            return self._at(named, path)
        resource = self._places.get(base)
        if resource is None or (fragment and not fragment.startswith("/")):
            raise SchemaError(path, "it leads nowhere within the schema; put what it refers to below $defs")
        found: Any = self._at_steps(resource)
        steps = list(resource)
        for raw in fragment.split("/")[1:]:
            step = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
                steps.append(int(step))
            elif isinstance(found, dict) and step in found:
                found = found[step]
                steps.append(step)
            else:
                raise SchemaError(path, "it leads nowhere within the schema; put what it refers to below $defs")
        return self.number(tuple(steps), found)

    def _depends_on_callers(self, given: str) -> bool:
        return len(self._dynamic.get(given.rpartition("#")[2], ())) > 1

    def _base(self, steps: Steps) -> str:
        return next(self._bases[steps[:end]] for end in range(len(steps), -1, -1) if steps[:end] in self._bases)

    def _at(self, steps: Steps, path: str) -> int:
        return self.number(steps, self._at_steps(steps))

    def _at_steps(self, steps: Steps) -> Any:
        found: Any = self.root
        for step in steps:
            found = found[step]
        return found


_SURROGATE = re.compile("[\\ud800-\\udfff]")
_DESCENTS = 8
"""Steps of the path that is said of what is too large."""


@dataclass(frozen=True, slots=True)
class Place:
    """A value within a client's schema."""

    value: Any
    above: Place | None = None
    step: Step = ""
    depth: int = 0

    def steps(self) -> Steps:
        out: list[Step] = []
        place = self
        while place.above is not None:
            out.append(place.step)
            place = place.above
        return tuple(reversed(out))


def places(value: Any) -> Iterator[Place]:
    """Yield all values within `value`, the outer first. No recursion: a client decides how deep it is."""
    left = [Place(value)]
    while left:
        place = left.pop()
        yield place
        inner: Any = ()
        if isinstance(place.value, dict):
            inner = place.value.items()
        elif isinstance(place.value, list):
            inner = enumerate(place.value)
        left += [Place(part, place, step, place.depth + 1) for step, part in reversed(list(inner))]


def too_deep_place(value: Any, most: int) -> Steps:
    """Return the steps to what is nested more than `most` deep, or to the deepest."""
    deepest = Place(value)
    for place in places(value):
        if place.depth > deepest.depth:
            deepest = place
        if deepest.depth > most:
            break
    return deepest.steps()


def first_place(value: Any, wrong: Callable[[Place], bool]) -> Steps | None:
    """Return the steps to the first value within `value` that is wrong; None where none is."""
    return next((place.steps() for place in places(value) if wrong(place)), None)


def has_surrogate(place: Place) -> bool:
    """Whether a text, or the name of a value, holds half of a surrogate pair."""
    return any(isinstance(text, str) and _SURROGATE.search(text) for text in (place.step, place.value))


def is_huge(place: Place) -> bool:
    """Whether a number is beyond all floats."""
    return isinstance(place.value, int | float) and abs(place.value) > sys.float_info.max


def large_place(value: Any) -> Steps:
    """Return the steps to the part of a schema that most of its text is in."""
    steps: list[Step] = []
    size = len(json.dumps(value)) // 2
    for _ in range(_DESCENTS):
        inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        found = next(((step, part) for step, part in inner if len(json.dumps(part)) > size), None)
        if found is None:
            break
        steps.append(found[0])
        value = found[1]
    return tuple(steps)
