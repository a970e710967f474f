"""What parsers find in an answer doesn't depend on where its text is cut, and is what each format's own words say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from twinpool.contracts.errors import RequestError
from twinpool.router.parsers.answer_parts import (
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentPart,
    PartsParser,
    ReasoningPart,
    joined,
)
from twinpool.router.parsers.reasoning_parser import REASONING, PlainContent, ReasoningParser, opened, reasoning_of
from twinpool.router.parsers.tool_formats import FORMATS, CallGrammar, format_of

TYPES = {"find": {"text": "string", "most": "integer", "where": "object"}, "now": {}}
ARGUMENTS: dict[str, Any] = {"text": 'a "b" </tool_call>\n\n\\é 中', "most": 5, "where": {"x": [1, {"y": None}]}}
ELEMENTS = ("qwen3_coder", "seed_oss", "glm45", "glm47", "deepseek_v32", "deepseek_v4", "minimax_m2")
ARRAYS = {
    "mistral_json": ("[TOOL_CALLS] ", ""),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "apriel": ("<tool_calls>", "</tool_calls>"),
    "granite": ("<|tool_call|>", ""),
}
"""What stands around an array of calls."""
ONLY_TEXT: dict[str, Any] = {"text": "plain\n\nlines"}
MARKS = [
    "<tool_call>", "</tool_call>", "<function=find>", "</function>", "<parameter=text>", "</parameter>",
    "<arg_key>text", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "find", "now",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="find">', '<｜DSML｜parameter name="text" string="true">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>", "</｜DSML｜function_calls>", "<|python_tag|>", '{"name": "find", "arguments": {"text": "x"}}',
    '{"name": ', '"find"', ", ", '"parameters": ', "{}",
    "<|channel|>", "analysis", "commentary", "final", " to=functions.find", "<|message|>", "<|end|>",
    "<|start|>assistant", "<|call|>", "<|return|>", " <|constrain|>json", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>", "<|tool_call|>",
    "<seed:tool_call>", "</seed:tool_call>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>",
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="find">', '<parameter name="text">', "</parameter>",
    "</invoke>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.find:0", "<|tool_call_end|>",
    "<|tool_call>", "call:find{", "<tool_call|>", '<|"|>', "text:", ":", "most:5",
    "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", "[", "]", ",",
    "{", "}", '"', "\\", "\n", " ", "; ", "5", "é", "🙂", "<", ">", "<think>", "</think>", "some words", "[1]",
]  # fmt: skip


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as the documentation of a format's models writes them."""
    if name == "hermes":
        return "\n".join(
            "<tool_call>\n" + json.dumps({"name": f, "arguments": a}, ensure_ascii=False) + "\n</tool_call>"
            for f, a in calls
        )
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": f, "parameters": a}) for f, a in calls)
    if name == "deepseek_v3":
        each = (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{f}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
            for f, a in calls
        )
        return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"
    if name == "deepseek_v31":
        each = (f"<｜tool▁call▁begin｜>{f}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>" for f, a in calls)
        return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"
    if name == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={f}>\n"
            + "".join(f"<parameter={k}>\n{_word(v)}\n</parameter>\n" for k, v in a.items())
            + "</function>\n</tool_call>"
            for f, a in calls
        )
    if name == "seed_oss":
        return "\n".join(
            f"<seed:tool_call>\n<function={f}>\n"
            + "".join(f"<parameter={k}>{_word(v)}</parameter>\n" for k, v in a.items())
            + "</function>\n</seed:tool_call>"
            for f, a in calls
        )
    if name == "glm45":
        return "\n".join(
            f"<tool_call>{f}\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_word(v)}</arg_value>\n" for k, v in a.items())
            + "</tool_call>"
            for f, a in calls
        )
    if name == "glm47":
        return "".join(
            f"<tool_call>{f}"
            + "".join(f"<arg_key>{k}</arg_key><arg_value>{_word(v)}</arg_value>" for k, v in a.items())
            + "</tool_call>"
            for f, a in calls
        )
    if name == "harmony":
        return "<|call|><|start|>assistant".join(
            f"<|channel|>commentary to=functions.{f} <|constrain|>json<|message|>{json.dumps(a)}" for f, a in calls
        )
    if name == "kimi_k2":
        each = (
            f"<|tool_call_begin|>functions.{f}:{n}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
            for n, (f, a) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{f}[ARGS]{json.dumps(a)}" for f, a in calls)
    if name in ARRAYS:
        begin, end = ARRAYS[name]
        return begin + json.dumps([{"name": f, "arguments": a} for f, a in calls]) + end
    if name == "gemma4":
        return "".join(f"<|tool_call>call:{f}{_gemma(a)}<tool_call|>" for f, a in calls)
    if name == "minimax_m2":
        return (
            "<minimax:tool_call>\n"
            + "".join(
                f'<invoke name="{f}">\n'
                + "".join(f'<parameter name="{k}">{_word(v)}</parameter>\n' for k, v in a.items())
                + "</invoke>\n"
                for f, a in calls
            )
            + "</minimax:tool_call>"
        )
    invokes = (
        f'<｜DSML｜invoke name="{f}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{_word(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in a.items()
        )
        + "</｜DSML｜invoke>\n"
        for f, a in calls
    )
    around = "tool_calls" if name == "deepseek_v4" else "function_calls"
    return f"<｜DSML｜{around}>\n{''.join(invokes)}</｜DSML｜{around}>"


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_whose_arguments_are_free_takes_any(name: str) -> None:
    made = FORMATS[name].grammar([("find", {"type": "object"})], False)
    assert taken(made, written(name, [("find", {"text": "x", "most": 5})]))
    assert taken(made, written(name, [("find", {})]))


