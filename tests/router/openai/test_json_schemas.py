"""JSON schemas: what is followed is what an independent validator takes; what can't be is refused with its place."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from twinpool.contracts.errors import RequestError
from twinpool.router.openai import json_schemas
from twinpool.router.openai.chat_format import ChatFormat, tools_fault
from twinpool.router.openai.json_schemas import EXACT, followed
from twinpool.router.openai.structured_output import read_grammar
from twinpool.router.openai.tools import read_tools

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "requires itself": ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "$defs.node.properties.next.$ref"),
    "a tree without a leaf": (TREE, "properties.left.$ref"),
    "one requires the other and that the one": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}},
            "required": ["a"],
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
            },
        },
        "$defs.b.properties.a.$ref",
    ),
    "a list of at least one of itself": (
        {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
         "required": ["x"]},
        "properties.x.items.$ref",
    ),
    "no value at all": ({"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]}, "properties.x.enum"),
    "a property that may not be there": (
        {"type": "object", "properties": {}, "required": ["x"], "additionalProperties": False},
        "additionalProperties",
    ),
    "a property that nothing is": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "properties.a"),
    "all alternatives": ({"anyOf": [TREE]}, "anyOf[0].properties.left.$ref"),
}  # fmt: skip
FIT: dict[str, dict[str, Any]] = {
    "a chain that ends": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}], "$defs": {"node": {
        "type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"], "additionalProperties": False}}},
    "a tree whose leaves are lists": {"type": "object", "properties": {
        "v": {"type": "boolean"}, "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "required": ["v", "c"], "additionalProperties": False},
    "optional itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "some value or itself": {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"],
                             "additionalProperties": False},
    "a number that is exact": {"enum": [EXACT, -EXACT, 0.5]},
}  # fmt: skip
CARD = {"type": "object", "properties": {"kind": {"const": "card"}, "n": {"enum": [1, 2]}}, "required": ["kind", "n"],
        "additionalProperties": False}  # fmt: skip
CASH = {"type": "object", "properties": {"kind": {"enum": ["cash", "coin"]}, "n": {"type": "null"}},
        "required": ["kind"], "additionalProperties": False}  # fmt: skip
ONE_OF: dict[str, dict[str, Any]] = {
    "a reference or null": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"enum": ["x", "y"]}}},
    "types": {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 3}, {"type": "null"}]},
    "values": {"oneOf": [{"const": 1}, {"enum": [2, "1"]}, {"const": True}]},
    "a kind": {"oneOf": [CARD, CASH]},
    "within": {"type": "object", "properties": {"pay": {"oneOf": [{"$ref": "#/$defs/card"}, {"$ref": "#/$defs/cash"}]}},
               "required": ["pay"], "additionalProperties": False, "$defs": {"card": CARD, "cash": CASH}},
}  # fmt: skip
OVERLAPS: dict[str, dict[str, Any]] = {
    "integers are numbers": {
        "oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "number", "minimum": 5}]
    },
    "a value of both": {"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]},
    "a kind that isn't required": {"oneOf": [CARD, {**CASH, "required": []}]},
    "anything": {"oneOf": [{"type": "string"}, {}]},
}


def grammar_of(schema: dict[str, Any]) -> str:
    return read_grammar({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}).text


def written(grammar: str, seed: int) -> str | None:
    """An answer of random bytes that the grammar allows; None where it didn't end."""
    rng, vocabulary = random.Random(seed), LLTokenizer("byte")
    matcher, out = LLMatcher(vocabulary, grammar, log_level=0), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(400):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if vocabulary.eos_token in allowed and ((matcher.is_accepting() and rng.random() < 0.5) or len(allowed) == 1):
            return out.decode()
        token = int(rng.choice([each for each in allowed if each != vocabulary.eos_token]))
        out.append(token)
        assert matcher.consume_token(token)
    return None


@pytest.mark.parametrize("name", UNFIT)
def test_a_schema_that_no_value_fits_is_refused_with_its_place(name: str) -> None:
    schema, place = UNFIT[name]
    with pytest.raises(RequestError) as refused:
        grammar_of(schema)
    told = str(refused.value)
    assert told.startswith(f"response_format.json_schema.schema can't be followed: at {place}: no value fits it")
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("name", FIT)
def test_a_schema_that_some_value_fits_is_followed(name: str) -> None:
    answers = [written(grammar_of(FIT[name]), seed) for seed in range(8)]
    ended = [answer for answer in answers if answer is not None]
    assert ended
    for answer in ended:
        Draft202012Validator(FIT[name]).validate(json.loads(answer))


