"""The generic tool prompt: chats with tools for chat templates that show none, whatever roles they know."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.router.http_server import DEMO, demo_spec
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import GrammarError, LLGuidanceEngine
from twinpool.router.openai.chat_format import ChatFormat
from twinpool.router.openai.tools import read_tools
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, joined
from twinpool.router.text.chat_template import ChatTemplate, TemplateTraits
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template as small models ship it: every role is taken, tools and calls are not."""
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "{{ '<turn>' + m['role'] + ':' + m['content'] | trim + '\\n' }}{% endfor %}"
)
"""A template that takes users and assistants in turns, and nobody else."""
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
SPEAKS_OF_TOOLS = CHATML + "{# tools <tool_call> #}{% if tools %}{% set n = tools | length %}{% endif %}"
SHOWS = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
SHOWS_IN_SYSTEM = CHATML + "{% if tools and messages[0].role == 'system' %}{{ tools[0].function.name }}{% endif %}"
REFUSES = CHATML + "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"

SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome", "Oslo"]}},
    "required": ["town"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a tøwn.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [call(1, "weather", town="Rome"), call(2, "now")]},
    result(2, "noon"),
    result(1, "rain"),
    {"role": "assistant", "content": "Rain."},
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "tool_calls": [call(3, "weather", town="Oslo")]},
    result(3, "snow"),
    {"role": "user", "content": "So?"},
]


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def traits(template: str) -> TemplateTraits:
    return ChatTemplate(template, {}, 100_000).traits()


def chats(template: str, tool_parser: str = "auto", tool_prompt: str = "auto") -> ChatFormat:
    return ChatFormat(template, tool_parser, tool_prompt=tool_prompt, traits=traits(template))


def reader(template: str, **router: Any) -> BodyReader:
    """A reader of bodies for the demo's tokenizer with another template."""
    changed = ModelTokenizer(demo_tokenizer(), ChatTemplate(template, {}, 100_000), {})
    return BodyReader(demo_spec(), changed, RouterConfig(**router))


def prompt(intake: BodyReader, **body: Any) -> str:
    body = {"messages": TALK, "tools": [WEATHER, NOW], "max_tokens": 1, **body}
    tokens = intake.chat(json.dumps(body).encode()).prompts[0].tokens
    return intake._model_tokenizer.decode(tokens)


def test_rendering_says_what_a_template_shows_and_not_what_it_speaks_of() -> None:
    found = {template: traits(template) for template in (CHATML, STRICT, DROPS_SYSTEM, SPEAKS_OF_TOOLS, REFUSES)}
    assert found == {
        CHATML: TemplateTraits(False, True),
        STRICT: TemplateTraits(False, False),
        DROPS_SYSTEM: TemplateTraits(False, False),
        SPEAKS_OF_TOOLS: TemplateTraits(False, True),
        REFUSES: TemplateTraits(False, True),
    }
    assert traits(SHOWS) == traits(SHOWS_IN_SYSTEM) == TemplateTraits(True, True)
    assert ChatTemplate(CHATML, {}, 100_000, for_tools=SHOWS).traits().shows_tools
    assert read_model_tokenizer(DEMO, 10_000).template_traits == TemplateTraits(True, True)


def test_calls_and_results_are_turns_of_the_assistant_and_the_user() -> None:
    want = (
        "<turn>user:And Rome?\n"
        "<turn>assistant:I look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "<turn>user:<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
        "<turn>assistant:Rain.\n"
        "<turn>user:Oslo?\n"
        '<turn>assistant:<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>\n'
        "<turn>user:<tool_response>\nsnow\n</tool_response>\nSo?\n"
    )
    intake = reader(STRICT)
    assert prompt(intake, tool_choice="none") == prompt(intake, tools=None) == want
    head, tail = prompt(intake).split("And Rome?\n")
    assert want.endswith(tail)
    assert tail.startswith("<turn>assistant:I look.")
    assert head.startswith("<turn>user:You can call functions")