@pytest.mark.parametrize("name", [*ELEMENTS, "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": {"type": "string", "maxLength": 5}}}, {"properties": {}, "anyOf": [{"required": ["a"]}]}],
)
def test_what_elements_cant_enforce_is_refused(name: str, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="can't be enforced"):
        FORMATS[name].grammar([("find", {"type": "object", **schema})], False)


def taken(made: CallGrammar, text: str) -> bool:
    """Whether a grammar of calls takes all of a text, as its engine reads it byte by byte."""
    trigger = json.dumps(made.trigger, ensure_ascii=False) if made.trigger else ""
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: {trigger} calls\n{made.rules}"}]})
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(part)}" for key, part in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def parser_of(name: str) -> PartsParser:
    return FORMATS[name].parser(TYPES)


def parse(parser: PartsParser, pieces: list[str]) -> list[AnswerPart]:
    found = [part for piece in pieces for part in parser.feed(piece)]
    return list(joined(found + parser.finish()))


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def told(parts: list[AnswerPart]) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls with their arguments."""
    content = "".join(part.text for part in parts if isinstance(part, ContentPart))
    calls: list[tuple[str, Any]] = []
    for part in parts:
        if isinstance(part, CallPart):
            calls.append((part.name, ""))
        elif isinstance(part, ArgumentsPart):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("name", "before"),
    # Where an answer that calls is calls alone, nothing stands before them.
    [(name, before) for name in FORMATS for before in ("", "I'll look.\n\n") if name != "llama3_json" or not before],
)
def test_calls_are_found_with_their_arguments_and_the_content_before(name: str, before: str) -> None:
    arguments = dict(ARGUMENTS)
    if name in ELEMENTS:
        arguments["text"] = 'a "b" </tool>\n\n\\é 中'
    calls = [("find", arguments), ("now", {}), ("find", ONLY_TEXT)]
    text = before + written(name, calls)
    if name == "harmony" and before:
        text = (
            f"<|channel|>commentary<|message|>{before.strip()}<|end|><|start|>assistant{written(name, calls)}<|call|>"
        )
    assert told(parse(parser_of(name), [text])) == (before.strip(), calls)


@pytest.mark.parametrize("name", [name for name in ELEMENTS if not name.startswith("deepseek")])
@pytest.mark.parametrize("value", ["NaN", "[-Infinity]", "[" * 100_000, "5 apples"], ids=lambda value: value[:12])
def test_a_value_that_is_no_json_is_a_string_of_its_own_words(name: str, value: str) -> None:
    """Whatever the type that its tool names: Python's own reader takes more than JSON, and gives up on some of it."""
    text = written(name, [("find", {"most": value})])
    try:
        found = told(parse(parser_of(name), [text]))
    except RecursionError:
        pytest.fail("a value with many brackets ended the answer")
    assert found == ("", [("find", {"most": value})])


@pytest.mark.parametrize("name", [name for name in ELEMENTS if not name.startswith("deepseek")])
def test_a_parameter_has_the_type_that_its_own_tool_gives_it(name: str) -> None:
    parser = FORMATS[name].parser({"count": {"n": "integer"}, "say": {"n": "string", "to": "string"}, "any": {}})
    calls: list[tuple[str, Any]] = [("count", {"n": 5}), ("say", {"n": "5", "to": "you"}), ("any", {"n": 5})]
    assert told(parse(parser, [written(name, calls)])) == ("", calls)


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss"])
def test_what_is_no_name_makes_no_call(name: str) -> None:
    text = "Write <function=find<b>, and no more."
    assert parse(parser_of(name), [text]) == [ContentPart(text)]


