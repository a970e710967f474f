"""The forms that values take: a plain schema, an array, an object; each is written in the engine's keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from twinpool.router.schemas.schema_parts import Schema, SchemaParts
from twinpool.router.schemas.schema_ways import Demand

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
