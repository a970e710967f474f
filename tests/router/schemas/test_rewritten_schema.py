"""Keywords that the engine doesn't know, written again: what is written fits, what can't be followed is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.support.schema_samples import DRAFT7, accepts, byte_tokenizer, grammar_of, why_invalid, written
from twinpool.contracts.errors import RequestError
from twinpool.router.openai.json_schemas import followed
from twinpool.router.schemas import regular_terms, schema_forms, schema_ways
from twinpool.router.schemas.regular_terms import RegularTerms
from twinpool.router.schemas.rewritten_schema import SHAPES
from twinpool.router.schemas.schema_forms import SchemaForms
from twinpool.router.schemas.schema_parts import SchemaParts
from twinpool.router.schemas.schema_ways import SchemaWays

Schema = dict[str, Any]
ROOT = Path(__file__).parents[3]
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FOLLOWED: dict[str, tuple[Schema, list[Any]]] = {
    "oneOf": (
        {
            "oneOf": [
                {"type": "integer", "minimum": 0, "maximum": 9},
                {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 20},
            ]
        },
        [1, 9, 10, 20],
    ),
    "anyOf": ({"anyOf": [{"type": "boolean"}, {"const": 3}]}, [True, 3]),
    "allOf": (
        {"allOf": [AB, {"required": ["b"]}, {"properties": {"a": {"maximum": 5}}}]},
        [{"a": 5, "b": 9}, {"b": 1}],
    ),
    "not": ({"not": {"enum": ["a", 1]}, "type": ["string", "integer"]}, ["b", "", "aa", 0, 2]),
    "if": (
        {
            **AB,
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"required": ["b"]},
            "else": {"properties": {"b": {"const": 7}}},
        },
        [{"a": 1, "b": 3}, {"a": 2, "b": 7}, {"a": 2}],
    ),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}, {"b": 1}, {}]),
    "dependentSchemas": (
        {**AB, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}}},
        [{"a": 1, "b": 5}, {"b": 1}],
    ),
    "dependencies": ({**AB, "dependencies": {"a": ["b"], "b": {"maxProperties": 2}}}, [{"a": 1, "b": 5}]),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}, "maxContains": 2},
        [[7], [7, 7, 1]],
    ),
    "minContains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "minContains": 2},
        [[5, 6, 1]],
    ),
    "maxContains": (
        {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 0, "maxContains": 1},
        [[1, 2], [2]],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [["c", "a"], [], ["b"]],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
        [[1, True], [1]],
    ),
    "additionalItems": (
        {"$schema": DRAFT7, "type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
        [[1, 2, 2], []],
    ),
    "unevaluatedItems": (
        {"type": "array", "allOf": [{"prefixItems": [{"const": 1}]}], "unevaluatedItems": False},
        [[1], []],
    ),
    "unevaluatedProperties": (
        {**AB, "anyOf": [{"properties": {"c": {"const": 1}}, "required": ["c"]}, {}], "unevaluatedProperties": False},
        [{"a": 1}, {"b": 2, "c": 1}],
    ),
    "propertyNames": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^x", "maxLength": 3},
            "additionalProperties": {"type": "integer"},
        },
        [{"x": 1, "xab": 2}, {}],
    ),
    "patternProperties": (
        {
            "type": "object",
            "properties": {"aa": {"minimum": 3}},
            "patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 9}},
        },
        [{"aa": 3, "ab": 1}, {"b": 0}],
    ),
    "minProperties": ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, [{"k": 1}]),
    "maxProperties": ({**AB, "maxProperties": 1}, [{"a": 1}, {"b": 1}, {}]),
    "additionalProperties": ({**AB, "additionalProperties": {"type": "string"}}, [{"a": 1, "c": "x"}, {"": ""}]),
    "multipleOf": ({"type": "number", "multipleOf": 0.01, "minimum": 19.99, "maximum": 20}, [19.99, 20]),
    "const": ({"const": 19.99, "multipleOf": 0.01}, [19.99]),
    "enum": ({"enum": [19.99, 0.07, 0.005, "x"], "multipleOf": 0.01}, [19.99, 0.07, "x"]),
    "pattern": ({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9])(?!.*x).{4,8}$"}, ["AB12", "1234567A"]),
    "$ref": (
        {"$defs": {"n": {"$anchor": "few", "type": "integer", "minimum": 3}}, "$ref": "#few", "maximum": 5},
        [3, 5],
    ),
    "$dynamicRef": (
        {"type": "array", "items": {"$dynamicRef": "#n"}, "$defs": {"n": {"$dynamicAnchor": "n", "const": 1}}},
        [[1]],
    ),
    "format": ({"type": "string", "format": "json-pointer", "minLength": 1}, ["/a", "/~1"]),
}
"""A schema for each keyword, and instances that may be written."""
REFUSED: dict[str, tuple[Schema, str]] = {
    "uniqueItems": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "at uniqueItems: it can be"),
    "minProperties": ({"type": "object", "minProperties": 2}, "at minProperties: properties without names may repeat"),
    "not": ({"type": "number", "not": {"type": "integer"}}, "no value fits it once what doesn't fit not.type"),
    "oneOf": (
        {"oneOf": [{"format": "date"}, {"format": "time"}]},
        "at oneOf[0]: what doesn't fit oneOf[1].format can't",
    ),
    "$ref": ({"$ref": "https://example.com/x"}, "at $ref: it leads nowhere within the schema"),
    "itself": ({"allOf": [{"$ref": "#"}]}, "no value fits it"),
    "look-behind": ({"properties": {"p": {"pattern": "(?<=a)b"}}}, "at properties.p.pattern: look-behinds"),
    "formatMinimum": ({"type": "string", "formatMinimum": "a"}, "at formatMinimum: this keyword can't be followed"),
    "misspelt": (
        {"properties": {"p": {"max_length": 3}}},
        "at properties.p.max_length: there is no such keyword; maxLength",
    ),
    "shape": ({"properties": {"p": {"minLength": "3"}}}, "at properties.p.minLength: it must be a whole number"),
    "draft": ({"allOf": [{"required": True}]}, "at allOf[0].required: it must be an array of strings"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_keyword_is_followed(name: str) -> None:
    schema, instances = FOLLOWED[name]
    before = json.dumps(schema)
    grammar = grammar_of(schema)
    assert json.dumps(schema) == before
    assert [value for value in instances if not accepts(grammar, value)] == []
    answers = [answer for seed in range(10) if (answer := written(grammar, seed, before)) is not None]
    assert answers
    assert [why for answer in answers if (why := why_invalid(schema, answer))] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_followed_is_refused_with_its_place(name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(says)) as refused:
        grammar_of(schema)
    assert refused.value.param == "response_format"


def test_a_named_property_isnt_there_again_with_a_character_escaped() -> None:
    schema = {**AB, "additionalProperties": {"type": "string"}}
    grammar = grammar_of(schema)
    assert accepts(grammar, {"a": 1, "c": "x"})
    for text in (r'{"a":1,"\u0061":"x"}', r'{"\u0061":"x"}', '{"a":1,"a":"x"}', '{"a":"x"}'):
        raw = list(text.encode())
        assert LLMatcher(byte_tokenizer(), grammar, log_level=0).validate_tokens(raw) < len(raw)


@pytest.mark.parametrize("patterns", [["^score$"], ["^score$", "^(x|score)$"], ["^score$", "^[xy]$"]])
def test_a_pattern_of_declared_names_leaves_no_way_that_ends_nowhere(patterns: list[str]) -> None:
    """The engine takes a declared name for no other one, and offers a comma though no name may follow."""
    schema = {
        "properties": {"score": {"type": "integer", "multipleOf": 5}, "x": {"type": "null"}},
        "patternProperties": {pattern: {"type": ["integer", "null"]} for pattern in patterns},
        "type": "object", "required": ["score", "x"], "additionalProperties": False,
    }  # fmt: skip
    grammar = grammar_of(schema)
    for seed in range(40):  # Each is written to its end, or as long as it may go on.
        answer = written(grammar, seed, "scorexy")
        assert answer is None or not why_invalid(schema, answer)
    assert accepts(grammar, {"score": 5, "x": None})
    assert accepts(grammar, {"score": 5, "x": None, "y": 3}) == ("^[xy]$" in patterns)


@pytest.mark.parametrize("key", ["title", "x-order", "deprecated", "discriminator", "markdownDescription", "example"])
def test_what_says_nothing_about_values_is_ignored(key: str) -> None:
    assert accepts(grammar_of({"type": "integer", key: {"deep": [[]]}}), 5)


def nested(depth: int, keyword: str) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {keyword: schema} if keyword in ("not", "items") else {keyword: [schema]}
    return schema


@pytest.mark.parametrize("keyword", ["not", "items", "allOf", "oneOf"])
@pytest.mark.parametrize("depth", [60, 118, 124, 127, 500])
def test_a_deep_schema_is_followed_or_refused(keyword: str, depth: int) -> None:
    told = ""
    try:
        grammar_of(nested(depth, keyword))
    except RequestError as refused:
        told = str(refused)
    assert depth < 124 or "nested too deeply" in told or "schemas are laid on one value" in told


@pytest.mark.parametrize("depth", [1, 100, 900])
def test_a_deep_default_says_nothing(depth: int) -> None:
    default: Any = 1
    for _ in range(depth):
        default = [default]
    assert accepts(grammar_of({"type": "integer", "default": default}), 1)


HOSTILE: dict[str, Schema] = {
    "alternatives of alternatives": {
        "allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(8)]} for i in range(8)]
    },
    "many that overlap": {"oneOf": [{"required": [f"p{i}"]} for i in range(300)]},
    "many told apart": {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(250)]},
    "lengths": {"allOf": [{"minLength": i} for i in range(3000)]},
    "places": {"allOf": [{"contains": {"const": i}} for i in range(10)], "prefixItems": [{}] * 12},
    "an automaton of 2^15": {"type": "string", "pattern": "^(?!(a|b)*a(a|b){14}$).*$"},
    "patterns of names": {
        "properties": {
            f"p{i}": {"patternProperties": {"^x{1,30}a": {}, f"b{{{i}}}c": {}, "[0-9]$": {}}} for i in range(40)
        }
    },
    "look-aheads": {"type": "string", "not": {"pattern": "^" + "".join(f"(?=.*{c})" for c in "abcdefghijklm")}},
    "characters": {"type": "string", "not": {"pattern": f"[{''.join(chr(0x4E00 + 2 * i) for i in range(480))}]"}},
    "choices of properties": {"properties": {f"k{i}": {} for i in range(24)}, "minProperties": 12},
    "permutations": {
        "type": "array",
        "prefixItems": [{"enum": list(range(30))}] * 20,
        "items": False,
        "uniqueItems": True,
    },
    "conditions": {"dependentRequired": {f"k{i}": [f"k{i + 1}"] for i in range(40)}},
    "values": {"allOf": [{"enum": [f"word{i}" for i in range(9000)]}, {"pattern": "^w"}]},
    "names": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}, "not": {"required": ["zz"]}},
    "values of values": {"oneOf": [{"enum": list(range(i, i + 300))} for i in range(100)]},
    "choices of values": {
        "allOf": [{"enum": list(range(20_000))}, {"anyOf": [{"multipleOf": i + 2} for i in range(200)]}]
    },
    "repetitions": {"type": "string", "pattern": "^(?=(a{1,1000}){1,1000}$)(?!((a|b){1,900}c){1,900}$)"},
    "names with patterns": {
        "patternProperties": {f"^(a|b)*x[0-9]{{{i}}}": {"type": "integer"} for i in range(4)},
        "properties": {"ab" * 20 + f"p{i}": {} for i in range(2500)},
    },
    "texts left out": {"type": "string", "not": {"enum": [f"word{i}" * 3 for i in range(9000)]}},
    "places of many": {
        "allOf": [{"contains": {"const": i}, "maxContains": 300} for i in range(3)],
        "prefixItems": [{}] * 10,
    },
    "permutations of many": {"type": "array", "items": {"enum": list(range(20_000))}, "uniqueItems": True},
    "much that is required": {"required": [f"r{i}" for i in range(20_000)]},
}


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("name", HOSTILE)
def test_no_clients_schema_takes_much_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: ways that are joined, values in them, derivatives, items that are described, and characters
    of what is written."""
    made: list[RegularTerms] = []
    values = items = 0
    contain = SchemaForms._containing

    def counted_containing(self: SchemaForms, *args: Any) -> Iterator[Any]:
        nonlocal items
        for shape in contain(self, *args):
            items += len(shape[0])
            yield shape

    joined = 0
    join, begin = schema_ways._joined, RegularTerms.__init__

    def counted_join(*args: Any) -> Any:
        nonlocal joined, values
        joined += 1
        values += sum(len(fact[1]) for way in args for fact in way.facts if fact[0] == "values")
        return join(*args)

    def counted_begin(self: RegularTerms) -> None:
        begin(self)
        made.append(self)

    monkeypatch.setattr(schema_ways, "_joined", counted_join)
    monkeypatch.setattr(RegularTerms, "__init__", counted_begin)
    monkeypatch.setattr(SchemaForms, "_containing", counted_containing)
    written = ""
    with suppress(ValueError):
        written = json.dumps(followed(HOSTILE[name]))
    assert 0 < joined <= 3 * schema_ways.MAX_PRODUCTS  # With those that are tried to find the place of a fault.
    assert values <= 64 * schema_ways.MAX_PRODUCTS
    assert items <= 2 * schema_forms.MAX_PLACES
    assert len(written) <= 2_000_000
    assert sum(terms.steps for terms in made) <= 2 * (regular_terms.MAX_STEPS + regular_terms.MAX_WRITTEN**2)