@pytest.mark.parametrize("name", ELEMENTS)
def test_of_a_text_that_breaks_off_all_that_came_is_told(name: str) -> None:
    """The last characters might have been the beginning of its end."""
    text = written(name, [("find", {"text": "some words"})])
    for held in ("", "\n", "<", "</"):
        whole = text.partition("words")[0] + "words" + held
        found = parse(parser_of(name), [whole])
        assert "".join(part.text for part in found if isinstance(part, ArgumentsPart)) == (
            '{"text": ' + json.dumps("some words" + held)[:-1]
        )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["plain words", " a < b <tool <｜ < ", "", '{"a": 1}', "<tool_call", "<tool_call> <function=>"]
)
def test_what_is_no_call_stays_content_to_the_last_character(name: str, text: str) -> None:
    if name in ("glm45", "glm47") and text.startswith("<tool_call> "):
        text = "<tool_call> <"
    assert parse(parser_of(name), [text]) == ([ContentPart(text)] if text else [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "Well. [TOOL_CALLS]get_w"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>get_w"),
        ("gemma4", "<|tool_call>call:g"),
    ],
)
def test_a_call_that_breaks_off_in_its_name_is_content_with_its_mark(name: str, text: str) -> None:
    assert parse(parser_of(name), [text]) == [ContentPart(text)]


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_value_may_hold_the_marks_of_everything_but_its_own_end(name: str) -> None:
    held = {"text": written(name, [("now", {})]) + written(name, [("find", {"most": 5})]).split("5")[0] + "?"}
    text = written(name, [("find", held)])
    for pieces in ([text], list(text)):
        assert told(parse(parser_of(name), pieces)) == ("", [("find", held)])


@pytest.mark.parametrize(
    "wrong", ['{"name": 5}', '{"name": "find", "arguments": 5}', '{"arguments": [], "name": "find"}']
)
def test_behind_an_object_that_is_no_call_a_call_is_found(wrong: str) -> None:
    found = parse(parser_of("hermes"), [f"<tool_call>{wrong}</tool_call>{written('hermes', [('now', {})])}"])
    assert [part.name for part in found if isinstance(part, CallPart)][-1:] == ["now"], found


@pytest.mark.parametrize(
    ("written_call", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"id": 7, "name": "now", "type": "function"}', "{}"),
        ('{"name": "now", "arguments": {}}', "{}"),
        ('{"arguments": {}, "name": "now"}', "{}"),
        ('{"parameters": "{}", "name": "now"}', "{}"),
        ('{"name": "now", "arguments": {"most": 5}, "parameters": {"most": 6}}', '{"most": 5}'),
    ],
)
def test_an_object_without_arguments_is_a_call_with_none(written_call: str, arguments: str) -> None:
    for name, text in (
        ("hermes", f"<tool_call>{written_call}</tool_call>"),
        ("llama3_json", written_call),
        ("nemotron_json", f"<TOOLCALL>[{written_call}]</TOOLCALL>"),
    ):
        for pieces in ([text], list(text)):
            assert parse(parser_of(name), pieces) == [CallPart("now"), ArgumentsPart(arguments)]


NAMELESS = '<tool_call>{"name": "", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "find", "arguments": {"most": 5}, oops</tool_call>and on', "and on"),
        ('<tool_call>{"name": "find", "arguments": {"most": 5}} more</tool_call>and on', "and on"),
        (
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        ),
    ],
)
def test_an_object_that_breaks_after_its_call_was_told_ends_at_its_mark_and_a_nameless_one_is_content(
    text: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        found = parse(parser_of("hermes"), pieces)
        assert "".join(part.text for part in found if isinstance(part, ContentPart)) == content
        assert [part.name for part in found if isinstance(part, CallPart)] == (["find"] if content == "and on" else [])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(MARKS), max_size=12), places=st.lists(st.integers(0, 400), max_size=8))
def test_parts_dont_depend_on_where_any_text_is_cut(name: str, pieces: list[str], places: list[int]) -> None:
    text = "".join(pieces)
    whole = parse(parser_of(name), [text])
    assert parse(parser_of(name), cut(text, places)) == whole
    assert parse(parser_of(name), list(text)) == whole


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.integers(0, 600), max_size=10), end=st.integers(0, 600))
def test_parts_of_calls_dont_depend_on_cuts_and_an_answer_that_breaks_off_begins_as_the_whole_one(
    name: str, places: list[int], end: int
) -> None:
    text = written(name, [("find", ONLY_TEXT), ("now", {}), ("find", {"most": 12, "text": "é"})])
    whole = parse(parser_of(name), [text])
    assert parse(parser_of(name), cut(text, places)) == whole
    begun = parse(parser_of(name), [text[: end % len(text)]])
    calls = [part.name for part in begun if isinstance(part, CallPart)]
    assert calls == ["find", "now", "find"][: len(calls)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [True, False])