@pytest.mark.parametrize("value", [EXACT + 1, -EXACT - 1, 10**30])
@pytest.mark.parametrize("where", ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_whole_number_that_would_become_another_is_refused(where: str, value: int) -> None:
    part: dict[str, Any] = {where: [0, {"deep": [value]}] if where == "enum" else value}
    if where not in ("enum", "const"):
        part["type"] = "integer"
    schema = {"type": "object", "properties": {"id": part}, "required": ["id"], "additionalProperties": False}
    for whole, place in ((schema, f"properties.id.{where}"), ({"not": {"contains": part}}, f"not.contains.{where}")):
        with pytest.raises(RequestError, match=re.escape(f"at {place}: {value} is beyond 2^53")):
            grammar_of(whole)


@pytest.mark.parametrize("name", ONE_OF)
def test_alternatives_that_exclude_each_other_are_followed(name: str) -> None:
    schema = ONE_OF[name]
    before = deepcopy(schema)
    answers = [written(grammar_of(schema), seed) for seed in range(12)]
    assert schema == before
    assert len(set(answers)) > 1
    for answer in answers:
        assert answer is not None
        Draft202012Validator(schema).validate(json.loads(answer))


@pytest.mark.parametrize("name", OVERLAPS)
def test_of_alternatives_that_overlap_just_one_fits(name: str) -> None:
    answers = [written(grammar_of(OVERLAPS[name]), seed) for seed in range(12)]
    ended = [answer for answer in answers if answer is not None]
    assert ended
    for answer in ended:
        Draft202012Validator(OVERLAPS[name]).validate(json.loads(answer))


@pytest.mark.parametrize("use", [{"tool_choice": "required"}, {"strict": True}])
def test_the_schemas_of_tools_are_read_alike(use: dict[str, Any]) -> None:
    function = {"name": "get", "parameters": TREE} | {k: v for k, v in use.items() if k == "strict"}
    body: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    body |= {k: v for k, v in use.items() if k == "tool_choice"}
    chats = ChatFormat("", "hermes")
    tools = read_tools(body)
    with pytest.raises(RequestError, match=r"parameters of get can't be followed: at \S+: no value fits it"):
        chats.grammar(tools, chats.answer_format(tools, ""), "")
    function["parameters"] = {"type": "object", "properties": {"pay": ONE_OF["a kind"]}, "required": ["pay"]}
    tools = read_tools(body)
    assert "oneOf" not in chats.grammar(tools, chats.answer_format(tools, ""), "")


def test_a_tools_keyword_that_the_engine_refuses_is_named() -> None:
    good = {"type": "object", "properties": {"a": {"type": "string"}}}
    bad = {"type": "object", "properties": {"a": {"items": {"type": "string", "pattern": "a("}}}}
    told = [
        tools_fault(read_tools({"tools": [
            {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}
            for name, schema in (("fine", good), ("get", bad))
        ]}))
        for strict in (True, False)
    ]  # fmt: skip
    assert told[0].startswith("the parameters of get can't be followed: at properties.a.items.pattern: ")
    assert told[1] == ""


def test_no_clients_schema_takes_long_to_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, as what a schema of the largest size may cost: looks at a schema."""
    looked = 0
    fits = json_schemas._fits

    def counted_fits(*args: Any) -> bool:
        nonlocal looked
        looked += 1
        return fits(*args)

    monkeypatch.setattr(json_schemas, "_fits", counted_fits)
    many = 400
    names = [f"d{number}" for number in range(many)]
    chain = {
        name: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{after}"}}, "required": ["x"]}
        for name, after in zip(reversed(names[:-1]), reversed(names[1:]), strict=True)
    }
    with suppress(ValueError):
        followed({"$ref": "#/$defs/d0", "$defs": {names[-1]: {"type": "null"}, **chain}})
    assert 0 < looked <= 2 * many * (json_schemas._ROUNDS + 1)
