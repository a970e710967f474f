"""Marks as Qwen publishes them, added tokens that aren't special, from a request's body to the tokens of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.router.http_server import demo_spec
from tests.router.parsers.test_harmony import byte_tokenizer
from tests.router.parsers.test_parsers import told
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.worker_events import Done
from twinpool.engine.structured_output.grammar_engine import GrammarError, LLGuidanceEngine
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.parsers.answer_parts import ReasoningPart, joined
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.text.chat_template import ChatTemplate
from twinpool.router.text.tokenizer import ModelTokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader

END = "<|im_end|>"
SPECIAL = ("<|im_start|>", END)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> For each call return "
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>{% endif %}'
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{# a thought is <think> ... </think> #}"
)
TOOL = {"type": "function", "function": {"name": "get", "strict": True, "parameters": {
    "type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False,
}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "get", "arguments": {"x": 2}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}


def sentencepiece_tokenizer(special: tuple[str, ...], plain: tuple[str, ...]) -> Tokenizer:
    """Letters and bytes, as Llama 2's and Mistral's kind."""
    letters = ["\u2581", *map(chr, range(33, 127))]
    vocab = {piece: number for number, piece in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters])}
    found = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Replace(" ", "\u2581")
    found.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    found.add_special_tokens(["<unk>", *special])
    found.add_tokens([AddedToken(name, normalized=False) for name in plain])
    return found


TOKENIZERS: dict[str, Callable[[tuple[str, ...], tuple[str, ...]], Tokenizer]] = {
    "byte level": byte_tokenizer,
    "byte fallback": sentencepiece_tokenizer,
}


class Site:
    """A reader of bodies and the engine of a worker, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, (self.end,) = tokenizer, tokenizer.encode(END, add_special_tokens=False).ids
        text = tokenizer.to_str()
        self.model_tokenizer = ModelTokenizer(tokenizer, ChatTemplate(TEMPLATE, {}, 10_000), json.loads(text))
        spec = demo_spec(vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(self.end,))
        self.reader = BodyReader(spec, self.model_tokenizer, RouterConfig())
        self.engine = LLGuidanceEngine(text, tokenizer.get_vocab_size(), [self.end])

    def asked(self, **body: Any) -> Any:
        return self.reader.chat(json.dumps({"messages": [{"role": "user", "content": "?"}], **body}).encode()).request

    def takes(self, grammar: str, tokens: list[int]) -> bool:
        """Whether an answer may be these tokens, each by the mask before it, and end behind them."""
        started = self.engine.start(grammar, ()).result()
        for token in [*tokens, self.end]:
            (made,) = self.engine.masks([(started.matcher, ())])
            if isinstance(made, GrammarError):
                raise made
            if not np.unpackbits(made[0].words.view(np.uint8), bitorder="little")[token]:
                return False
            if token != self.end:
                started.matcher.consume([token])
        return True

    def pieces(self, text: str) -> list[int]:
        """The tokens of a text without its marks."""
        return [token for letter in text for token in self.tokenizer.encode(letter, add_special_tokens=False).ids]

    def marked(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(params=[(kind, special) for kind in TOKENIZERS for special in (False, True)], ids=str)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    kind, special = request.param
    found = Site(TOKENIZERS[kind]((*SPECIAL, *MARKS), ()) if special else TOKENIZERS[kind](SPECIAL, MARKS))
    yield found
    found.engine.close()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}], ids=str)