EXTREMES: list[Schema] = [
    {"enum": [1e300, 1e-300, 5], "multipleOf": 1e-300},
    {"type": "integer", "minimum": 1e300},
    {"items": {"type": "integer", "minimum": -1e300, "maximum": 1e300}, "uniqueItems": True},
    {"type": "object", "maxProperties": 10**12},
    {"properties": {"a": {}}, "minProperties": 10**12, "maxProperties": 1e300},
    {"type": "object", "properties": {"a": {}}, "minProperties": 10**12},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1e300, "maxProperties": 5},
    {"contains": {"const": 1}, "minContains": 10**12},
    {"contains": {"const": 1}, "maxContains": 10**12},
    {"prefixItems": [{"enum": [1, 2]}], "items": {"enum": [3]}, "minItems": 10**12, "uniqueItems": True},
    {"type": "string", "minLength": 10**12, "maxLength": 10**13, "pattern": "^a", "not": {"const": "a"}},
    {"type": "string", "minLength": 2**62},
    {"type": "array", "minItems": 2**62, "maxItems": 2**63},
    {"type": "string", "maxLength": 1e300},
    {"type": "string", "pattern": "^(?!b)(a{1,1000}){99999999999}$"},
]


@pytest.mark.parametrize("number", range(len(EXTREMES)))
def test_extreme_numbers_are_followed_or_refused(number: int) -> None:
    with suppress(RequestError):
        grammar_of(EXTREMES[number])


