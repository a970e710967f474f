"""Instances of any message type, made from the types of its fields alone: no list of messages that could fall behind.

`full` has in every field a value that is not its default and differs from every other value in the instance, so that a
field that is lost, or that trades places with another, is seen. `empty` has zeros, empty collections and False, but no
None; `absent` has None wherever that may be. Of two truths one can't tell which is which: `one_truth_each` has one
instance for each bool field, in which that field alone is True.

A tuple of a union has one of each of its messages. A field of a type that none of the rules knows raises `TypeError`: a
new kind of field comes with its rule.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec


class Values:
    """Values that are all different from one another, within what every wire can carry."""

    def __init__(self) -> None:
        self._count = 100

    def next(self) -> int:
        self._count += 1
        return self._count

    def of(self, kind: Any, where: str, default: Any = dataclasses.MISSING) -> Any:
        kind = plain(kind)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if is_record(kind):
            return self.record(kind)
        if kind is bool:
            return default is not True
        if kind is int:
            return self.next()
        if kind is float:
            return self.next() + 0.5
        if kind is str:
            return f"{where}-{self.next()}"
        if kind is bytes:
            return f"{where}-{self.next()}".encode()
        if isinstance(kind, type) and issubclass(kind, Enum):
            members = [member for member in kind if member is not default]
            return members[self.next() % len(members)]
        if origin in (typing.Union, types.UnionType):
            (inner,) = (a for a in args if a is not types.NoneType)
            return self.of(inner, where)
        if origin is tuple and args[-1] is Ellipsis and (kinds := messages_of_union(args[0])):
            return tuple(self.record(one) for one in kinds)
        if origin is frozenset:
            return frozenset(self.of(args[0], where) for _ in range(2))
        if origin is tuple and args[-1] is Ellipsis:
            return (self.of(args[0], where), self.of(args[0], where))
        if origin is tuple:
            return tuple(self.of(a, where) for a in args)
        if origin in (dict, Mapping):
            return {self.of(args[0], where): self.of(args[1], where) for _ in range(2)}
        if kind is Any:
            return {"a": self.next(), "b": (self.next(), f"{where}-{self.next()}"), "c": None, "d": self.next() + 0.25}
        raise TypeError(f"{where}: no rule makes a value of {kind}")

    def record(self, cls: type[Any]) -> Any:
        fields = fields_of(cls)
        return cls(**{name: self.of(kind, name, default) for name, (kind, default) in fields.items()})


def full(cls: type[Any], **fixed: Any) -> Any:
    """See above; `fixed` are fields that others of the record depend on. Raises `TypeError` for a field of which
    nothing can be made, or only its default."""
    values = Values()
    fields = fields_of(cls)
    made = cls(
        **{
            name: fixed[name] if name in fixed else values.of(kind, name, default)
            for name, (kind, default) in fields.items()
        }
    )
    for name, (_, default) in fields.items():
        if getattr(made, name) == default:
            raise TypeError(f"{cls.__name__}.{name}: no rule makes a value that isn't its default {default!r}")
    return made


def empty(cls: type[Any]) -> Any:
    return cls(**{name: _zero(kind, f"{cls.__name__}.{name}") for name, (kind, _) in fields_of(cls).items()})


def absent(cls: type[Any]) -> Any:
    values = Values()
    return cls(
        **{
            name: None if optional(kind) else values.of(kind, name, default)
            for name, (kind, default) in fields_of(cls).items()
        }
    )


def one_truth_each(cls: type[Any]) -> Iterator[Any]:
    names = [name for name, (kind, _) in fields_of(cls).items() if plain(kind) is bool]
    for chosen in names:
        values = Values()
        yield cls(
            **{
                name: name == chosen if name in names else values.of(kind, name, default)
                for name, (kind, default) in fields_of(cls).items()
            }
        )


def all_of(cls: type[Any]) -> list[Any]:
    return [full(cls), empty(cls), absent(cls), *one_truth_each(cls)]


def _zero(kind: Any, where: str) -> Any:
    kind = plain(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_record(kind):
        return empty(kind)
    if kind in (bool, int, float, str, bytes):
        return kind()
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in args if a is not types.NoneType)
        # An empty name is no name: text that may be None travels as empty text.
        return None if plain(inner) is str else _zero(inner, where)
    if origin is tuple:
        return () if args[-1] is Ellipsis else tuple(_zero(a, where) for a in args)
    if origin is frozenset:
        return frozenset()
    if origin in (dict, Mapping):
        return {}
    raise TypeError(f"{where}: no rule makes an empty value of {kind}")


def optional(kind: Any) -> bool:
    return types.NoneType in typing.get_args(plain(kind))


def plain(kind: Any) -> Any:
    """Without the name that `NewType` gave it."""
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    return kind


def is_record(kind: Any) -> bool:
    named_tuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or is_struct(kind) or named_tuple


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def fields_of(cls: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Type and default (or `MISSING`) of each field."""
    hints = typing.get_type_hints(cls)
    if is_struct(cls):
        return {
            field.name: (
                hints[field.name],
                dataclasses.MISSING
                if field.required
                else field.default_factory()
                if field.default_factory is not msgspec.NODEFAULT
                else field.default,
            )
            for field in msgspec.structs.fields(cls)
        }
    if not dataclasses.is_dataclass(cls):
        return {name: (hints[name], cls._field_defaults.get(name, dataclasses.MISSING)) for name in cls._fields}
    out = {}
    for field in dataclasses.fields(cls):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        out[field.name] = (hints[field.name], made)
    return out


def messages_of_union(kind: Any) -> list[type[Any]]:
    """The messages of a union of several; none of any other type."""
    several = typing.get_origin(kind) in (typing.Union, types.UnionType) and types.NoneType not in typing.get_args(kind)
    return union(kind) if several else []


def union(kind: Any) -> list[type[Any]]:
    """The types of a union, of unions in it, too."""
    out: list[type[Any]] = []
    for part in typing.get_args(kind):
        out += union(part) if typing.get_origin(part) in (typing.Union, types.UnionType) else [part]
    return out