@pytest.mark.parametrize("template", [CHATML, REFUSES, SPEAKS_OF_TOOLS])
def test_tools_are_described_in_the_system_message_behind_what_it_says(template: str) -> None:
    intake = reader(template)
    for messages, before in (
        (TALK, "<|im_start|>system\nYou can call"),
        ([{"role": "system", "content": "Be brief."}, *TALK], "<|im_start|>system\nBe brief.\n\nYou can call"),
        ([{"role": "developer", "content": "Be brief."}, *TALK], "<|im_start|>system\nBe brief.\n\nYou can call"),
    ):
        text = prompt(intake, messages=messages)
        assert text.startswith(before)
        system = text.partition("<|im_end|>")[0]
        lines = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
        assert [json.loads(line) for line in lines] == [WEATHER, NOW]
        assert "tøwn" in system
        assert "several" in system
    assert "several" not in prompt(intake, parallel_tool_calls=False)
    assert "several" not in prompt(intake, tool_choice={"type": "function", "function": {"name": "weather"}})


def test_whom_a_template_drops_or_refuses_is_told_nothing() -> None:
    for template in (STRICT, DROPS_SYSTEM):
        assert '"name": "weather"' in prompt(reader(template), messages=TALK[:1])
    begins = [{"role": "assistant", "content": "Hi."}, *TALK[:1]]
    assert prompt(reader(DROPS_SYSTEM), messages=begins).startswith("Hi.\nYou can call")


def test_what_is_written_for_an_earlier_call_is_read_as_that_call() -> None:
    arguments = {"text": 'a "b"\n\n\\é 中 </tool_call>', "most": 5, "where": {"x": [1, {"y": None}]}}
    asked = [TALK[0], {"role": "assistant", "content": "I look.", "tool_calls": [call(1, "find", **arguments)] * 2}]
    text = prompt(reader(DROPS_SYSTEM), messages=asked, tools=None).removeprefix("And Rome?\n")
    found = chats(CHATML).answer_format(read_tools({"tools": [WEATHER]}), "")
    assert found is not None
    parser = found.parser()
    parts = list(joined([part for char in text for part in parser.feed(char)] + parser.finish()))
    assert [part.text for part in parts if isinstance(part, ContentPart)] == ["I look."]
    assert [part.name for part in parts if isinstance(part, CallPart)] == ["find", "find"]
    assert [json.loads(p.text) for p in parts if isinstance(p, ArgumentsPart)] == [arguments, arguments]


def test_the_setting_turns_it_off_and_the_error_names_it() -> None:
    for template in (CHATML, STRICT):
        with pytest.raises(RequestError, match=r"router\.tool_prompt=auto"):
            prompt(reader(template, tool_prompt="none"), messages=TALK[:1])
    with pytest.raises(RequestError, match=r"router\.tool_parser is none"):
        prompt(reader(CHATML, tool_parser="none"), messages=TALK[:1])
    # What forced calls alone is the operator's choice: the model is shown nothing.
    assert "weather" not in prompt(reader(CHATML, tool_prompt="none", tool_parser="hermes"), messages=TALK[:1])
    with pytest.raises(RequestError, match=r"no format known here: router\.tool_parser"):
        prompt(reader(SHOWS), messages=TALK[:1])
    assert "You can call" not in prompt(reader("<tool_call>" + SHOWS), messages=TALK[:1])


def test_a_format_that_is_set_or_that_is_the_whole_answers_is_left_alone() -> None:
    harmony = "<|channel|>analysis" + CHATML
    for template, parser in ((harmony, "auto"), (CHATML, "glm45")):
        found = chats(template, parser)
        assert found.messages(TALK[:1], read_tools({"tools": [WEATHER]})) == TALK[:1]
        assert found.tools["prompt"] is None
    assert chats(CHATML).tools == {"format": "hermes", "prompt": "generic"}
    assert chats(SHOWS).tools == {"format": None, "prompt": None}
    assert chats("<tool_call>" + SHOWS).tools == {"format": "hermes", "prompt": "template"}
    assert chats(CHATML, tool_prompt="none").tools == {"format": None, "prompt": None}


def test_an_answer_goes_on_with_text_and_never_with_a_call() -> None:
    intake = reader(CHATML)
    opened = [*TALK, {"role": "assistant", "content": "It is"}]
    assert prompt(intake, messages=opened, continue_final_message=True).endswith("<|im_start|>assistant\nIt is")
    with pytest.raises(RequestError, match="no calls"):
        prompt(intake, messages=TALK[:2], continue_final_message=True)