def test_alternatives_that_a_constant_tells_apart_arent_combined() -> None:
    tagged = [{"properties": {"k": {"const": i}}, "required": ["k"], "type": "object"} for i in range(40)]
    schema = {"oneOf": tagged}
    ways = SchemaWays(parts := SchemaParts(schema))
    assert len(ways.of(parts.number((), schema), True)) == 40
    assert ways.products < 2000


def some_schema(rng: random.Random, depth: int = 2) -> Schema | bool:
    """A schema of few types and values, so that its keywords meet."""
    inner = partial(some_schema, rng, depth - 1)
    few: list[Any] = [0, 1, 2, 3, "", "a", "ab", None, True, [1], {"a": 1}, 0.5]
    made: dict[str, Callable[[], Any]] = {
        "type": lambda: rng.choice(["integer", "number", "string", "object", "array", ["string", "integer", "null"]]),
        "enum": lambda: rng.sample(few, 4),
        "const": lambda: rng.choice(few),
        "minimum": lambda: rng.randint(0, 3),
        "exclusiveMaximum": lambda: rng.randint(1, 5),
        "multipleOf": lambda: rng.choice([1, 2, 0.5]),
        "minLength": lambda: rng.randint(0, 2),
        "maxLength": lambda: rng.randint(1, 3),
        "pattern": lambda: rng.choice(["^a", "b$", "^[ab]*$", "^(?!a)"]),
        "minItems": lambda: rng.randint(0, 2),
        "maxItems": lambda: rng.randint(1, 3),
        "required": lambda: rng.sample("abc", rng.randint(1, 2)),
        "maxProperties": lambda: rng.randint(1, 2),
    }
    if depth:
        made |= {
            **dict.fromkeys(("items", "contains", "not", "additionalProperties", "if", "then", "else"), inner),
            **dict.fromkeys(("allOf", "anyOf", "oneOf"), lambda: [inner() for _ in range(2)]),
            "prefixItems": lambda: [inner()],
            "properties": lambda: {name: inner() for name in rng.sample("abc", 2)},
            "patternProperties": lambda: {rng.choice(["^a", "b"]): inner()},
            "dependentRequired": lambda: {"a": ["b"]},
            "dependentSchemas": lambda: {"b": inner()},
            "propertyNames": lambda: {"pattern": "^[ab]"},
            "unevaluatedProperties": lambda: rng.choice([False, {"type": "integer"}]),
            "unevaluatedItems": lambda: False,
        }
    elif rng.random() < 0.1:
        return rng.random() < 0.5
    return {key: made[key]() for key in rng.sample(sorted(made), rng.randint(1, 3))}


def random_faults(seed: int) -> list[str]:
    """What is wrong with what becomes of a random schema: answers that don't fit it, errors that are no refusals."""
    schema = some_schema(random.Random(seed))
    assert isinstance(schema, dict)
    try:
        grammar = grammar_of(schema)
    except RequestError:
        return []
    answers = [answer for seed in range(4) if (answer := written(grammar, seed, "ab01")) is not None]
    return [f"{json.dumps(schema)}: {why}" for answer in answers if (why := why_invalid(schema, answer))]


@pytest.mark.slow
def test_what_is_written_for_random_schemas_fits_them() -> None:
    assert [fault for seed in range(60) for fault in random_faults(seed)] == []


def test_the_table_of_keywords_says_what_is_followed() -> None:
    """Each keyword of the documentation's table has its example here, and each keyword is in the table."""
    page = (ROOT / "docs" / "using" / "structured-output.md").read_text()
    table = page[page.index("| keyword | followed |") :].partition("\n\n")[0]
    named = set(re.findall(r"`([$A-Za-z]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])))
    assert named >= SHAPES.keys()
    assert named >= FOLLOWED.keys()
