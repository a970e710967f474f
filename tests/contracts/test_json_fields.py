"""Typed keys of `config.json`: values of another kind are refused by file and key, null counts as absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.errors import CheckpointError

PATH = Path("/a/config.json")
READERS: dict[str, Callable[[JsonFields], object]] = {
    "size": lambda fields: fields.size("key"),
    "count": lambda fields: fields.count("key"),
    "number": lambda fields: fields.number("key"),
    "flag": lambda fields: fields.flag("key"),
    "text": lambda fields: fields.text("key"),
    "choice": lambda fields: fields.text("key", choices=("a", "b")),
    "words": lambda fields: fields.words("key", 2, ("a", "b")),
    "table": lambda fields: fields.table("key"),
}
GOOD: dict[str, list[object]] = {
    "size": [1, 7],
    "count": [0, 1, 7],
    "number": [0, 1, 7, -1, 0.5, 1.0],
    "flag": [True, False],
    "text": ["", "a", "b", "c", "7"],
    "choice": ["a", "b"],
    "words": [["a", "b"], ["b", "b"]],
    "table": [{}, {"a": 1}],
}
VALUES: list[object] = [
    0, 1, 7, -1, 0.5, 1.0, True, False, "", "a", "b", "c", "7",
    [], ["a", "b"], ["a"], ["a", "b", "b"], ["a", "c"], ["b", "b"], ["a", 1], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_key_takes_values_of_its_kind_alone(reader: str) -> None:
    for value in VALUES:
        fields = JsonFields(PATH, {"key": value})
        if any(value is one or (type(value) is type(one) and value == one) for one in GOOD[reader]):
            assert READERS[reader](fields) == value
        else:
            with pytest.raises(CheckpointError, match=r"/a/config\.json: key "):
                READERS[reader](fields)


@pytest.mark.parametrize("values", [{}, {"key": None}])
def test_an_absent_key_has_its_default_and_without_one_is_named(values: dict[str, object]) -> None:
    fields = JsonFields(PATH, values)
    assert "key" not in fields
    for reader in READERS.keys() - {"flag", "table"}:
        with pytest.raises(CheckpointError, match=r"/a/config\.json has no key"):
            READERS[reader](fields)
    assert (fields.flag("key"), fields.flag("key", True), fields.table("key")) == (False, True, {})
    assert (fields.count("key", 0), fields.size("key", 3), fields.number("key", 0.0)) == (0, 3, 0.0)
    assert (fields.text("key", ""), fields.words("key", 1, ("a",), ["a"])) == ("", ["a"])


def test_a_default_is_held_to_the_same_rules() -> None:
    with pytest.raises(CheckpointError, match="must be a list of 2"):
        JsonFields(PATH, {}).words("key", 2, ("a",), ["a"])


def test_every_key_that_was_asked_for_was_read_and_no_other() -> None:
    fields = JsonFields(PATH, {"one": 1, "two": 2, "three": 3, "four": 4})
    fields.size("one")
    fields.count("absent", 0)
    assert "two" in fields
    assert list(fields.values) == ["one", "two", "three", "four"]
    assert fields.values.get("three") == 3
    assert fields.read == {"one", "absent", "two", "three"}