def test_a_forced_call_is_its_marks_tokens_and_no_text_that_reads_like_them(site: Site, choice: Any) -> None:
    request = site.asked(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    grammar = request.sampling.grammar
    assert site.takes(grammar, site.marked(CALL))
    assert site.takes(grammar, site.marked("<think>so</think>" + CALL))
    assert not site.takes(grammar, site.pieces(CALL))
    assert not site.takes(grammar, site.marked(CALL.replace("2", "3")))
    assert not site.takes(grammar, site.marked("no"))
    shown = site.model_tokenizer.detokenizer((), skip_special=True, shown=request.answer_format.marks)
    parser = request.answer_format.parser()
    parts = [part for token in site.marked(CALL) for part in parser.feed(shown.feed(token))] + parser.finish()
    assert told(list(joined(parts))) == ("", [("get", {"x": 2})])


def test_a_strict_tool_binds_a_call_and_no_other_answer(site: Site) -> None:
    grammar = site.asked(tools=[TOOL]).sampling.grammar
    assert site.takes(grammar, site.marked("no"))
    assert site.takes(grammar, site.marked("so: " + CALL))
    assert not site.takes(grammar, site.marked(CALL.replace("2", "3")))


def test_a_thought_ends_with_its_mark_and_the_object_follows(site: Site) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    grammar = site.asked(response_format=schema).sampling.grammar
    assert site.takes(grammar, site.marked('<think>so</think>\n\n{"a": 5}'))
    assert site.takes(grammar, site.marked('{"a": 5}'))
    assert not site.takes(grammar, site.marked("<think>so</think>\n\nno"))


@pytest.mark.parametrize("text", ["<tool_call>a", END, "b</think>", "<unk>", "<0x41>"])
def test_a_text_that_reads_like_a_mark_is_text(site: Site, text: str) -> None:
    """However it is asked for; an answer that could be nothing else was an error of the engine's."""
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": [text]}},
        {"structured_outputs": {"choice": [text, "other"]}},
        {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}},
    ]
    for body in asked:
        grammar = site.asked(**body, chat_template_kwargs={"enable_thinking": False}).sampling.grammar
        answer = json.dumps(text) if "response_format" in body else text
        assert site.takes(grammar, site.pieces(answer))
        marks = site.marked(answer)
        assert marks == site.pieces(answer) or not site.takes(grammar, marks), "its mark is another token"


LETTERS = "a </think> and <tool_call>{} </tool_call>, </thi"


@pytest.mark.parametrize("stop", ["", "</tool_call>, ", "never"])
@pytest.mark.parametrize("each", [False, True])
def test_marks_end_what_they_mark_and_letters_that_read_like_them_are_text(site: Site, stop: str, each: bool) -> None:
    request = site.asked(tools=[TOOL], **({"stop": [stop]} if stop else {}))
    routed = RoutedRequest(RequestId("r"), (1, 2), request.sampling, now=0.0, deadline=60.0)
    choice = ChoiceOutput(0, routed, request, site.model_tokenizer, "")
    tokens = [*site.marked("<think>"), *site.pieces(LETTERS.replace(stop, "") if stop else LETTERS)]
    tokens += [*site.marked("</think>"), *site.pieces("b <think> " + LETTERS), *site.marked(CALL)]
    for delta in choice.take_each(tokens, ()) if each else [choice.take(tokens, ())]:
        assert "\ufdd0" not in delta.text
    if choice.finish is None:
        choice.end(Done(RequestId("r"), 0, "stop"))
    found = list(joined(choice.parts or ()))
    reasoning = "".join(part.text for part in found if isinstance(part, ReasoningPart))
    assert reasoning == (LETTERS.replace(stop, "") if stop else LETTERS)
    if stop.startswith("</"):
        assert choice.stop == stop
        assert told(found[1:]) == ("b <think> a </think> and <tool_call>{} ", [])
    else:
        assert told(found[1:]) == ("b <think> " + LETTERS, [("get", {"x": 2})])


def test_letters_are_marks_where_the_model_has_none_as_tokens() -> None:
    tokenizer = byte_tokenizer(SPECIAL)
    site = Site(tokenizer)
    try:
        request = site.asked(tools=[TOOL])
        routed = RoutedRequest(RequestId("r"), (1, 2), request.sampling, now=0.0, deadline=60.0)
        choice = ChoiceOutput(0, routed, request, site.model_tokenizer, "")
        choice.take(site.pieces("<think>so</think>" + CALL), ())
        choice.end(Done(RequestId("r"), 0, "stop"))
        assert told(list(choice.parts or ())[1:]) == ("", [("get", {"x": 2})])
    finally:
        site.engine.close()
