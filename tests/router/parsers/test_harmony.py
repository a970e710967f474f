"""Answers in the harmony format: what each message is, wherever the text is cut, and marks that are special tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.router.http_server import demo_spec
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.router.openai.client_grammar import with_special_marks
from twinpool.router.parsers.answer_parts import (
    AnswerPart,
    ArgumentsPart,
    CallPart,
    ContentPart,
    ReasoningPart,
    joined,
)
from twinpool.router.parsers.harmony_messages import HARMONY_MARKS, HarmonyMessages
from twinpool.router.text.chat_template import ChatTemplate
from twinpool.router.text.tokenizer import ModelTokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader, PreparedRequest

TYPES = {"get_weather": {"town": "string"}}
THOUGHT = "<|channel|>analysis<|message|>We need the weather.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"town": "Rome"}<|call|>'
FINAL = "<|channel|>final<|message|>It rains.<|return|>"
NEXT = "<|start|>assistant"
WEATHER: list[AnswerPart] = [CallPart("get_weather"), ArgumentsPart('{"town": "Rome"}')]
PLACES = [
    "<|channel|>", "analysis", "commentary", "final", " to=functions.get_weather", "to=", "<|message|>", "<|end|>",
    "<|start|>", "assistant", "<|call|>", "<|return|>", " <|constrain|>json", '{"town": ', '"Rome"}', "words", " ",
    "\n", "<|", "|>", "<", "é",
]  # fmt: skip


def parse(pieces: list[str], *, tools: bool = True, reasoning: bool = True) -> list[AnswerPart]:
    parser = HarmonyMessages(TYPES if tools else {}, reasoning=reasoning)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return list(joined(found + parser.finish()))


ANSWERS: list[tuple[str, list[AnswerPart]]] = [
    (FINAL, [ContentPart("It rains.")]),
    (f"{THOUGHT}{NEXT}{FINAL}", [ReasoningPart("We need the weather."), ContentPart("It rains.")]),
    (f"{THOUGHT}{NEXT}{CALL}", [ReasoningPart("We need the weather."), *WEATHER]),
    # The recipient stands in the role's part of a header too, as the template writes it.
    (' to=functions.get_weather<|channel|>commentary json<|message|>{"town": "Rome"}', WEATHER),
    (f'{THOUGHT}{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{{"town": "Rome"}}<|call|>',
     [ReasoningPart("We need the weather."), *WEATHER]),
    # A model forgets the namespace.
    ('<|channel|>commentary to=get_weather<|message|>{"town": "Rome"}', WEATHER),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", [ContentPart("I look."), *WEATHER]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{FINAL}", [ContentPart("I look.\n\nIt rains.")]),
    (f"{THOUGHT}{NEXT}{THOUGHT}", [ReasoningPart("We need the weather.\n\nWe need the weather.")]),
    ("<|channel|>final <|constrain|>json<|message|>{}", [ContentPart("{}")]),
    ("<|channel|>analysis<|message|>never ends <|en", [ReasoningPart("never ends <|en")]),
    ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>rain<|end|>", [ContentPart("rain")]),
    ("<|channel|>ana", []),
    ("plain words", [ContentPart("plain words")]),
    (" to be or not", [ContentPart(" to be or not")]),
    (" t", [ContentPart(" t")]),
    (f"words {FINAL}", [ContentPart("words \n\nIt rains.")]),
    ("<|channel|>final<|end|>lost", [ContentPart("lost")]),
    (f"{FINAL}<|end|>lost", [ContentPart("It rains.\n\nlost")]),
    # Behind a message's end nothing is of its kind any more: not of a call's arguments, and no reasoning.
    (f"{CALL}Done.", [*WEATHER, ContentPart("Done.")]),
    (f"{THOUGHT}It rains.", [ReasoningPart("We need the weather."), ContentPart("It rains.")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), ANSWERS)
def test_messages_are_what_their_headers_say(text: str, parts: list[AnswerPart]) -> None:
    assert parse([text]) == parts
    assert parse(list(text)) == parts


def test_without_tools_a_call_is_content_and_reasoning_may_stay_in_it() -> None:
    assert parse([CALL], tools=False) == [ContentPart('{"town": "Rome"}')]
    assert parse([f"{THOUGHT}{NEXT}{FINAL}"], reasoning=False) == [ContentPart("We need the weather.\n\nIt rains.")]


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([*PLACES, THOUGHT, CALL, FINAL, NEXT]), max_size=12),
    places=st.lists(st.integers(0, 400), max_size=8),
    tools=st.booleans(),
    reasoning=st.booleans(),
)
def test_parts_dont_depend_on_where_any_text_is_cut(
    pieces: list[str], places: list[int], tools: bool, reasoning: bool
) -> None:
    text = "".join(pieces)
    at = sorted(place % (len(text) + 1) for place in places)
    cut = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole = parse([text], tools=tools, reasoning=reasoning)
    assert parse(cut, tools=tools, reasoning=reasoning) == whole
    assert parse(list(text), tools=tools, reasoning=reasoning) == whole


# ---------------------------------------------------------------- marks that are special tokens


def byte_tokenizer(specials: tuple[str, ...], plain: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer whose tokens are bytes and special tokens; `plain` are added tokens that aren't special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(specials))
    found.add_tokens([AddedToken(name, normalized=False) for name in plain])
    return found


TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|>analysis #}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]
}}}  # fmt: skip


def prepared(
    tokenizer: Tokenizer, *, ends: tuple[str, ...] = ("<|return|>", "<|call|>"), **body: Any
) -> PreparedRequest:
    eos = tuple(tokenizer.token_to_id(mark) for mark in ends)
    spec = demo_spec(vocab_size=tokenizer.get_vocab_size(), eos_token_ids=eos)
    tree = json.loads(tokenizer.to_str())
    reader = BodyReader(spec, ModelTokenizer(tokenizer, ChatTemplate(TEMPLATE, {}, 10_000), tree), RouterConfig())
    return reader.chat(json.dumps({"messages": [{"role": "user", "content": "?"}], **body}).encode())


def taken(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    eos: Any = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=eos), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, [f"{THOUGHT}{NEXT}{CALL.removesuffix('<|call|>')}"], [FINAL]),
        (
            {"response_format": {"type": "json_object"}},
            [f"{THOUGHT}{NEXT}<|channel|>final<|message|>{{}}", "<|channel|>final <|constrain|>json<|message|>{}"],
            ["{}", "<|channel|>final<|message|>hi", CALL],
        ),
    ],
)
def test_a_grammar_takes_marks_as_the_special_tokens_that_they_are(
    asked: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tokenizer = byte_tokenizer(HARMONY_MARKS)
    grammar = prepared(tokenizer, **asked).request.sampling.grammar
    assert [taken(tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [taken(tokenizer, grammar, text) for text in bad] == [False] * len(bad)


def test_an_answer_shows_the_marks_to_the_parser_and_not_to_the_client() -> None:
    tokenizer = byte_tokenizer((*HARMONY_MARKS, "<|other|>"))
    request = prepared(tokenizer, tools=[TOOL]).request
    assert request.answer_format is not None
    assert request.sampling.grammar == ""
    model_tokenizer = ModelTokenizer(tokenizer, None, json.loads(tokenizer.to_str()))
    shown = model_tokenizer.detokenizer((), skip_special=True, shown=request.answer_format.marks)
    ids = tokenizer.encode(f"<|other|>{THOUGHT}{NEXT}{CALL}").ids
    parser = request.answer_format.parser()
    parts = [part for token in ids for part in parser.feed(shown.feed(token))] + parser.finish()
    assert list(joined(parts)) == [ReasoningPart("We need the weather."), *WEATHER]


def test_a_call_ends_the_turn_whatever_the_checkpoints_configuration_says() -> None:
    tokenizer = byte_tokenizer(HARMONY_MARKS)
    both = {tokenizer.token_to_id(mark) for mark in ("<|call|>", "<|return|>")}
    request = prepared(tokenizer, ends=("<|return|>",), tools=[TOOL]).request
    assert both == {*request.sampling.stop_token_ids} == request.eos
    endless = prepared(tokenizer, ends=("<|return|>",), tools=[TOOL], ignore_eos=True).request
    assert not endless.sampling.stop_token_ids


def test_marks_are_named_by_their_ids_in_rules_and_not_in_schemas() -> None:
    rules = 'start: "a<x>b" text "<y>"\ntext[suffix="<x>"]: /(?s:.*)/\nv: %json {"const": "<x>"}'
    grammar = json.dumps({"grammars": [{"lark_grammar": rules}, {"name": "answer", "lark_grammar": 'start: "<x>"'}]})
    found = json.loads(with_special_marks(grammar, {"<x>": 5}))["grammars"]
    assert found[0]["lark_grammar"] == (
        'start: ("a" <[5]> "b") text "<y>"\ntext: /(?s:.*)/ <[5]>\nv: %json {"const": "<x>"}'
    )
    assert found[1]["lark_grammar"] == 'start: "<x>"'
