"""What a client asks for in a field of structured output becomes a grammar that accepts that and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from twinpool.contracts.errors import RequestError
from twinpool.router.openai import structured_output
from twinpool.router.openai.client_grammar import check_grammar
from twinpool.router.openai.json_schemas import close, nodes_of
from twinpool.router.openai.request_fields import MAX_CHOICES, STRUCTURED_OUTPUT
from twinpool.router.openai.structured_output import may_need_grammar, read_grammar
from twinpool.router.openai.tools import read_tools
from twinpool.router.schemas.schema_parts import Place, Steps, first_place

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": ["number", "null"]}},
    "required": ["x"],
    "additionalProperties": False,
}
POINTS, NO_POINTS = (
    ['{"x": 1}', '{"x":-12, "y": null}', '{ "x" : 0 , "y" : 1.5 }'],
    ['{"y": 1}', '{"x": 1, "z": 2}', "[]", '{\n  "x": 0}', '{"x":  1}', '{"x": 1  }'],
)
OBJECTS, NO_OBJECTS = ["{}", '{"a": [1, {"b": "é"}]}'], ["[]", '"a"', "{} {}", "{'a': 1}", '{"a": [1,\n2]}', "{  }"]
INDENTED = '{\n\t"x": 1,\n\t"y": 2\n}'
LARK = 'start: "a" inner "c"\ninner: "b"*\n'
GBNF = 'root ::= "a" inner "c"\ninner ::= "b"*\n'
ABC, NO_ABC = ["ac", "abbc"], ["ab", "abcc", "a b c", ""]

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, OBJECTS, NO_OBJECTS),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": POINT}}},
        POINTS,
        NO_POINTS,
    ),
    ({"structured_outputs": {"json": POINT}}, POINTS, NO_POINTS),
    ({"structured_outputs": {"json": json.dumps(POINT), "regex": None}}, POINTS, NO_POINTS),
    ({"structured_outputs": {"json_object": True}}, OBJECTS, NO_OBJECTS),
    (
        {"structured_outputs": {"disable_any_whitespace": True, "json": POINT}},
        ['{"x":1}', '{"x":-12,"y":null}'],
        ['{"x": 1}', '{"x":1, "y":2}', '{"x":1 }'],
    ),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ['{"a":" b"}'], ['{"a": 1}']),
    (
        {"structured_outputs": {"json": POINT, "whitespace_pattern": r"\s*"}},
        [INDENTED, '{"x":1}', '{"x":     1}'],
        ['{"x":\u00a01}', '{"x":\v1}'],
    ),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": "[ \n]{0,2}"}}, ['{\n "a":1}'], ['{   "a":1}']),
    ({"guided_json": POINT, "guided_whitespace_pattern": "[\\n\\t ]?[\\t]?"}, [INDENTED], ['{"x":    1}']),
    ({"structured_outputs": {"regex": "[a-c]{2,3}é?"}}, ["ab", "abcé"], ["a", "abca", "abé!"]),
    (
        {"structured_outputs": {"choice": ["yes", 'no "way"', "ja\n"]}},
        ["yes", 'no "way"', "ja\n"],
        ["no", "ye", "yes "],
    ),
    ({"structured_outputs": {"grammar": LARK}}, ABC, NO_ABC),
    ({"guided_json": POINT}, POINTS, NO_POINTS),
    ({"guided_json_object": True}, OBJECTS, NO_OBJECTS),
    ({"guided_regex": "a|b"}, ["a", "b"], ["ab", "c"]),
    ({"guided_choice": ["a", "b", "a"]}, ["a", "b"], ["ab", "c"]),
    ({"guided_grammar": GBNF}, ABC, NO_ABC),
    ({"json_schema": json.dumps(POINT)}, POINTS, NO_POINTS),
    ({"regex": "[0-9]+"}, ["0", "123"], ["", "1a"]),
    ({"ebnf": GBNF}, ABC, NO_ABC),
    ({"ebnf": LARK}, ABC, NO_ABC),
]
OPEN = {
    "type": "object",
    "properties": {
        "inner": {"anyOf": [{"$ref": "#/$defs/inner"}, {"type": "null"}]},
        "told": {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    },
    "required": ["inner"],
    "$defs": {"inner": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
}
CASES.append(
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": OPEN}}},
        ['{"inner": {"n": 1}}', '{"inner": null, "told": {"a": 1, "b": 2}}', '{"inner": {"n": 1}, "told": {"b": 2}}'],
        ['{"inner": {"n": 1, "m": 2}}', '{"inner": null, "other": 1}', '{"inner": {}}'],
    )
)
NOTHING: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False}},
    {"guided_json_object": False},
]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "an object with a type"),
    ({"response_format": {"type": "xml"}}, "response_format", 'got "xml"'),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "got 5"),
    ({"structured_outputs": 5}, "structured_outputs", "must be an object"),
    (
        {"structured_outputs": {"json": POINT, "disable_any_whitespace": 1}},
        "structured_outputs",
        "disable_any_whitespace",
    ),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "needs json or json_object"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "needs json"),
    ({"structured_outputs": {"json": POINT, "whitespace_pattern": "x*"}}, "structured_outputs", "blanks, tabs"),
    ({"structured_outputs": {"json": POINT, "whitespace_pattern": "[^ ]"}}, "structured_outputs", "blanks, tabs"),
    ({"structured_outputs": {"json": POINT, "whitespace_pattern": 5}}, "structured_outputs", "blanks, tabs"),
    ({"structured_outputs": {"new_kind": {"a": 1}}}, "structured_outputs", "json, json_object, regex"),
    ({"guided_json": POINT, "guided_whitespace_pattern": "."}, "guided_whitespace_pattern", "blanks, tabs"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "regex and choice can't be combined",
    ),
    ({"regex": "a", "guided_regex": "a"}, "regex", "guided_regex and regex can't be combined"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "not valid JSON"),
    ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", "no keyword of JSON schema"),
    ({"guided_json": {"anyOf": [{"type": "null"}, {"x-guidance": {}}]}}, "guided_json", "no keyword of JSON schema"),
    ({"guided_json_object": 1}, "guided_json_object", "true or false"),
    ({"guided_regex": ""}, "guided_regex", "a regular expression"),
    ({"guided_regex": ["a"]}, "guided_regex", "a regular expression"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "at most 262144"),
    ({"guided_json": {"const": "\ud800"}}, "guided_json", "lone surrogates"),
    ({"guided_json": {"\udfff": True}}, "guided_json", "lone surrogates"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "lone surrogates"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs", "lone surrogates"),
    ({"guided_choice": ["a", "\ud800"]}, "guided_choice", "lone surrogates"),
    ({"ebnf": 'start: "\ud800"'}, "ebnf", "lone surrogates"),
    ({"guided_choice": []}, "guided_choice", f"1 to {MAX_CHOICES} strings"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "strings"),
    ({"guided_choice": ["a", 5]}, "guided_choice", "strings"),
    ({"guided_choice": [str(n) for n in range(MAX_CHOICES + 1)]}, "guided_choice", "strings"),
    ({"guided_grammar": '%llguidance {}\nstart: "a"'}, "guided_grammar", "not supported"),
    ({"ebnf": 'start: %json {"x-guidance": {"lenient": true}}'}, "ebnf", "not supported"),
    ({"guided_grammar": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'}, "guided_grammar", "Expected name"),
    ({"guided_grammar": "  "}, "guided_grammar", "a grammar, a string"),
    ({"ebnf": 'root ::= "a'}, "ebnf", "end of input at line 1"),
]


def _with(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}}


NOT_FOLLOWED: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "at type: it must be a type"),
    ({"type": "array", "uniqueItems": True}, "at uniqueItems:"),
    (
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "x"}}]}},
        },
        "at properties.a.anyOf[1].items.type:",
    ),
    (
        {
            "$defs": {"b": {"type": "array", "uniqueItems": True}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/b"}},
        },
        "at $defs.b.uniqueItems:",
    ),
    ({"$ref": "#/$defs/missing"}, "at $ref: it leads nowhere"),
    ({"$ref": "https://example.com/schema.json"}, "at $ref: it leads nowhere"),
    ({"allOf": [{"anyOf": [_with(f"p{i}{j}") for j in range(8)]} for i in range(8)]}, "at allOf[2]: it has more than"),
]
NOT_COMPILED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a("}, "guided_regex can't be followed: at line 1, column 2: regular expression: unclosed group"),
    ({"guided_regex": "x(?=a)b"}, "at line 1, column 2: regular expression: look-around"),
    ({"structured_outputs": {"regex": "ab[z-a]"}}, "structured_outputs.regex can't be followed: at line 1, column 4:"),
    ({"guided_grammar": "start: missing"}, "at line 1, column 8: unknown name"),
    ({"ebnf": 'start: "é" one\n\none: two\n'}, "ebnf can't be followed: at line 3, column 6: unknown name"),
    ({"ebnf": 'start: %json {"enum":\n\n[1, 2]} one "c"\none: two\n'}, "at line 4, column 6: unknown name"),
    ({"ebnf": 'start: one\none: "%json" /a{3,2}/\n'}, "ebnf can't be followed: at line 2, column 6: "),
    ({"ebnf": 'root ::= "a" b\n\n  b ::= [z-a]'}, "ebnf can't be followed: at line 3, column 3: "),
    ({"ebnf": 'root ::= "a"\n b ::= "b" c'}, "ebnf: at line 2, column 12: Rule 'c' not found"),
]


SCHEMAS_IN_GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (
        'start: "<" %json {"type": "integer", "if": {"minimum": 4}, "then": {"maximum": 9}} ">"',
        ["<3>", "<9>"],
        ["<10>"],
    ),
    (
        'start: (a | b)\na: %json {"type": "array", "items": {"enum": [1, 2]},\n "uniqueItems": true}\nb: "%json {}"\n',
        ["[1,2]", "%json {}"],
        ["[1,1]", "3"],
    ),
    ("start: /%json{2}\\%json/ // %json 5\n", ["%jsonn%json"], ["%json"]),
    (
        'start: x\nx: %lark {\nstart: %json {"not": {"type": ["object", "array"]}}\n}\n',
        ["5"],
        ["{}"],
    ),
]
"""Grammars with schemas in keywords that the engine doesn't know, what they allow, and what they don't."""
REFUSED_IN_GRAMMARS: list[tuple[str, str]] = [
    (
        'start: "a"\n  %json {"type": "strin"}',
        "at line 2, column 3: %json can't be followed: at type: it must be a type",
    ),
    (
        'start: %json {"items": {"format": "regex"}}',
        "at line 1, column 8: %json can't be followed: at items.format: Unkn",
    ),
    ('start: %json {"properties": {"a": {"max_length": 3}}}', "%json can't be followed: at properties.a.max_length:"),
    ('start: %json {"x-guid\\u0061nce": {"lenient": true}}', "at x-guidance: x-guidance is no keyword"),
    ('start: %json {"const": 9007199254740993}', "%json can't be followed: at const: 9007199254740993 is beyond"),
    ('start: %json {"const": "\\ud800"}', "%json can't be followed: at const: it holds lone surrogates"),
    ("start: %json [1]", "at line 1, column 8: %json must be a JSON schema"),
    ('start: %json {"a":', "at line 1, column 8: what follows %json is no JSON"),
    ('start: <%json> "a"', "at line 1, column 8: %json can't be in the name of a mark"),
    ("start: " + "| %json {}" * 65, "at most 64 schemas may be in one grammar"),
]


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def follows(grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer of the grammar, as its engine reads it byte by byte."""
    matcher = LLMatcher(byte_tokenizer(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting() if text else matcher.is_accepting()


@pytest.mark.parametrize(("body", "good", "bad"), CASES, ids=lambda value: str(value)[:60])
def test_a_field_becomes_a_grammar_of_what_it_asks_for(body: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = read_grammar(body)
    assert grammar.field == next(iter(body))
    assert check_grammar(grammar.text) == ""
    assert {text: follows(grammar.text, text) for text in [*good, *bad]} == dict.fromkeys(good, True) | dict.fromkeys(
        bad, False
    )


def test_every_field_is_tried() -> None:
    assert {field for body, _, _ in CASES for field in body} == set(STRUCTURED_OUTPUT)


@pytest.mark.parametrize("body", NOTHING, ids=str)
def test_a_field_that_asks_for_nothing_asks_for_no_grammar(body: dict[str, Any]) -> None:
    assert read_grammar(body) == ("", "")


@pytest.mark.parametrize(("body", "param", "says"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        read_grammar(body)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(("body", "says"), NOT_COMPILED, ids=lambda value: str(value)[:60])
def test_what_cant_be_compiled_is_said(body: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        read_grammar(body)
    assert caught.value.param == next(iter(body))


@pytest.mark.parametrize(("schema", "says"), NOT_FOLLOWED, ids=lambda value: str(value)[:60])
def test_a_schema_that_cant_be_followed_is_refused_with_its_place(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"guided_json can't be followed: {says}")) as caught:
        read_grammar({"guided_json": schema})
    assert caught.value.param == "guided_json"


@pytest.mark.parametrize(("lark", "good", "bad"), SCHEMAS_IN_GRAMMARS)
def test_a_schema_within_a_grammar_is_followed_as_others_are(lark: str, good: list[str], bad: list[str]) -> None:
    grammar = read_grammar({"ebnf": lark}).text
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


@pytest.mark.parametrize(("lark", "says"), REFUSED_IN_GRAMMARS)
def test_a_schema_within_a_grammar_is_refused_with_both_places(lark: str, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        read_grammar({"structured_outputs": {"grammar": lark}})
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("field", [*STRUCTURED_OUTPUT, "tools", "output_config"])
def test_a_body_that_names_a_field_is_recognised_before_it_is_read(field: str) -> None:
    assert may_need_grammar(json.dumps({"prompt": "a", field: "b"}).encode())
    for letter in field:
        for digits in (f"{ord(letter):04x}", f"{ord(letter):04X}"):
            raw = json.dumps({field: "b"}).replace(letter, f"\\u{digits}").encode()
            assert json.loads(raw) == {field: "b"} or letter == "b"
            assert may_need_grammar(raw)


def test_a_plain_body_is_not_taken_for_one() -> None:
    assert not may_need_grammar(json.dumps({"prompt": "follow the regex of « é » \n 中"}).encode())


NAMES_A = {"type": "object", "properties": {"a": {"type": "integer"}}}


AB = '{"a":1,"b":2}'


@pytest.mark.parametrize(
    ("schema", "open_to"),
    [
        ({"allOf": [NAMES_A, {"properties": {"b": {}}, "required": ["b"]}]}, AB),
        ({"oneOf": [{**NAMES_A, "required": ["a"]}, {"type": "string"}], "required": ["b"]}, AB),
        ({**NAMES_A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, AB),
        ({**NAMES_A, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}, "required": ["b"]}}}, AB),
        ({**NAMES_A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, AB),
        ({**NAMES_A, "unevaluatedProperties": {"type": "integer"}}, AB),
        ({"type": "array", "items": {**NAMES_A, "required": ["a", "b"]}}, f"[{AB}]"),
        ({**NAMES_A, "minProperties": 2}, AB),
        ({**NAMES_A, "patternProperties": {"^b": {}}}, AB),
        ({**NAMES_A, "additionalProperties": {"type": "integer"}}, AB),
        ({"type": "object"}, AB),
        ({**NAMES_A, "const": {"a": 1, "b": 2}}, AB),
    ],
)
def test_objects_that_may_need_a_property_they_dont_name_stay_open(schema: dict[str, Any], open_to: str) -> None:
    grammar = read_grammar({"guided_json": schema}).text
    assert check_grammar(grammar) == ""
    assert follows(grammar, open_to)


@pytest.mark.parametrize(
    "schema",
    [NAMES_A, {"allOf": [NAMES_A, {"properties": {"c": {}}}]}, {**NAMES_A, "anyOf": [{}, {"minProperties": 0}]}],
)
def test_an_object_that_names_its_properties_has_no_others(schema: dict[str, Any]) -> None:
    grammar = read_grammar({"guided_json": schema}).text
    assert follows(grammar, '{"a":1}')
    assert not follows(grammar, AB)


def test_objects_are_closed_wherever_a_schema_may_have_them_and_the_clients_own_is_not_changed() -> None:
    shut = {**NAMES_A, "additionalProperties": False}

    def places(inner: dict[str, Any]) -> dict[str, Any]:
        return {
            "$defs": {"one": inner}, "definitions": {"two": inner}, "items": {"anyOf": [inner, {"type": "null"}]},
            "prefixItems": [inner], "additionalProperties": inner, "patternProperties": {"^x": inner},
            "description": {"properties": {"no": "schema"}}, "default": NAMES_A,
        }  # fmt: skip

    given = json.loads(json.dumps(places(NAMES_A)))
    close(nodes_of(given))
    assert given == places(shut)
    sent = {"type": "object", "properties": {"a": NAMES_A}, "items": NAMES_A, "anyOf": [NAMES_A]}
    before = json.dumps(sent)
    assert read_grammar({"guided_json": sent}).text
    assert json.dumps(sent) == before


def test_places_in_tools_are_looked_for_only_where_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes fifty times as long as to see that nothing is, and agents send their tools with each request."""
    known: dict[str, Any] = {"const": 10**15}
    tool = {"name": "f", "description": "ü" * 400 + "9" * 400, "parameters": {"properties": {"a": known}}}
    asked = {"tools": [{"type": "function", "function": tool}]}
    looked: list[object] = []

    def find(value: Any, wrong: Callable[[Place], bool]) -> Steps | None:
        looked.append(value)
        return first_place(value, wrong)

    monkeypatch.setattr(structured_output, "first_place", find)
    assert read_tools(asked) is not None
    assert looked == []
    known["const"] = 10**400
    with pytest.raises(RequestError, match=r"at \[0\].function.parameters.properties.a.const: it is a number beyond"):
        read_tools(asked)
    assert looked
