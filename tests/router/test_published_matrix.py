"""Checkpoints in the forms in which people publish them, from a client's request to the client's answer.

Real routers, tokenizers, templates and grammars; the model is a script: it wants to write one text, token by token, and
takes another token only where a grammar's mask forbids the one it wants. The oracles are transformers (prompts), the
`tokenizers` library's own decode of a whole sequence (texts) and `jsonschema` (what follows a schema).
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.router import fake_worker
from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from tests.router.parsers.test_parsers import written
from tests.support.published_checkpoints import (
    END_KINDS,
    FURTHER_END,
    MARK_KINDS,
    TEMPLATE_KINDS,
    TOKENIZER_KINDS,
    PublishedForm,
    tokenizer_of,
    write_published,
)
from twinpool.cluster.assembly.build_worker import grammar_engine
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.engine.structured_output.grammar_engine import GrammarError

TEXT = 'Naïve 🙂👩‍👩‍👧 reads 日本語の本, x = {"a": [1]} <b> and ends.'
STOP = "語の"
ARGUMENTS = {"text": "Zürich 🙂 {x}", "most": 5}
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "most": {"enum": [5, 7]}},
    "required": ["text", "most"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA, "strict": True}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = {"tools": [FIND, NOW]}
NAMED = {"type": "function", "function": {"name": "find"}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASKED = [{"role": "user", "content": "Où est la gare? 駅 🙂"}]
LONGEST = 250
PIECES = ("metaspace", "prepended", "without prefix", "gguf sentencepiece")
BAR = "\x01"
"""A character that no token has beside others."""


@dataclass
class Script:
    wanted: list[int]
    begin: int | None = None
    """How long the prompt is."""
    drawn: list[int] = field(default_factory=list)
    turned: int = 0
    """How often a mask forbade what was wanted."""
    matcher: Any = None


class ScriptedModel:
    """What a cluster's workers draw by: scripts by the seed of a request."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self.engine = grammar_engine(spec, ExitStack())
        self._ends, self._vocab = spec.eos_token_ids, spec.vocab_size
        closing = [tokenizer.token_to_id(text) for text in ('"', "}", "]", "5", ":", ",", "<0x22>", "<0x7D>")]
        self._closing = [*self._ends, *(number for number in closing if number is not None)]
        self.scripts: dict[int, Script] = {}

    def draw(self, tokens: Sequence[int], sampling: SamplingParams) -> int:
        script = self.scripts[sampling.seed]
        if script.begin is None:
            script.begin = len(tokens)
        at = len(tokens) - script.begin
        while len(script.drawn) <= at:
            script.drawn.append(self._next(script, len(script.drawn), sampling.grammar))
        return script.drawn[at]

    def _next(self, script: Script, at: int, grammar: str) -> int:
        wanted = script.wanted[at] if at < len(script.wanted) else self._ends[0]
        if not grammar or (script.drawn and script.drawn[-1] in self._ends):
            return wanted
        assert self.engine is not None
        if script.matcher is None:
            script.matcher = self.engine.start(grammar, ()).result().matcher
        (made,) = self.engine.masks([(script.matcher, ())])
        if isinstance(made, GrammarError):
            raise made
        allowed = np.unpackbits(made[0].words.view(np.uint8), bitorder="little")
        if not allowed[wanted]:
            script.turned += 1
            wanted = next((one for one in self._closing if allowed[one]), int(np.flatnonzero(allowed)[0]))
        if wanted not in self._ends:
            script.matcher.consume([wanted])
        return wanted

    def logprob(self, token: int, count: int, *, routed: bool) -> TokenLogprob:
        assert not routed, "nobody asks for experts here"
        top = tuple(((token + number) % self._vocab, -token / 1000 - number) for number in range(count))
        return TokenLogprob(token, -token / 1000, top)