def test_each_api_shows_the_same_tools_and_forces_the_same_calls() -> None:
    intake, function = reader(CHATML), WEATHER["function"]
    assert isinstance(function, dict)
    responses = {"input": "And Rome?", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    theirs = {"name": "weather", "description": function["description"], "input_schema": SCHEMA}
    messages = {"messages": TALK[:1], "max_tokens": 1, "tools": [theirs], "tool_choice": {"type": "any"}}
    asked = {"messages": TALK[:1], "max_tokens": 1, "tools": [WEATHER], "tool_choice": "required"}
    for stream in (False, True):
        read = [
            intake.chat(json.dumps({**asked, "stream": stream}).encode()),
            intake.responses(json.dumps({**responses, "stream": stream}).encode()),
            intake.messages(json.dumps({**messages, "stream": stream}).encode()),
        ]
        shown = [intake._model_tokenizer.decode(one.prompts[0].tokens) for one in read]
        described = [json.loads(text.split("<tools>\n")[1].split("\n</tools>")[0])["function"] for text in shown]
        assert described[0] == described[1] == described[2] == function
        assert shown[0] == shown[1]
        assert len({one.request.sampling.grammar for one in read}) == 1
        assert '"const": "weather"' in read[0].request.sampling.grammar.replace("\\", "")
    count = len(read[0].prompts[0].tokens)
    assert json.loads(intake.input_tokens(json.dumps(responses).encode()).body)["input_tokens"] == count
    asked.pop("max_tokens"), asked.pop("tool_choice")
    assert json.loads(intake.tokenize(json.dumps(asked).encode()).body)["count"] == count


def metaspace() -> Tokenizer:
    """A tokenizer of SentencePiece's kind: a mark for spaces, bytes for what has no piece, no token for a tag."""
    pieces = [
        "\u2581",
        *(chr(c) for c in range(0x21, 0x7F)),
        "\u2581<",
        "<t",
        "tool",
        "\u2581tool",
        "_call",
        '{"',
        '":',
    ]
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{b:02X}>": b + 2 for b in range(256)}}
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("make", [metaspace, demo_tokenizer], ids=["metaspace", "byte-level"])
def test_calls_are_read_whose_marks_are_text_of_any_tokens(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    """Whatever tokens the grammar lets come, the call that they spell is found, piece by piece."""
    tokenizer = make()
    assert not any("tool" in token.content for token in tokenizer.get_added_tokens_decoder().values())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, size = read_model_tokenizer(tmp_path, 10_000), tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("</s>") or 0
    use = read_tools({"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False})
    formats = chats(CHATML)
    found = formats.answer_format(use, "")
    assert found is not None
    engine = LLGuidanceEngine((tmp_path / "tokenizer.json").read_text(), size, [end])
    rng, spellings, names = random.Random(5), set(), set()
    try:
        for _ in range(8):
            matcher, mask = engine.start(formats.grammar(use, found, ""), ()).result()
            detokenizer, parser = ours.detokenizer((), skip_special=True, shown=found.marks), found.parser()
            parts: list[AnswerPart] = []
            spelled: list[int] = []
            while (token := rng.choice(allowed(mask, size))) != end:
                spelled.append(token)
                matcher.consume([token])
                parts += parser.feed(detokenizer.feed(token))
                (masks,) = engine.masks([(matcher, ())])
                assert not isinstance(masks, GrammarError)
                mask = masks[0]
            parts += parser.feed(detokenizer.finish()) + parser.finish()
            spellings.add(tuple(spelled))
            told = list(joined(parts))
            assert not any(isinstance(part, ContentPart) for part in told), (told, spelled)
            (name,) = [part.name for part in told if isinstance(part, CallPart)]
            (given,) = [json.loads(part.text) for part in told if isinstance(part, ArgumentsPart)]
            assert given in ({"town": "Rome"}, {"town": "Oslo"}) if name == "weather" else given == {}
            names.add(name)
    finally:
        engine.close()
    assert len(spellings) > 1
    assert names == {"weather", "now"}


def allowed(mask: TokenMask, size: int) -> list[int]:
    bits = np.unpackbits(mask.words.view(np.uint8), bitorder="little")[:size]
    return [int(token) for token in np.flatnonzero(bits)]
