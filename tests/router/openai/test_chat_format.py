"""The grammar of an answer with tools, reasoning and structured output: what it takes, and what it doesn't."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

import pytest
from llguidance import LLMatcher, LLTokenizer

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.router.openai.chat_format import AnswerFormat, ChatFormat
from twinpool.router.openai.client_grammar import check_grammar
from twinpool.router.openai.parse_request import read_messages
from twinpool.router.openai.structured_output import read_grammar
from twinpool.router.openai.tools import read_tools
from twinpool.router.parsers.answer_parts import ArgumentsPart
from twinpool.router.parsers.tool_formats import FORMATS

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
HERMES, LLAMA = "<tool_call>", 'ipython <|python_tag|> "parameters": '
THINKS = HERMES + "<think>"
CALL, BAD = (
    '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {}}',
)
OTHER = '<tool_call>\n{"name": "g", "arguments": {"any": "thing"}}\n</tool_call>'
LLAMA_CALL, LLAMA_BAD = '{"name": "f", "parameters": {"n": 1}}', '{"name": "f", "parameters": {"n": "x"}}'
LLAMA_OTHER = '{"name": "g", "parameters": {"any": "thing"}}'
HARMONY = "<|channel|>analysis<|message|>"
H_NEXT = "<|start|>assistant"
H_THOUGHT, H_SAID = f"{HARMONY}hm{{<|end|>{H_NEXT}", f"<|channel|>commentary<|message|>I look.<|end|>{H_NEXT}"
H_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
H_CALL_BEHIND = ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}'
H_OTHER = '<|channel|>commentary to=functions.g<|message|>{"any": "thing"}'
H_BAD, H_FINAL = H_CALL.replace("1", '"x"'), "<|channel|>final<|message|>hi"
H_YES = "<|channel|>final<|message|>yes"
NAMED = {"type": "function", "function": {"name": "f"}}
ONLY_F = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
ONE_OF_F = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
ANSWER = {"guided_choice": ["yes", "no"]}


def tools(strict: bool) -> list[dict[str, Any]]:
    f = {"name": "f", "parameters": SCHEMA, **({"strict": True} if strict else {})}
    return [{"type": "function", "function": f}, {"type": "function", "function": {"name": "g", "parameters": {}}}]


def taken(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


CASES: list[tuple[str, dict[str, Any], str, list[str], list[str]]] = [
    # template, the body's fields, the prompt's end, what may be answered, what may not
    (
        HERMES,
        {"tools": tools(False), "tool_choice": "required"},
        "",
        [CALL, OTHER, f"{CALL}\n{OTHER}"],
        ["hi", BAD, ""],
    ),
    (
        HERMES,
        {"tools": tools(False), "tool_choice": "required", "parallel_tool_calls": False},
        "",
        [CALL, OTHER],
        [f"{CALL}\n{OTHER}", f"hm {CALL}"],
    ),
    (HERMES, {"tools": tools(False), "tool_choice": NAMED}, "", [CALL], [OTHER, BAD, f"{CALL}\n{CALL}"]),
    (HERMES, {"tools": tools(False), "tool_choice": ONE_OF_F}, "", [CALL, f"{CALL}\n{CALL}"], ["hi", OTHER, BAD]),
    (
        HERMES,
        {"tools": tools(False), "tool_choice": ONLY_F},
        "",
        ["hi", f"hm {CALL}", CALL.replace("1", '"any"')],
        [OTHER, f"hm {OTHER}"],
    ),
    (
        HERMES,
        {"tools": tools(False), "parallel_tool_calls": False},
        "",
        ["hi", CALL, OTHER, f"hm {CALL}"],
        [f"{CALL}\n{OTHER}", f"hm {CALL} and {OTHER} so"],
    ),
    (LLAMA, {"tools": tools(False), "tool_choice": ONLY_F}, "", ["hi", LLAMA_CALL, LLAMA_BAD], [LLAMA_OTHER]),
    (
        HERMES,
        {"tools": tools(True)},
        "",
        ["hi", CALL, f"hm {CALL} and {OTHER} so", "a <tool"],
        [BAD, f"hm {BAD}", "<tool_call>"],
    ),
    (HERMES, {"tools": tools(False), **ANSWER}, "", ["yes", CALL, OTHER], ["hm", f"yes {CALL}"]),
    (HERMES, ANSWER, "", ["yes", "no"], ["hm", "<think>a</think>yes"]),
    (LLAMA, {"tools": tools(True)}, "", ["hi", "", LLAMA_CALL], [LLAMA_BAD, '{"a": 1}']),
    (LLAMA, {"tools": tools(False), "tool_choice": "required"}, "", [LLAMA_CALL], ["hi", LLAMA_BAD]),
    (
        THINKS,
        ANSWER,
        "",
        ["yes", "<think>hm\n</think>\n\nyes", "<think></think>no"],
        ["hm", "<think>yes", "<think>a</think>b"],
    ),
    (THINKS, ANSWER, "<think>\n", ["hm</think>yes", "</think>\n\nno"], ["yes", "hm</think>b"]),
    (THINKS, ANSWER, "<think>\n\n</think>\n\n", ["yes"], ["hm"]),
    (
        THINKS,
        {"tools": tools(False), "tool_choice": "required"},
        "<think>\n",
        [f"hm, {BAD} </think>\n{CALL}"],
        [CALL, f"a</think>{BAD}"],
    ),
    (
        HARMONY,
        {"tools": tools(False), "tool_choice": "required"},
        "",
        [H_CALL, f"{H_THOUGHT}{H_CALL}", H_CALL_BEHIND, f"{H_THOUGHT}{H_SAID}{H_OTHER}"],
        [H_FINAL, H_BAD, f"{H_CALL}{H_NEXT}{H_CALL}", H_THOUGHT, "hm"],
    ),
    (HARMONY, {"tools": tools(False), "tool_choice": NAMED}, "", [H_CALL], [H_OTHER, H_BAD]),
    (HARMONY, {"tools": tools(False), "tool_choice": ONLY_F}, "", [H_CALL, H_BAD, H_FINAL], [H_OTHER]),
    (
        HARMONY,
        {"tools": tools(True)},
        "",
        [H_CALL, H_OTHER, H_FINAL, f"{H_THOUGHT}{H_FINAL}"],
        [H_BAD, "hm", H_THOUGHT],
    ),
    (
        HARMONY,
        {"tools": tools(False), **ANSWER},
        "",
        [f"{H_THOUGHT}{H_YES}", H_CALL, "<|channel|>final <|constrain|>json<|message|>no"],
        [H_FINAL, f"{H_YES}!", "yes"],
    ),
    (HARMONY, ANSWER, "", [H_YES, f"{H_THOUGHT}{H_THOUGHT}{H_YES}"], [H_FINAL, "yes", f"{H_SAID}{H_YES}", H_CALL]),
    (THINKS, {"tools": tools(True)}, "<think>", ["hm</think>hi", f"a</think>b {CALL}"], ["hi", f"a</think>b {BAD}"]),
]


@pytest.mark.parametrize(("template", "body", "prompt", "good", "bad"), CASES, ids=lambda v: str(v)[:40])
def test_a_grammar_takes_what_may_be_answered(
    template: str, body: dict[str, Any], prompt: str, good: list[str], bad: list[str]
) -> None:
    chats, use = ChatFormat(template), read_tools(body)
    found = chats.answer_format(use, prompt)
    grammar = chats.grammar(use, found, read_grammar(body).text)
    assert check_grammar(grammar) == ""
    assert {text: taken(grammar, text) for text in [*good, *bad]} == dict.fromkeys(good, True) | dict.fromkeys(
        bad, False
    )


@pytest.mark.parametrize("template", [HERMES, THINKS, LLAMA])
def test_tools_that_a_model_may_use_as_it_likes_take_no_grammar(template: str) -> None:
    chats, use = ChatFormat(template), read_tools({"tools": tools(False)})
    assert chats.grammar(use, chats.answer_format(use, ""), "") == ""
    assert chats.grammar(None, chats.answer_format(None, ""), "") == ""


def test_tools_are_refused_where_the_template_has_none_or_no_parser_is_wanted() -> None:
    use = read_tools({"tools": tools(False)})
    for chats in (ChatFormat("plain"), ChatFormat(HERMES, tool_parser="none")):
        with pytest.raises(RequestError, match=r"takes no tools|shows tools.*router\.tool_parser"):
            chats.answer_format(use, "")
        assert chats.answer_format(None, "") is None


def test_parsers_are_overridden_by_name() -> None:
    use = read_tools({"tools": tools(False)})
    found = ChatFormat("plain", tool_parser="glm45", reasoning_parser="think").answer_format(use, "")
    assert found == AnswerFormat("glm45", {"f": {"n": "integer"}, "g": {}}, True, False)
    assert found is not None
    assert AnswerFormat(**asdict(found)) == found
    assert ChatFormat(THINKS, reasoning_parser="none").answer_format(None, "<think>") is None


def test_every_format_can_be_named_in_the_configuration() -> None:
    assert set(get_args(get_type_hints(RouterConfig)["tool_parser"])) == {"auto", "none", *FORMATS}


def test_a_call_has_no_parameter_that_its_tool_doesnt_name_unless_the_tool_says_so() -> None:
    closed: dict[str, Any] = {"properties": {"n": {"type": "integer"}}}
    open_ = {**closed, "additionalProperties": {"type": "integer"}}
    more = '<tool_call>\n{"name": "f", "arguments": {"n": 1, "m": 2}}\n</tool_call>'
    for parameters, good in ((open_, True), (closed, False)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        chats, use = ChatFormat(HERMES), read_tools({"tools": [tool], "tool_choice": "required"})
        assert taken(chats.grammar(use, chats.answer_format(use, ""), ""), more) is good


def test_nor_has_an_object_within_its_arguments() -> None:
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"at": inner}, "required": ["at"]}
    chats, use = (
        ChatFormat(HERMES),
        read_tools(
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
                "tool_choice": "required",
            }
        ),
    )
    grammar = chats.grammar(use, chats.answer_format(use, ""), "")
    for arguments, good in (('{"at": {"n": 1}}', True), ('{"at": {"n": 1, "m": 2}}', False)):
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert taken(grammar, call) is good, arguments


def test_half_a_surrogate_pair_anywhere_in_a_tool_is_refused() -> None:
    halves: list[dict[str, Any]] = [
        {"description": "\ud800"},
        {"parameters": {"properties": {"\udfff": {}}}},
    ]
    for function in halves:
        with pytest.raises(RequestError, match="lone surrogates"):
            read_tools({"tools": [{"type": "function", "function": {"name": "f", **function}}]})


def test_arguments_have_the_types_that_the_tools_give_them() -> None:
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    parameters = {"type": "object", "properties": properties}
    use = read_tools({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]})
    found = ChatFormat("<function=<parameter=").answer_format(use, "")
    assert found is not None
    parser, said = found.parser(), "<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>\n"
    parts = parser.feed(f"<tool_call>\n<function=f>\n{said}</function>\n</tool_call>") + parser.finish()
    assert json.loads("".join(part.text for part in parts if isinstance(part, ArgumentsPart))) == {"n": 7, "s": "7"}


def test_a_tool_that_is_not_to_be_used_is_no_tool() -> None:
    assert read_tools({"tools": tools(True), "tool_choice": "none"}) is None
    assert read_tools({"tools": [], "tool_choice": "auto"}) is None
    for choice in (NAMED, ONLY_F):
        use = read_tools({"tools": tools(True), "tool_choice": choice})
        assert use is not None
        assert [tool.name for tool in use.tools] == ["f"]
        assert len(use.shown) == 2, "the prompt of a model shows all"


ARGUMENTS: dict[str, Any] = {"a": 'xé\n"}{,', "b": [1, {"c": True, "d": None}, -1.5e3], "e": {}}


@pytest.mark.parametrize("escaped", [False, True])
def test_arguments_that_were_cut_off_anywhere_are_taken_back(escaped: bool) -> None:
    """As in an answer that `max_tokens` ended: what is whole of them is the beginning of what they would have been."""
    text = json.dumps(ARGUMENTS, ensure_ascii=escaped)
    for end in range(1, len(text) + 1):
        call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": text[:end]}}
        (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        found = message["tool_calls"][0]["function"]["arguments"]
        assert begins(ARGUMENTS, found), (text[:end], found)
    assert found == ARGUMENTS


def begins(whole: Any, part: Any) -> bool:
    """Whether a value is what was there of `whole` when its text was cut."""
    if isinstance(whole, dict):
        names = list(whole)[: len(part)]
        return list(part) == names and all(begins(whole[name], part[name]) for name in names)
    if isinstance(whole, list):
        return len(part) <= len(whole) and all(map(begins, whole, part))
    if isinstance(whole, str):
        return whole.startswith(part)
    return part == whole or (isinstance(whole, float) and str(whole).startswith(str(part)))


def test_arguments_that_nobody_cut_off_have_to_be_an_object() -> None:
    for arguments in ("{'a': 1}", '{"a" 1}', '{"a": 1}}', "[1", "nope", '{"a": "x\ny', "{" * 200, "12"):
        call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": arguments}}
        with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
            read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