class Site:
    """A router of one form, with what judges its answers."""

    def __init__(self, form: PublishedForm, spec: ModelSpec, theirs: Any, model: ScriptedModel, server: Server) -> None:
        self.form, self.spec, self.theirs, self.model, self.server = form, spec, theirs, model, server
        # transformers leaves special tokens with letters beyond ASCII in a GGUF file's vocabulary of bytes unread, and
        # writes no blank behind special tokens for a SentencePiece one, where llama.cpp does.
        self.tokenizer: Tokenizer = tokenizer_of(form) if spec.path.is_file() else theirs.backend_tokenizer
        self._seeds = itertools.count(1)
        self.script = Script([])

    def tokens(self, text: str) -> list[int]:
        """The tokens of an answer, without the blanks that a tokenizer puts before a text."""
        known = "|".join(map(re.escape, sorted(self.form.mark_names, key=len, reverse=True)))
        found = []
        for part in re.split(f"({known})", text):
            (bar,) = self.tokenizer.encode(BAR, add_special_tokens=False).ids[-1:]
            tokens = self.tokenizer.encode(BAR + part, add_special_tokens=False).ids
            found += tokens[tokens.index(bar) + 1 :]
        return found

    def wants(self, tokens: list[int]) -> int:
        seed = next(self._seeds)
        self.script = self.model.scripts[seed] = Script(tokens)
        return seed

    def body(self, seed: int, **more: Any) -> dict[str, Any]:
        asked = {"messages": ASKED, "seed": seed, "max_tokens": LONGEST, "return_token_ids": True, **more}
        return asked

    def chat(self, text: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer to a chat, which its stream has told alike, and its choice."""
        return self.chat_of(self.tokens(text), **more)

    def chat_of(self, tokens: list[int], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        response = self.server.post("/v1/chat/completions", self.body(self.wants(tokens), **more))
        assert response.status_code == 200, response.text
        whole = response.json()
        (choice,) = whole["choices"]
        told = streamed(
            self.server.stream(
                "/v1/chat/completions",
                self.body(self.wants(tokens), stream_options={"include_usage": True}, **more),
            )
        )
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        reasoning = message.get("reasoning_content") or ""
        wanted = (message["content"] or "", reasoning, calls, choice["finish_reason"], whole["usage"])
        assert told == wanted
        return whole, choice

    def decoded(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """What tokens add to the text of a prompt."""
        before, both = (
            self.tokenizer.decode(list(part), skip_special_tokens=False) for part in (prompt, [*prompt, *tokens])
        )
        assert both.startswith(before)
        return both[len(before) :]

    def framed(self, text: str) -> str:
        """An answer as the model writes it, with a thought where it has to think."""
        if self.form.calls == "harmony":
            return f"<|channel|>final<|message|>{text}"
        return f"so it is\n</think>\n\n{text}" if self.form.thinks else text

    def content_of(self, raw: str) -> str:
        """The content in the raw text of an answer."""
        for mark in ("<|message|>", "</think>"):
            if self.framed("").find(mark) >= 0:
                return raw.partition(mark)[2]
        return raw

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        text = written(self.form.calls, [(name, arguments)])
        return f"so it is\n</think>\n\n{text}" if self.form.thinks else text

    def pieces(self, text: str) -> list[int] | None:
        """The characters of a text as tokens of one each; None where it has others than the vocabulary."""
        found = [number for letter in text if (number := self.tokenizer.token_to_id(letter)) is not None]
        return found if len(found) == len(text) else None


def streamed(events: Sequence[Any]) -> tuple[str, str, list[tuple[str, str]], str | None, dict[str, Any]]:
    """What the events of a chat's stream tell, put together as a client does."""
    content = reasoning = ""
    calls: list[list[str]] = []
    finish, usage = None, dict[str, Any]()
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    assert call["index"] == len(calls)
                    calls.append(["", ""])
                calls[call["index"]][0] += call["function"].get("name") or ""
                calls[call["index"]][1] += call["function"].get("arguments") or ""
    return content, reasoning, [(name, arguments) for name, arguments in calls], finish, usage


def is_published(row: Sequence[str | None]) -> bool:
    """Whether people publish such a form. U+2581 is a blank to SentencePiece, and DeepSeek's marks have it; and a token
    of `added_tokens.json` is normalised by transformers: it isn't found where a blank is put first."""
    tokenizer, marks, template, _ = row
    if template in ("deepseek_v3", "deepseek_v31") and tokenizer in PIECES:
        return False
    return not (tokenizer == "prepended" and marks == "added_tokens.json")


def covering(rng: random.Random) -> Iterator[PublishedForm]:
    """Forms in which any two values of two properties come together at least once."""
    factors = (TOKENIZER_KINDS, MARK_KINDS, TEMPLATE_KINDS, END_KINDS)
    pairs = set()
    for (a, left), (b, right) in itertools.combinations(enumerate(factors), 2):
        for x, y in itertools.product(left, right):
            if is_published([x if at == a else y if at == b else None for at in range(len(factors))]):
                pairs.add((a, x, b, y))
    while pairs:
        a, x, b, y = min(pairs)
        best: tuple[int, tuple[str, ...]] = (-1, ())
        for _ in range(40):
            row = [rng.choice(values) for values in factors]
            row[a], row[b] = x, y
            if not is_published(row):
                continue
            covered = sum((i, row[i], j, row[j]) in pairs for i, j in itertools.combinations(range(len(row)), 2))
            best = max(best, (covered, tuple(row)))
        assert best[1], (x, y)
        row = list(best[1])
        pairs -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
        yield PublishedForm(*row)


RUN_BY: dict[int, Any] = {0: (), 12: pytest.mark.thorough}
ALL = [
    pytest.param(form, id=str(form), marks=RUN_BY.get(number % 24, pytest.mark.soak))
    for number, form in enumerate(covering(random.Random(39)))
]
"""One in twenty-four is for `make test`, one in twelve for CI, the others for `make soak`."""


@pytest.fixture(params=ALL)
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    form: PublishedForm = request.param
    path = write_published(form, tmp_path / "published")
    spec = read_model_spec(path)
    theirs = AutoTokenizer.from_pretrained(
        tmp_path / "published", **({"gguf_file": path.name} if path.is_file() else {})
    )
    model = ScriptedModel(spec, theirs.backend_tokenizer)
    monkeypatch.setattr(fake_worker, "draw", model.draw)
    monkeypatch.setattr(fake_worker, "logprob", model.logprob)
    with serving(FakeCluster(), spec=spec) as server:
        yield Site(form, spec, theirs, model, server)
        server.at_rest()
    if model.engine is not None:
        model.engine.close()


@pytest.mark.slow
def test_a_form_that_people_publish(site: Site) -> None:
    """All of a form in one test: what it takes to begin one is more than all that it is asked."""
    completions_are_their_tokens(site)
    if site.form.source is None:
        refused = site.server.refused("/v1/chat/completions", {"messages": ASKED})
        assert "chat template" in refused["message"]
        return
    chats_are_their_tokens(site)
    stops_are_found(site)
    schemas_are_followed(site)
    calls_are_found(site)
    calls_that_are_asked_for_are_made(site)
    letters_that_read_like_marks_are_text(site)


def completions_are_their_tokens(site: Site) -> None:
    tokens = site.tokenizer.encode(TEXT, add_special_tokens=False).ids
    body = {
        "prompt": "Ça va? 🙂",
        "seed": site.wants(tokens),
        "max_tokens": LONGEST,
        "logprobs": 1,
        "return_token_ids": True,
    }
    response = site.server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["prompt_token_ids"] == site.theirs(body["prompt"])["input_ids"]
    expected = site.decoded(choice["prompt_token_ids"], tokens)
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    offsets = choice["logprobs"]["text_offset"]
    told = 0
    for at in range(len(tokens)):
        before = site.decoded(choice["prompt_token_ids"], tokens[:at])
        if expected.startswith(before):  # Else a character isn't whole: its tokens are where it begins.
            told = len(before)
        assert offsets[at] - offsets[0] == told


def chats_are_their_tokens(site: Site) -> None:
    text = site.framed(TEXT)
    whole, choice = site.chat(text)
    prompt = whole["prompt_token_ids"]
    asked: Any = ASKED
    if site.form.template == "parts":
        asked = [{"role": "user", "content": [{"type": "text", "text": ASKED[0]["content"]}]}]
    shown = site.theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert prompt == site.tokenizer.encode(shown, add_special_tokens=False).ids
    raw = site.decoded(prompt, site.tokens(text))
    expected = site.content_of(raw)
    thinks = site.form.thinks
    assert choice["message"]["content"] == (expected.strip() if thinks else expected)
    assert choice["finish_reason"] == "stop"
    if thinks:
        assert choice["message"]["reasoning_content"].strip() == "so it is"
        return
    if site.form.calls == "harmony":
        return
    _, scored = site.chat(text, logprobs=True, top_logprobs=2)
    heard = b"".join(bytes(one["bytes"]) for one in scored["logprobs"]["content"])
    for end in (site.form.end, FURTHER_END):  # Where the answer's end is scored, too.
        heard = heard.removesuffix(end.encode()).removesuffix(end.replace("\u2581", " ").encode())
    assert heard.decode().strip() == expected.strip()


def stops_are_found(site: Site) -> None:
    _, whole = site.chat(site.framed(TEXT))
    content = whole["message"]["content"]
    _, choice = site.chat(site.framed(TEXT), stop=[STOP, "never"])
    assert choice["message"]["content"] == content[: content.index(STOP)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", STOP)


def schemas_are_followed(site: Site) -> None:
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    _, choice = site.chat(site.framed(text), response_format=RESPONSE_FORMAT)
    assert json.loads(choice["message"]["content"]) == ARGUMENTS
    _, choice = site.chat(site.framed(TEXT), response_format=RESPONSE_FORMAT)
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    else:
        assert choice["finish_reason"] == "length"


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def calls_are_found(site: Site) -> None:
    _, choice = site.chat(site.call("find", ARGUMENTS), **TOOLS)
    assert called(choice) == [("find", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"
    assert not (choice["message"]["content"] or "").strip()
    assert site.script.turned == 0
    back = [*ASKED, choice["message"], {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"],
                                        "content": "12"}]  # fmt: skip
    _, after = site.chat(site.framed("Done."), messages=back, **TOOLS)
    assert after["message"]["content"].strip() == "Done."
    # What is wrong in a call of a strict tool is another token.
    _, choice = site.chat(site.call("find", {**ARGUMENTS, "most": 6}), **TOOLS)
    if choice["finish_reason"] == "tool_calls":
        (call,) = called(choice)
        jsonschema.validate(call[1], SCHEMA)
    assert site.script.turned


def calls_that_are_asked_for_are_made(site: Site) -> None:
    for choice_of in ("required", NAMED):
        _, choice = site.chat(site.call("find", ARGUMENTS), **TOOLS, tool_choice=choice_of, parallel_tool_calls=False)
        assert (called(choice), site.script.turned) == ([("find", ARGUMENTS)], 0)
        _, choice = site.chat(TEXT, **TOOLS, tool_choice=choice_of, parallel_tool_calls=False)
        assert site.script.turned
        if choice["finish_reason"] != "length":
            ((name, arguments),) = called(choice)
            jsonschema.validate(arguments, SCHEMA if name == "find" else {"type": "object"})


def letters_that_read_like_marks_are_text(site: Site) -> None:
    text = "see</think>and<tool_call>{" + site.form.mark_names[0]
    pieces = site.pieces(text)
    if site.form.marks == "none" or pieces is None or site.form.calls == "harmony":
        return
    frame = site.tokens(site.framed(""))
    _, choice = site.chat_of([*frame, *pieces], **TOOLS)
    assert choice["message"]["content"] == text
    assert not choice["message"].get("tool_calls")