def test_a_grammar_takes_the_calls_that_its_parser_reads_and_no_others(name: str, several: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "most": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["text"],
        "additionalProperties": False,
    }
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    made = FORMATS[name].grammar([("find", parameters), ("now", nothing)], several)

    good: list[tuple[str, dict[str, Any]]] = [
        ("find", {"text": "a <b>\nc", "most": 3, "unit": "F"}),
        ("find", {"text": ""}),
        ("now", {}),
    ]
    for call in good:
        assert taken(made, written(name, [call])), call
    for wrong in ({"most": 3}, {"text": "a", "most": "x"}, {"text": "a", "z": 1}, {"text": "a", "unit": "K"}):
        assert not taken(made, written(name, [("find", wrong)])), wrong
    assert not taken(made, written(name, [("gone", {})]))
    # In harmony a call ends the model's turn.
    assert taken(made, written(name, good)) is (several and name != "harmony")


@pytest.mark.parametrize(
    ("begun", "text", "parts"),
    [
        (False, "<think>\nhm \n</think>\n\nyes", [ReasoningPart("hm"), ContentPart("yes")]),
        (False, " <think>hm</think>yes </think>", [ReasoningPart("hm"), ContentPart("yes </think>")]),
        (True, "hm\n\nmore\n</think>yes ", [ReasoningPart("hm\n\nmore"), ContentPart("yes ")]),
        (True, "</think>yes", [ContentPart("yes")]),
        (True, "never ends </thin", [ReasoningPart("never ends </thin")]),
        (False, "yes <think>no</think>", [ContentPart("yes <think>no</think>")]),
        (False, " yes", [ContentPart(" yes")]),
        (False, "<thi", [ContentPart("<thi")]),
        (False, "<think> </think> ", []),
    ],
)
def test_reasoning_is_what_stands_before_the_answer(begun: bool, text: str, parts: list[AnswerPart]) -> None:
    assert parse(ReasoningParser(PlainContent(), REASONING["think"], begun=begun), [text]) == parts
    assert parse(ReasoningParser(PlainContent(), REASONING["think"], begun=begun), list(text)) == parts


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([*MARKS, "<think>", "</think>", "\n\n"]), max_size=10),
    places=st.lists(st.integers(0, 400), max_size=8),
    begun=st.booleans(),
)
def test_reasoning_and_calls_behind_it_dont_depend_on_cuts(pieces: list[str], places: list[int], begun: bool) -> None:
    text = "".join(pieces)
    whole = parse(ReasoningParser(parser_of("hermes"), REASONING["think"], begun=begun), [text])
    assert parse(ReasoningParser(parser_of("hermes"), REASONING["think"], begun=begun), cut(text, places)) == whole


def test_a_prompt_that_ends_within_reasoning_is_seen() -> None:
    assert opened("<|im_start|>assistant\n<think>\n", REASONING["think"])
    assert not opened("<|im_start|>assistant\n<think>\n\n</think>\n\n", REASONING["think"])
    assert not opened("<|im_start|>assistant\n", REASONING["think"])


def test_gemmas_reasoning_is_a_channel() -> None:
    templates = ("{{ '<|channel>thought\\n' }}", "<think>", "x", "'[THINK]' + text + '[/THINK]'", "'<seed:think>'")
    assert [reasoning_of(template) for template in templates] == ["gemma4", "think", "", "mistral", "seed_oss"]
    parser = ReasoningParser(parser_of("gemma4"), REASONING["gemma4"], begun=False)
    text = "<|channel>thought\nhm\n<channel|><|tool_call>call:now{}<tool_call|>"
    assert parse(parser, list(text)) == [ReasoningPart("hm"), CallPart("now"), ArgumentsPart("{}")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> {{ tool_call.arguments }} </tool_call>", "hermes"),
        ("<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>", "qwen3_coder"),
        ("<function=' + name + '>' + arguments + '</function> {# <|python_tag|> #}", ""),
        ("set toolcall_begin_token = '<seed:tool_call>' ... <function=' + name + '>\\n<parameter=' + key", "seed_oss"),
        ("set begin = mark ~ '<tool_call>' ... <invoke name=' + name + '><' + key + '>'", ""),
        ('\\n<tool_calls>[{"name": ', "apriel"),
        ("respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm47"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("set toolcall_begin_token = '<minimax:tool_call>'", "minimax_m2"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral_json"),
        ("<TOOLCALL>[", "nemotron_json"),
        ("{{ '<|tool_call>call:' + function['name'] }}", "gemma4"),
        ("<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>", "deepseek_v31"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\n```json\n", "deepseek_v3"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("set mark = '｜DSML｜' ... '<' + mark + 'tool_calls>'", "deepseek_v4"),
        ("ipython ... {{- '<|python_tag|>' }} {{- '\"parameters\": ' }}", "llama3_json"),
        ("'<|start_header_id|>ipython<|end_header_id|>' ... {{- '\"parameters\": ' }}", "llama3_json"),
        ("{{ messages }}", ""),
    ],
)
def test_a_template_tells_its_format(template: str, name: str) -> None:
    assert format_of(template) == name
