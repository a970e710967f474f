"""The JSON Schema Test Suite: each schema is followed, and then whatever is written fits it, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.schema_samples import SuiteCase, grammar_of, suite, why_invalid, written
from twinpool.contracts.errors import RequestError

CASES = list(suite())
SAMPLED = CASES[::3]
SEEDS = 2


def places(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All places within a schema as errors show them, each with its last step."""
    if isinstance(value, dict):
        for name, part in value.items():
            here = f"{path}.{name}" if path else name
            yield here, name
            yield from places(part, here)
    for number, part in enumerate(value if isinstance(value, list) else ()):
        yield f"{path}[{number}]", f"[{number}]"
        yield from places(part, f"{path}[{number}]")


def has_place(schema: Any, told: str) -> bool:
    """Whether an error names a place that is in the schema."""
    begin = "response_format.json_schema.schema can't be followed: at "
    return any(told.startswith(f"{begin}{path}: ") for path, _ in places(schema))


def faults(case: SuiteCase, seeds: range) -> list[str]:
    """What is wrong with what becomes of a case: answers that don't fit, or none that ends."""
    try:
        grammar = grammar_of(case.schema)
    except RequestError as refused:
        wrong = refused.param != "response_format" or not has_place(case.schema, str(refused))
        return [f"{case[:3]}: refused without its place: {refused}"] if wrong else []
    hints = json.dumps(case.schema, ensure_ascii=False)
    ended = [answer for seed in seeds if (answer := written(grammar, seed, hints)) is not None]
    found = [why_invalid(case.schema, answer, "ecmascript" in case.file) for answer in ended]
    if not ended:
        found = ["no answer ends"] if any(written(grammar, seed, hints) is None for seed in range(100, 140)) else []
    return [f"{case[:3]}: {why}" for why in found if why]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_is_written_for_a_schema_of_the_suite_fits_it(part: int) -> None:
    assert [fault for case in SAMPLED[part::4] for fault in faults(case, range(SEEDS))] == []


def test_every_file_of_the_suite_is_sampled() -> None:
    assert {case.file for case in SAMPLED if "/" not in case.file} >= {
        case.file for case in CASES if "/" not in case.file and sum(c.file == case.file for c in CASES) >= 3
    }


ALONE: dict[str, list[Any]] = {
    "format": ["regex", "unknown"],
    "multipleOf": [1e-300],
    "uniqueItems": [True],
    "minProperties": [3],
    "pattern": ["(?<=a)b", "a(", "\\b", "[z-a]", "(?!a(b"],
    "$ref": ["#/nowhere", "https://example.com/"],
    "divisibleBy": [2],
    "max_length": [2],
    "enum": [[], [2**60]],
    "const": [2**53 + 1],
    "minimum": [2**60],
    "exclusiveMaximum": [1e300],
    "not": [{}, True],
    "anyOf": [[]],
    "required": ["a"],
    "maxItems": [-1],
}
"""Keywords with values that are refused whatever is beside them."""
AROUND: list[tuple[str, Any]] = [
    ("", lambda part: part),
    ("properties.b.", lambda part: {"type": "object", "properties": {"a": {}, "b": part}, "required": ["b"]}),
    ("items.", lambda part: {"type": "array", "minItems": 1, "items": part}),
    ("allOf[1].", lambda part: {"allOf": [{"title": "x"}, part]}),
    ("$defs.d.", lambda part: {"$ref": "#/$defs/d", "$defs": {"d": part}}),
    (
        "properties.a.allOf[0].",
        lambda part: {"type": "object", "properties": {"a": {"allOf": [part]}}, "required": ["a"], "maxProperties": 2},
    ),
]


@pytest.mark.parametrize("around", range(len(AROUND)))
@pytest.mark.parametrize("keyword", ALONE)
def test_the_one_keyword_that_cant_be_followed_is_named(keyword: str, around: int) -> None:
    before, put = AROUND[around]
    for value in ALONE[keyword]:
        schema = put({"title": "a", "description": "b", keyword: value, "default": 1})
        with pytest.raises(RequestError) as refused:
            grammar_of(schema)
        begin = f"response_format.json_schema.schema can't be followed: at {before}{keyword}"
        assert str(refused.value).startswith(begin), value
        assert has_place(schema, str(refused.value))


def test_what_is_wrong_with_a_schema_as_json_has_its_place_too() -> None:
    deep: Any = {}
    for _ in range(140):
        deep = {"items": deep}
    for schema, says in (
        ({"properties": {"a": {"enum": ["x" * 100] * 4000}}}, "at properties.a.enum: it has "),
        ({"properties": {"a": {"const": "\ud800"}}}, "at properties.a.const: it holds lone surrogates"),
        ({"properties": {"\ud800": {}}}, "at properties.\\ud800: it holds lone surrogates"),
        ({"properties": {"a": {"minimum": 10**400}}}, "at properties.a.minimum: it is a number beyond"),
        ({"properties": {"a": {"x-guidance": {}}}}, "at properties.a.x-guidance: x-guidance is no keyword"),
        ({"properties": {"a": deep}}, "at properties.a.items.items."),
    ):
        with pytest.raises(RequestError) as refused:
            grammar_of(schema)
        assert str(refused.value).startswith(f"response_format.json_schema.schema can't be followed: {says}")
