"""One choice by itself: what each batch of tokens adds to it, and how it ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.router.http_server import DEMO
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.worker_events import Done, LegReport
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.router.openai.chat_format import AnswerFormat
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.parsers.answer_parts import ArgumentsPart, CallPart, joined
from twinpool.router.parsers.tool_formats import FORMATS
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer


@pytest.fixture(scope="module")
def model_tokenizer() -> ModelTokenizer:
    return read_model_tokenizer(DEMO, 10_000)


@dataclass(frozen=True)
class Asked:
    """What a choice reads of the request that it belongs to."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    eos: frozenset[int] = frozenset()
    answer_format: AnswerFormat | None = None
    shape: str = "openai"


def choice_of(model_tokenizer: ModelTokenizer, asked: Asked, grammar: str = "") -> ChoiceOutput:
    sampling = SamplingParams(max_tokens=50, grammar=grammar)
    routed = RoutedRequest(RequestId("r"), (1, 2), sampling, now=0.0, deadline=60.0)
    return ChoiceOutput(0, routed, cast(GenerateRequest, asked), model_tokenizer, "")


def test_tokens_after_a_stop_string_are_dropped_with_their_log_probabilities(model_tokenizer: ModelTokenizer) -> None:
    ids = [
        token
        for word in ("one", " two", " three", " four")
        for token in model_tokenizer.encode(word, add_special=False)
    ]
    logprobs = [TokenLogprob(token, -float(at), ()) for at, token in enumerate(ids)]
    until = next(n for n in range(len(ids)) if "two" in model_tokenizer.decode(ids[: n + 1]))
    assert until + 1 < len(ids)
    choice = choice_of(model_tokenizer, Asked(stops=("two",)))
    delta = choice.take(ids, logprobs)
    assert list(delta.tokens) == ids[: until + 1] == choice.tokens
    assert list(delta.logprobs) == logprobs[: until + 1] == choice.logprobs
    assert (delta.text, delta.finish, delta.stop) == ("one ", "stop", "two")


