"""Every format with its marks as special tokens: grammars take them by their ids, and answers show them to parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.router.parsers.test_harmony import byte_tokenizer
from tests.router.parsers.test_parsers import parse, parser_of, told, written
from twinpool.engine.structured_output.grammar_engine import with_marks_apart
from twinpool.router.openai.client_grammar import with_special_marks
from twinpool.router.parsers.answer_parts import joined
from twinpool.router.parsers.tool_formats import FORMATS
from twinpool.router.text.tokenizer import ModelTokenizer

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "most": {"type": "integer"}},
    "required": ["most", "text"],
}
CALLS: list[tuple[str, dict[str, Any]]] = [("find", {"text": "a </b>\nc", "most": 3})]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_takes_tokens_where_the_format_has_marks(name: str, special: bool) -> None:
    """As special tokens, or as Qwen publishes them: added and not special."""
    marks = FORMATS[name].marks
    tokenizer = byte_tokenizer((*marks, "<eos>")) if special else byte_tokenizer(("<eos>",), plain=marks)
    ids = ModelTokenizer(tokenizer, None, json.loads(tokenizer.to_str())).marks
    assert {mark for mark in marks if special or mark.startswith("<")} <= ids.keys()
    ids = {mark: ids[mark] for mark in marks if mark in ids}
    made = FORMATS[name].grammar([("find", PARAMETERS)], False)
    trigger = json.dumps(made.trigger, ensure_ascii=False) if made.trigger else ""
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: {trigger} calls\n{made.rules}"}]})
    vocabulary = LLTokenizer(with_marks_apart(tokenizer.to_str()), eos_token=tokenizer.token_to_id("<eos>"))
    matcher = LLMatcher(vocabulary, with_special_marks(grammar, ids), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(written(name, CALLS)).ids
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()
    as_marks = set(tokens) & set(ids.values())
    as_text = LLMatcher(vocabulary, grammar, log_level=0)
    assert not as_marks or not as_text.consume_tokens(tokens), "as text they aren't taken"


@pytest.mark.parametrize("name", FORMATS)
def test_a_parser_sees_marks_that_are_special_tokens_and_no_others(name: str) -> None:
    tokenizer = byte_tokenizer((*FORMATS[name].marks, "<|other|>"))
    model_tokenizer = ModelTokenizer(tokenizer, None, json.loads(tokenizer.to_str()))
    shown = model_tokenizer.detokenizer((), skip_special=True, shown=FORMATS[name].marks)
    text = "".join(shown.feed(token) for token in tokenizer.encode(written(name, CALLS) + "<|other|>").ids)
    assert text + shown.finish() == written(name, CALLS)
    assert told(list(joined(parse(parser_of(name), [text])))) == ("", CALLS)
