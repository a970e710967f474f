"""Gemma 4's calls: their values as JSON, and a JSON schema as a grammar of how they are written."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.parsers.test_parsers import parse, taken, told, written
from twinpool.contracts.errors import RequestError
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, joined
from twinpool.router.parsers.gemma_calls import GemmaCalls
from twinpool.router.parsers.tool_formats import FORMATS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "c": {"type": "array", "items": {"enum": ["x", 1]}},
        "d": {"$ref": "#/$defs/tree"},
        "e": {"type": ["boolean", "string"]},
    },
    "required": ["b"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}, "n": {"type": "number", "minimum": 0}},
            "additionalProperties": False,
        }
    },
}
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.just(0.5), st.text('a{}[]:,"\\ é', max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)


@given(arguments=st.dictionaries(st.sampled_from(["a", "b_c", "d"]), VALUES, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_arguments_come_back_as_they_were_written(arguments: dict[str, Any]) -> None:
    text = written("gemma4", [("f", arguments)])
    whole = parse(GemmaCalls(), [text])
    assert told(whole) == ("", [("f", arguments)])
    assert parse(GemmaCalls(), list(text)) == whole


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # Quoted keys, None as templates write it, and a word that is no JSON.
        ('<|tool_call>call:f{<|"|>k<|"|>:None,w:two words}<tool_call|>',
         [CallPart("f"), ArgumentsPart('{"k": null, "w": "two words"}')]),
        ('<|tool_call>call:f{a:<|"|>br', [CallPart("f"), ArgumentsPart('{"a": "br')]),
        ("<|tool_call>f{}<tool_call|>", [ContentPart("<|tool_call>f{}<tool_call|>")]),
        ("<|tool_call>call:f", [ContentPart("<|tool_call>call:f")]),
        ("I look.\n<|tool_call>call:f{}<tool_call|>", [ContentPart("I look."), CallPart("f"), ArgumentsPart("{}")]),
    ],
)  # fmt: skip
def test_what_is_odd_is_read_as_far_as_it_goes(text: str, parts: list[AnswerPart]) -> None:
    assert parse(GemmaCalls(), [text]) == parts == parse(GemmaCalls(), list(text))
    assert list(joined(parts)) == parts


@pytest.mark.parametrize(
    "arguments",
    [
        {"b": 5},
        {"b": None, "a": "x"},
        {"a": "", "b": 1, "c": [], "e": True},
        {"b": 1, "c": ["x", 1, "x"], "d": {"left": {"left": {}, "n": 1}}, "e": "yes"},
        {"b": 1, "d": {"n": 0.5}},
        {},
        {"a": "x"},
        {"b": "1"},
        {"b": 1, "c": ["y"]},
        {"b": 1, "d": {"n": -1}},
        {"b": 1, "z": 2},
        {"b": 1, "e": 5},
    ],
    ids=str,
)
def test_a_grammar_takes_what_the_schema_takes(arguments: dict[str, Any]) -> None:
    made = FORMATS["gemma4"].grammar([("f", SCHEMA)], False)
    good = jsonschema.Draft202012Validator(SCHEMA).is_valid(arguments)
    assert taken(made, written("gemma4", [("f", arguments)])) is good, json.dumps(arguments)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a"}, {"type": "array", "minItems": 1}, {"enum": [{}]}, {"$ref": "#/$defs/gone"},
        {"type": "object", "patternProperties": {}},
    ],
)  # fmt: skip
def test_what_cant_be_enforced_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"can't be enforced|leads nowhere"):
        FORMATS["gemma4"].grammar([("f", {"type": "object", "properties": {"a": schema}})], False)