def with_a_piece(folder: Path, piece: str) -> ModelTokenizer:
    """A tokenizer that isn't byte-level, of single bytes and one piece more: token 257."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, piece: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return read_model_tokenizer(folder, 10_000)


HELD = {
    "a character that is cut off": (None, "one", "\ufffd", "one"),
    "it begins before what is held": (None, "one", "ne\ufffd", "o"),
    "inside a token": ("yes END\ufffd", "", "END", "yes "),
}
"""A piece of the vocabulary with which the answer ends (None: the first byte of a character), the text before it, the
stop string, and the text that is left."""


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("done", [Done(RequestId("r"), 0, "length"), Done(RequestId("r"), 0, "stop", stop_token=7)])
@pytest.mark.parametrize("name", HELD)
def test_a_stop_string_in_the_text_that_was_held_to_the_end_ends_the_answer(
    model_tokenizer: ModelTokenizer, tmp_path: Path, name: str, done: Done, include: bool
) -> None:
    piece, before, stop, left = HELD[name]
    tokenizer = with_a_piece(tmp_path, piece) if piece is not None else model_tokenizer
    last = 257 if piece is not None else next(t for t in range(400) if tokenizer.token_bytes(t) == b"\xe5")
    choice = choice_of(tokenizer, Asked(stops=(stop,), include_stop=include))
    told = choice.take([*tokenizer.encode(before, add_special=False), last], ())
    assert not choice.ended, "the next token may complete the character"
    end = choice.end(done)
    assert end is not None
    assert (end.finish, end.stop) == (choice.finish, choice.stop) == ("stop", stop)
    assert told.text + end.text == "".join(choice.text) == left + (stop if include else "")


def test_without_a_stop_all_tokens_are_told(model_tokenizer: ModelTokenizer) -> None:
    ids = list(model_tokenizer.encode("one two three", add_special=False))
    choice = choice_of(model_tokenizer, Asked())
    assert list(choice.take(ids, ()).tokens) == ids
    assert not choice.ended


def test_a_choice_whose_text_cannot_be_made_ends_in_an_error_that_says_so(model_tokenizer: ModelTokenizer) -> None:
    choice = choice_of(model_tokenizer, Asked())
    choice.fail("no text")
    assert choice.ended
    assert choice.error is not None
    assert (choice.error.error, choice.error.message, choice.error.reason) == (ErrorKind.WORKER, "no text", "error")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_reasoning_are_counted_however_tokens_are_grouped(model_tokenizer: ModelTokenizer, size: int) -> None:
    asked = Asked(answer_format=AnswerFormat(reasoning=True))
    thought = list(model_tokenizer.encode("<think>it was cold", add_special=False))
    answer = list(model_tokenizer.encode("</think>yes, it was", add_special=False))
    choice, ids = choice_of(model_tokenizer, asked), [*thought, *answer]
    for at in range(0, len(ids), size):
        choice.take(ids[at : at + size], ())
    # The last piece of reasoning is certain once it is known what follows it.
    assert len(thought) <= choice.reasoning_tokens <= len(thought) + 1
    one = choice_of(model_tokenizer, asked)
    one.take(ids, ())
    assert choice.reasoning_tokens == one.reasoning_tokens
    plain = choice_of(model_tokenizer, asked)
    plain.take(answer[1:], ())
    assert plain.reasoning_tokens == 0


BARE = {
    "hermes": '<tool_call>{"name": "now"}</tool_call>',
    "hermes, a text": '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
    "hermes, before its name": '<tool_call>{"arguments": "", "name": "now"}</tool_call>',
    "llama3_json": '{"name": "now"}',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|> <|tool_call_end|>",
    "mistral": "[TOOL_CALLS]now[ARGS]",
    "mistral_json": '[TOOL_CALLS] [{"name": "now"}]',
    "nemotron_json": '<TOOLCALL>[{"name": "now"}]</TOOLCALL>',
    "apriel": '<tool_calls>[{"name": "now"}]</tool_calls>',
    "granite": '<|tool_call|>[{"name": "now"}]',
    "seed_oss": "<seed:tool_call><function=now></function></seed:tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>',
    "qwen3_coder": "<tool_call><function=now></function></tool_call>",
    "glm45": "<tool_call>now</tool_call>",
    "glm47": "<tool_call>now</tool_call>",
    "deepseek_v32": '<｜DSML｜invoke name="now"></｜DSML｜invoke>',
    "minimax_m2": '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "harmony": "<|channel|>commentary to=functions.now<|message|><|call|>",
}
"""Calls as models write them that leave out arguments, where there are none."""


def test_every_format_is_tried_without_arguments() -> None:
    assert {name.partition(",")[0] for name in BARE} == set(FORMATS)


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_without_arguments_has_an_empty_object(model_tokenizer: ModelTokenizer, name: str, size: int) -> None:
    """Clients read arguments as JSON, and an empty text is none."""
    tools: dict[str, dict[str, str]] = {"now": {}, "find": {"text": "string"}}
    tool_format, _, _ = name.partition(",")
    asked = Asked(answer_format=AnswerFormat(tool_format, tools))
    choice, text = choice_of(model_tokenizer, asked), BARE[name]
    several = tool_format in ("hermes", "mistral", "llama3_json")
    ids = list(model_tokenizer.encode(text + text if several else text, add_special=False))
    told = [part for at in range(0, len(ids), size) for part in choice.take(ids[at : at + size], ()).parts or ()]
    last = choice.end(Done(RequestId("r"), 0, "stop"))
    assert last is not None
    told += last.parts or ()
    calls = "".join(f"{part.name}(" if isinstance(part, CallPart) else part.text for part in told)
    assert calls.replace(" ", "").replace("\n", "") == ("now({}now({}" if several else "now({}")
    assert list(joined(told)) == list(joined(choice.parts or ())), "what was streamed is what there is"


@pytest.mark.parametrize(("reason", "arguments"), [("stop", "{}"), ("length", "")])
def test_a_call_that_is_cut_off_before_its_arguments_has_none(
    model_tokenizer: ModelTokenizer, reason: str, arguments: str
) -> None:
    choice = choice_of(model_tokenizer, Asked(answer_format=AnswerFormat("mistral", {"now": {}})))
    choice.take(list(model_tokenizer.encode("[TOOL_CALLS]now[ARGS]", add_special=False)), ())
    choice.end(Done(RequestId("r"), 0, reason))
    assert "".join(part.text for part in choice.parts or () if isinstance(part, ArgumentsPart)) == arguments
    assert choice.calls


CALL = '<tool_call>\n{"name": "get", "arguments": {"x": "a<b c", "y": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("stop", "finish"),
    [("a<b", "length"), ('"arguments"', "length"), ("<b c", "length"), ("\n</tool", "stop"), ("nowhere", "stop")],
)
def test_a_stop_string_within_a_call_cuts_it_off_as_the_answers_length_does(
    model_tokenizer: ModelTokenizer, stop: str, finish: str
) -> None:
    asked = Asked(stops=(stop,), answer_format=AnswerFormat("hermes", {"get": {}}))
    choice = choice_of(model_tokenizer, asked)
    deltas = list(choice.take_each(model_tokenizer.encode(CALL, add_special=False), ()))
    if choice.finish is None:
        last = choice.end(Done(RequestId("r"), 0, "stop"))
        assert last is not None
        deltas.append(last)
    assert [delta.finish for delta in deltas if delta.finish] == [finish] == [choice.finish]
    assert choice.stop == (None if stop == "nowhere" else stop)
    assert choice.calls
    arguments = "".join(part.text for part in choice.parts or () if isinstance(part, ArgumentsPart))
    assert (json.loads(arguments) == {"x": "a<b c", "y": 1}) if finish == "stop" else not arguments.endswith("}")


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize(("stop", "finish"), [("b", "length"), ('{"a', "length"), ("\n", "stop")])
def test_a_stop_string_within_an_object_that_was_asked_for_cuts_it_off(
    model_tokenizer: ModelTokenizer, stop: str, finish: str, reasons: bool
) -> None:
    text = '{"a": "b"}\n'
    asked = Asked(stops=(stop,), answer_format=AnswerFormat(reasoning=True) if reasons else None)
    choice = choice_of(model_tokenizer, asked, '{"grammars": [{"json_schema": {}}]}')
    choice.take(model_tokenizer.encode(("<think>so {</think>" if reasons else "") + text, add_special=False), ())
    assert (choice.finish, choice.stop) == (finish, stop)
    other = choice_of(model_tokenizer, asked, '{"grammars": [{"lark_grammar": "start: /.*/"}]}')
    other.take(model_tokenizer.encode(text, add_special=False), ())
    assert other.finish == "stop"


def test_no_more_of_a_prompt_is_cached_than_it_has(model_tokenizer: ModelTokenizer) -> None:
    """The first attempt that reports may have found what an earlier one had drawn as well."""
    choice = choice_of(model_tokenizer, Asked())
    found = LegReport(RequestId("r"), 1, Role.PREFILL, WorkerName("prefill-0"), cached_tokens=48)
    choice.request.progress.append(found)
    assert choice.cached_tokens == 2
