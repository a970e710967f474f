"""Places within a client's schema of what is wrong with it as JSON: too deep, too large, texts that are none."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from twinpool.router.schemas.schema_parts import Step, Steps

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
