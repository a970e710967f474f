"""Typed access to the keys of `config.json`: errors name the file and the key that is bad or missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from twinpool.contracts.errors import CheckpointError

_MISSING = object()


class _Noting(dict[str, object]):
    """A dictionary that remembers which keys were looked up, present or not."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: object = None) -> object:
        self.read.add(key)
        return super().get(key, default)


class JsonFields:
    """The keys of a JSON object, checked as they are read; null counts as absent.

    Readers raise `CheckpointError`, in one line, for a value of the wrong kind, and for an absent key without a
    default.
    """

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.nulls = frozenset(key for key, value in values.items() if value is None)
        """The keys that are there without a value, where that isn't the default."""
        self.values = _Noting({key: value for key, value in values.items() if value is not None})

    @property
    def read(self) -> frozenset[str]:
        """The keys that were looked up by name so far; iterating over `values` adds none."""
        return frozenset(self.values.read)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def peek(self, key: str) -> object:
        """The value, or None, for what isn't said to be read by looking at it."""
        return dict.get(self.values, key)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        return self._whole(key, default, 1, "a positive whole number")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more."""
        return self._whole(key, default, 0, "a whole number of 0 or more")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} must be a number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None, choices: Sequence[str] = ()) -> str:
        """A word, one of `choices` where `choices` isn't empty."""
        value = self._get(key, default)
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "a word"
            raise CheckpointError(f"{self.path}: {key} must be {wanted}, got {value!r}")
        return value

    def words(self, key: str, length: int, choices: Sequence[str], default: Sequence[str] | None = None) -> list[str]:
        """A list of exactly `length` words of `choices`, such as the kind of each layer."""
        value = self._get(key, default)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != length:
            raise CheckpointError(f"{self.path}: {key} must be a list of {length}, got {value!r}")
        bad = [word for word in value if word not in choices]
        if bad:
            raise CheckpointError(f"{self.path}: {key} has {bad[0]!r}; supported are {', '.join(choices)}")
        return [str(word) for word in value]

    def table(self, key: str) -> Mapping[str, object]:
        """A JSON object; empty where the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.path}: {key} must be an object, got {value!r}")
        return value

    def refuse(self, message: str) -> CheckpointError:
        """Returns, for the caller to raise, the error for another fault of this file."""
        return CheckpointError(f"{self.path}: {message}")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key, default if default is not None else _MISSING)
        if value is _MISSING:
            raise CheckpointError(f"{self.path} has no {key}")
        return value

    def _whole(self, key: str, default: int | None, least: int, wanted: str) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{self.path}: {key} must be {wanted}, got {value!r}")
        return value
