"""Large bodies are read by child processes: all of it arrives, and what happens to one costs nobody else."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import resource
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.router.http_server import DEMO, demo_spec, eventually
from twinpool.contracts.checkpoint.model_spec import Pooling
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.router.openai.api_errors import ReaderEnded, ReaderFailed
from twinpool.router.openai.chat_format import AnswerFormat
from twinpool.router.openai.parse_request import EmbeddingFormat, PairFormat
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from twinpool.router.tokenizer_pool import tokenizer_pool as module
from twinpool.router.tokenizer_pool import tokenizer_process
from twinpool.router.tokenizer_pool.prepare_request import MAX_CONTAINERS, BodyReader, body_limit
from twinpool.router.tokenizer_pool.tokenizer_pool import LARGE_BYTES, TokenizerPool
from twinpool.router.tokenizer_pool.tokenizer_process import (
    HEAD,
    NICENESS,
    REQUESTS,
    FrameKind,
    answer,
    prepared_frame,
    prepared_of,
    refusal_frame,
    refusal_of,
)

SMALL, LARGE = b"s" * 10, b"l" * (LARGE_BYTES + 1)


class FakeChild:
    """Stands for a reader's process; the test speaks for it."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=socket.dup(descriptor))
        self.socket.setblocking(False)
        self.pid = descriptor
        self.ended = False
        self._set_up = False

    def kill(self) -> None:
        self.ended = True
        self.socket.close()

    def wait(self, timeout_s: float | None = None) -> int:
        return -9

    async def hear(self) -> bytes:
        """The next body."""
        loop = asyncio.get_running_loop()

        async def exactly(size: int) -> bytes:
            data = b""
            while len(data) < size:
                part = await loop.sock_recv(self.socket, size - len(data))
                assert part, "the router closed the socket"
                data += part
            return data

        kind, _, length = HEAD.unpack(await exactly(HEAD.size))
        body = await exactly(length)
        if kind == FrameKind.SETUP:
            assert not self._set_up, "a reader is set up once"
            self._set_up = True
            return await self.hear()
        return body

    async def say(self, body: bytes, *, kind: FrameKind = FrameKind.TEXT, last: bool = False) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, HEAD.pack(kind, last, len(body)) + body)


class Stage:
    """Readers whose children are the test's."""

    def __init__(self, processes: int = 2, timeout_s: float = 100.0) -> None:
        self.children: list[FakeChild] = []
        self.readers = TokenizerPool(b"setup", processes, timeout_s, start=self._start)

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        self.children.append(FakeChild(descriptor))
        return cast("subprocess.Popen[bytes]", self.children[-1])

    async def child(self, number: int) -> FakeChild:
        await eventually(lambda: len(self.children) > number)
        return self.children[number]


@pytest.fixture
def model_tokenizer() -> ModelTokenizer:
    return read_model_tokenizer(DEMO, 10**6)


def intake(model_tokenizer: ModelTokenizer, **config: Any) -> BodyReader:
    return BodyReader(demo_spec(), model_tokenizer, RouterConfig(**config))


@pytest.mark.asyncio
async def test_one_reader_stays_free_for_small_bodies_and_order_is_kept_among_equals() -> None:
    stage = Stage()
    larges = [stage.readers.submit(FrameKind.CHAT, LARGE + bytes([n])) for n in range(2)]
    busy = await stage.child(0)
    assert (await busy.hear())[-1] == 0
    smalls = [stage.readers.submit(FrameKind.CHAT, SMALL + bytes([n])) for n in range(2)]
    free = await stage.child(1)
    for number, small in enumerate(smalls):
        assert (await free.hear())[-1] == number
        await free.say(b"done")
        assert await small == (FrameKind.TEXT, b"done")
    assert not larges[0].done()
    assert not larges[1].done()
    for large in larges:
        await busy.say(b"big")
        assert (await large)[1] == b"big"
        if large is larges[0]:
            assert (await busy.hear())[-1] == 1
    await stage.readers.close()
    assert all(child.ended for child in stage.children)


@pytest.mark.asyncio
async def test_a_body_whose_reader_ended_is_tried_once_more_and_then_fails() -> None:
    stage = Stage(1)
    reply = stage.readers.submit(FrameKind.CHAT, SMALL)
    first = await stage.child(0)
    await first.hear()
    first.socket.close()
    second = await stage.child(1)
    assert await second.hear() == SMALL
    await second.say(b"done")
    assert (await reply)[1] == b"done"
    poison = stage.readers.submit(FrameKind.CHAT, SMALL)
    await second.hear()
    second.socket.close()
    third = await stage.child(2)
    await third.hear()
    third.socket.close()
    with pytest.raises(ReaderEnded, match="SIGKILL"):
        await poison
    after = stage.readers.submit(FrameKind.CHAT, SMALL)
    fourth = await stage.child(3)
    await fourth.hear()
    await fourth.say(b"done")
    assert (await after)[1] == b"done"
    await stage.readers.close()


@pytest.mark.asyncio
async def test_a_reader_that_takes_too_long_is_ended_and_the_body_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    stage = Stage(1, timeout_s=0.05)
    with pytest.raises(RequestError, match=r"longer than 0\.05 s"):
        await stage.readers.submit(FrameKind.CHAT, SMALL)
    assert stage.children[0].ended
    await stage.readers.close()


@pytest.mark.asyncio
async def test_a_body_whose_client_has_left_is_never_read() -> None:
    stage = Stage(1)
    running = stage.readers.submit(FrameKind.CHAT, SMALL)
    child = await stage.child(0)
    await child.hear()
    left, stays = stage.readers.submit(FrameKind.CHAT, b"left"), stage.readers.submit(FrameKind.CHAT, b"stays")
    left.cancel()
    assert stage.readers.waiting == 1
    await child.say(b"1")
    assert (await running)[1] == b"1"
    assert await child.hear() == b"stays"
    await child.say(b"2")
    assert (await stays)[1] == b"2"
    await stage.readers.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [FrameKind.TEXT, FrameKind.REFUSED, FrameKind.FAILED])
async def test_a_reader_that_says_it_ends_is_replaced_before_the_next_body(said: FrameKind) -> None:
    """Whatever it says of the body: a large one that is refused takes as much memory as one that is answered."""
    stage = Stage(1)
    reply = stage.readers.submit(FrameKind.CHAT, SMALL)
    child = await stage.child(0)
    await child.hear()
    await child.say(refusal_frame(RequestError("done")) if said is FrameKind.REFUSED else b"done", kind=said, last=True)
    (told,) = await asyncio.gather(reply, return_exceptions=True)
    assert told == (said, b"done") if said is FrameKind.TEXT else "done" in str(told)
    assert child.ended
    reply = stage.readers.submit(FrameKind.CHAT, SMALL)
    fresh = await stage.child(1)
    await fresh.hear()
    await fresh.say(b"done")
    await reply
    assert stage.readers.started == 2
    await stage.readers.close()


@pytest.mark.asyncio
async def test_who_waits_when_the_router_ends_is_told() -> None:
    stage = Stage(1)
    replies = [stage.readers.submit(FrameKind.CHAT, body) for body in (SMALL, SMALL, LARGE, LARGE)]
    await (await stage.child(0)).hear()
    assert stage.readers.waiting == 3, "large ones, too"
    await stage.readers.close()
    for reply in replies:
        assert reply.done()
        with pytest.raises(ReaderFailed, match="shutting down"):
            await reply


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_real_reader_refuses_what_takes_more_memory_than_it_may_have_and_lives_on(
    model_tokenizer: ModelTokenizer,
) -> None:
    spec, config = demo_spec(), RouterConfig(reader_memory_bytes=32 * 1024**2)
    readers = TokenizerPool(module_setup(spec, config), 1, 60.0)
    try:
        body = json.dumps({"prompt": [5] * 4_000_000}).encode()
        with pytest.raises(RequestError, match="more memory than a reader may have"):
            await readers.submit(FrameKind.COMPLETION, body)
        kind, frame = await readers.submit(FrameKind.COMPLETION, json.dumps({"prompt": "hello"}).encode())
        assert kind is FrameKind.PREPARED
        assert prepared_of(frame).prompts[0].tokens == model_tokenizer.encode("hello", add_special=True)
    finally:
        await readers.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_what_a_large_body_took_is_given_back_and_its_reader_comes_after_the_router() -> None:
    spec = dataclasses.replace(demo_spec(), context=200_000)
    readers = TokenizerPool(module_setup(spec, RouterConfig()), 1, 60.0)
    try:
        await readers.submit(FrameKind.COMPLETION, json.dumps({"prompt": "hello"}).encode())
        reader = psutil.Process(readers.pids[0])
        at_first = reader.memory_info().rss
        for _ in range(2):
            text = "It was a fine morning, and the old house stood. " * 12_000
            kind, _ = await readers.submit(FrameKind.COMPLETION, json.dumps({"prompt": text}).encode())
            assert kind is FrameKind.PREPARED
            assert readers.started == 1, "it needn't end for that"
            assert reader.memory_info().rss - at_first < 24 * 2**20, "tokenising takes many times the text"
        assert reader.nice() == min(19, psutil.Process().nice() + NICENESS)
    finally:
        await readers.close()


def module_setup(spec: Any, config: RouterConfig) -> bytes:
    from twinpool.router.tokenizer_pool.tokenizer_process import setup_frame

    return setup_frame(spec, config, 10**6)


class Script:
    """A reader's end of the socket, on which the router has said all that it will."""

    def __init__(self, *frames: tuple[FrameKind, bytes]) -> None:
        self._rest = b"".join(HEAD.pack(kind, False, len(content)) + content for kind, content in frames)

    def recv_into(self, view: memoryview) -> int:
        part, self._rest = self._rest[: len(view)], self._rest[len(view) :]
        view[: len(part)] = part
        return len(part)

    def sendall(self, data: bytes) -> None:
        pass


def test_a_name_is_of_the_next_body_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader lives through changes of the keys, and reads for whoever comes."""
    asked: list[tuple[bytes, str]] = []

    def answered(intake: BodyReader, kind: FrameKind, raw: bytes, tenant: str = "") -> tuple[FrameKind, bytes]:
        asked.append((raw, tenant))
        return FrameKind.TEXT, b""

    monkeypatch.setattr(tokenizer_process, "answer", answered)
    for where, name in ((resource, "setrlimit"), (gc, "freeze"), (gc, "disable"), (signal, "setitimer")):
        monkeypatch.setattr(where, name, lambda *_: None)
    named = [(FrameKind.TENANT, b"acme"), (FrameKind.CHAT, b"1"), (FrameKind.CHAT, b"2")]
    script = Script((FrameKind.SETUP, module_setup(demo_spec(), RouterConfig())), *named, named[0], named[1])
    tokenizer_process.serve(cast(socket.socket, script))
    assert asked == [(b"1", "acme"), (b"2", ""), (b"1", "acme")]


BODIES: dict[FrameKind, dict[str, Any]] = {
    FrameKind.COMPLETION: {"prompt": "hello " * 40},
    FrameKind.CHAT: {"messages": [{"role": "user", "content": "hello " * 40}]},
    FrameKind.MESSAGES: {"messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 5},
    FrameKind.RESPONSES: {"input": "hello " * 40},
    FrameKind.EMBEDDINGS: {"input": "hello " * 40},
    FrameKind.GENERATE: {"token_ids": [5, 6, 7] * 40},
    FrameKind.SCORE: {"text_1": "hello " * 40, "text_2": "there " * 40},
    FrameKind.RERANK: {"query": "hello " * 40, "documents": ["there " * 40]},
    FrameKind.CLASSIFY: {"input": "hello " * 40},
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_nobody_finds_what_is_cached_of_another_by_any_endpoint(
    model_tokenizer: ModelTokenizer, kind: FrameKind
) -> None:
    spec = demo_spec()
    if kind is FrameKind.CLASSIFY:
        spec = dataclasses.replace(spec, pooling=Pooling(labels=("good", "bad")))
    reader = BodyReader(spec, model_tokenizer, RouterConfig())

    def keys(tenant: str) -> bytes:
        said, frame = answer(reader, kind, json.dumps(BODIES[kind]).encode(), tenant)
        assert said is FrameKind.PREPARED
        return prepared_of(frame).prompts[0].hashes.raw

    acme, other, nobody = keys("acme"), keys("other"), keys("")
    assert len({acme, other, nobody}) == 3
    assert acme == keys("acme"), "its own is found"


@pytest.mark.parametrize("given", ["text", "tokens"])
@pytest.mark.parametrize("most", [3, -1])
def test_an_echo_shows_what_is_kept_of_a_prompt_and_no_more(
    model_tokenizer: ModelTokenizer, given: str, most: int
) -> None:
    spec = demo_spec()
    tokens = model_tokenizer.encode("so many words that not all are kept " * 400, add_special=False)
    prompt: Any = list(tokens) if given == "tokens" else model_tokenizer.decode(tokens)
    asked = {"prompt": prompt, "echo": True, "truncate_prompt_tokens": most, "max_tokens": 8}
    assert len(tokens) > spec.context
    (found,) = intake(model_tokenizer).completion(json.dumps(asked).encode()).prompts
    kept = tokens[-(3 if most == 3 else spec.context - 8) :]
    assert found.tokens == kept
    assert found.text == model_tokenizer.decode(kept)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_where_a_call_must_come_the_answer_can_end_behind_it_though_ends_are_ignored(
    model_tokenizer: ModelTokenizer, choice: Any
) -> None:
    """At a grammar's end nothing may come but the end."""
    asked = {
        "messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stop_token_ids": [9],
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": choice,
    }  # fmt: skip
    spec = demo_spec()
    assert spec.eos_token_ids
    reader = intake(model_tokenizer, tool_parser="hermes")
    sampling = reader.chat(json.dumps(asked).encode()).request.sampling
    assert sampling.grammar
    assert {*sampling.stop_token_ids} == {9, *spec.eos_token_ids}
    plain = reader.chat(json.dumps({**asked, "tool_choice": "none"}).encode()).request.sampling
    assert plain.stop_token_ids == (9,)


# ---------------------------------------------------------------- what goes between the processes

EVERY_FIELD: dict[str, Any] = {
    "truncate_prompt_tokens": 1000,
    "prompt": ["hello", "\ud7ff and more", "so many words that they take more than one page of the cache " * 9],
    "n": 3, "echo": True, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True, "return_tokens_as_token_ids": True,
    "add_special_tokens": False, "skip_special_tokens": False, "stop": ["a", "b"],
    "include_stop_str_in_output": True, "max_tokens": 9, "logprobs": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7,
    "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0,
    "logit_bias": {"5": -1.5, "7": 2.0}, "seed": -1, "min_tokens": 3, "stop_token_ids": [9, 10], "cache_salt": "s",
    "priority": -(2**62), "timeout": 12.5, "user": "me", "store": True,
}  # fmt: skip


def test_everything_that_was_asked_comes_out_of_a_reader(model_tokenizer: ModelTokenizer) -> None:
    """No field is at its default, so that one which is lost shows."""
    want = intake(model_tokenizer).completion(json.dumps(EVERY_FIELD).encode())
    plain = intake(model_tokenizer).completion(b'{"prompt": "x"}')
    same = [
        f.name
        for f in dataclasses.fields(want.request)
        if getattr(want.request, f.name) == getattr(plain.request, f.name)
    ]
    assert set(same) == {"chat", "embedding", "eos", "grammar_field", "repeated", "prompt_logprobs", *OF_CHATS}
    got = prepared_of(prepared_frame(want))
    assert len(want.prompts[2].hashes.raw) > 8
    assert got.prompts == want.prompts
    assert len(got.request.prompts) == len(want.request.prompts)
    assert dataclasses.replace(got.request, prompts=want.request.prompts) == want.request
    assert all(
        type(getattr(got.request, f.name)) is type(getattr(want.request, f.name))
        for f in dataclasses.fields(want.request)
    )


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_pages_of_the_model_and_of_each_adapter_are_apart_whoever_asks(
    model_tokenizer: ModelTokenizer, tenant: str
) -> None:
    read = intake(model_tokenizer)
    read.adapters = {name: AdapterRef(name, f"digest of {name}", f"/{name}") for name in ("one", "two")}
    salts = set()
    for body in ({}, {"model": "one"}, {"model": "two"}):
        prepared = read.completion(json.dumps({"prompt": "x" * 300, "cache_salt": "s", **body}).encode(), tenant)
        salts.add((prepared.request.salt, prepared.prompts[0].hashes.raw[:1]))
    assert len({salt for salt, _ in salts}) == len({hashed for _, hashed in salts}) == 3


def test_how_vectors_are_to_be_answered_comes_out_of_a_reader(model_tokenizer: ModelTokenizer) -> None:
    body = {"input": ["x", "y"], "dimensions": 3, "encoding_format": "base64", "user": "me", "cache_salt": "s"}
    want = intake(model_tokenizer).embeddings(json.dumps(body).encode())
    got = prepared_of(prepared_frame(want))
    assert dataclasses.replace(got.request, prompts=want.request.prompts) == want.request
    assert got.request.embedding == EmbeddingFormat("input", 3, True)
    assert (got.request.sampling.pooling, got.request.session, got.request.salt) == ("last", "me", "s")


def test_a_request_in_token_ids_comes_out_of_a_reader(model_tokenizer: ModelTokenizer) -> None:
    params = {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 2, "n": 2, "seed": 5}
    body = {"token_ids": [5, 6, 7] * 9, "sampling_params": params, "cache_salt": "s", "priority": 3, "user": "me"}
    want = intake(model_tokenizer).generate(json.dumps(body).encode(), "acme")
    got = prepared_of(prepared_frame(want))
    assert dataclasses.replace(got.request, prompts=want.request.prompts) == want.request
    assert got.prompts == want.prompts
    assert (got.request.shape, got.request.prompt_logprobs, got.request.salt) == ("tokens", 2, "acme\ns")


def test_pairs_of_texts_come_out_of_a_reader(model_tokenizer: ModelTokenizer) -> None:
    body = {"query": "x", "documents": ["y", "z", "x"], "top_n": 2, "return_documents": True, "priority": 2}
    want = answer(intake(model_tokenizer), FrameKind.RERANK, json.dumps(body).encode(), "acme")
    assert want[0] is FrameKind.PREPARED
    got = prepared_of(want[1]).request
    assert got.embedding == EmbeddingFormat(
        "documents", pairs=PairFormat("rerank", ((0, 1), (0, 2), (0, 0)), top_n=2, documents=("y", "z", "x"))
    )
    assert (len(got.prompts), got.priority, got.salt) == (3, 2, "acme\n")


OF_CHATS = {
    "messages", "template_args", "add_generation_prompt", "continue_final_message", "shape", "tool_use",
    "answer_format", "separate_reasoning", "tool_named",
}  # fmt: skip
"""Fields that only chats give, and of them those that are done with once the prompt is tokenised."""
DONE_WITH = {"messages", "template_args", "tool_use"}
A_CHAT: dict[str, Any] = {
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I look"}],
    "tools": [{"name": "f", "strict": True, "input_schema": {"properties": {"n": {"type": "integer"}}}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "separate_reasoning": True,
    "add_generation_prompt": False,
}


def test_what_a_chat_asked_comes_out_of_a_reader(model_tokenizer: ModelTokenizer) -> None:
    want = intake(model_tokenizer, reasoning_parser="think").messages(json.dumps(A_CHAT).encode())
    plain = intake(model_tokenizer).completion(b'{"prompt": "x"}')
    for name in OF_CHATS - {"separate_reasoning", "template_args"}:
        assert getattr(want.request, name) != getattr(plain.request, name), name
    assert want.request.answer_format == AnswerFormat("hermes", {"f": {"n": "integer"}}, True, False)
    got = prepared_of(prepared_frame(want)).request
    for field in dataclasses.fields(got):
        if field.name not in DONE_WITH | {"prompts"}:
            assert getattr(got, field.name) == getattr(want.request, field.name), field.name
    assert got.sampling.grammar


def test_a_refusal_comes_out_of_a_reader_as_it_went_in(model_tokenizer: ModelTokenizer) -> None:
    kind, frame = answer(intake(model_tokenizer), FrameKind.COMPLETION, b'{"prompt": "x", "model": "other"}')
    assert kind is FrameKind.REFUSED
    error = refusal_of(frame)
    assert type(error).__name__ == "UnknownModel"
    assert (str(error), error.param) == (
        "the model \"other\" does not exist; this server has 'demo', and no adapters (LoRA)",
        "model",
    )
    surrogates = refusal_of(refusal_frame(RequestError("\ud800", param="p")))
    assert str(surrogates) == "\ud800"


def test_a_failure_inside_a_reader_is_told_and_not_raised(
    model_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = intake(model_tokenizer)

    def fail(raw: bytes) -> dict[str, Any]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(broken, "_tree", fail)
    assert answer(broken, FrameKind.COMPLETION, b"") == (FrameKind.FAILED, b"ZeroDivisionError: planted")


# ---------------------------------------------------------------- what is refused before it costs much


def test_brackets_are_counted_outside_of_strings_only(model_tokenizer: ModelTokenizer) -> None:
    text = "[{" * MAX_CONTAINERS + '\\"['
    assert intake(model_tokenizer)._tree(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    with pytest.raises(RequestError, match="more than 65536 lists and objects"):
        intake(model_tokenizer)._tree(b'{"x":[' + b"[]," * MAX_CONTAINERS + b"[]]}")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    model_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]))
    most = longest * (demo_spec().context + 1)
    calls: list[int] = []

    def encode(text: str, **_: Any) -> tuple[int, ...]:
        calls.append(len(text))
        return (5,)

    monkeypatch.setattr(model_tokenizer, "encode", encode)
    with pytest.raises(RequestError, match="the context has 2048"):
        intake(model_tokenizer).completion(json.dumps({"prompt": "x" * (most + longest)}).encode())
    assert calls == []
    intake(model_tokenizer).completion(json.dumps({"prompt": "x" * (most - 1)}).encode())
    assert calls == [most - 1], "what might fit is tokenised"


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True}},
        {"added_tokens": [{"id": 0, "content": "<mask>", "lstrip": True}]},
    ],
)
def test_where_a_token_may_stand_for_any_length_nothing_is_said_of_the_least(change: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    tree = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert ModelTokenizer(tokenizer, None, tree).min_tokens("x" * 10_000) > 0
    changed = {**tree, **{key: {**tree[key], **v} if key == "model" else v for key, v in change.items()}}
    assert ModelTokenizer(tokenizer, None, changed).min_tokens("x" * 10_000) == 0


def test_more_answers_than_the_house_holds_are_refused_before_they_are_tokenised(
    model_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match="6 answers in one request are above the server's queue of 5"):
        intake(model_tokenizer, max_queue=5).completion(b'{"prompt": ["a", "b", "c"], "n": 2}')


def test_scores_of_prompts_are_bounded_over_all_choices(model_tokenizer: ModelTokenizer) -> None:
    small = intake(model_tokenizer, max_prompt_logprobs=60)
    body = {"prompt": [5] * 10, "echo": True, "logprobs": 2}
    small.completion(json.dumps({**body, "n": 2}).encode())
    with pytest.raises(RequestError, match="asks for 90 log-probabilities; the limit is 60") as refused:
        small.completion(json.dumps({**body, "n": 3}).encode())
    assert refused.value.param == "logprobs"


@pytest.mark.parametrize(
    ("configured", "context", "want"),
    [(0, 2048, 2**20 + 2**16), (0, 10**9, 64 * 2**20), (5000, 10**9, 5000)],
)
def test_the_limit_of_bodies_follows_the_context(configured: int, context: int, want: int) -> None:
    assert body_limit(RouterConfig(max_body_bytes=configured), demo_spec(context=context)) == want


@pytest.mark.slow
def test_no_reader_stays_when_the_router_closes() -> None:
    async def run() -> int:
        readers = TokenizerPool(module_setup(demo_spec(), RouterConfig()), 1, 60.0)
        await readers.submit(FrameKind.TOKENIZE, b'{"prompt": "a"}')
        (pid,) = readers.pids
        assert Path(f"/proc/{pid}").exists()
        await readers.close()
        return pid

    pid = asyncio.run(run())
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.asyncio
async def test_a_body_that_comes_while_the_pool_closes_starts_no_reader_again() -> None:
    pool = TokenizerPool(b"", 1, 1.0, start=_never_started)
    closing = asyncio.create_task(pool.close())
    await closing
    with pytest.raises(ReaderFailed, match="shutting down"):
        await pool.submit(FrameKind.COMPLETION, b"{}")
    assert not pool._tasks
    assert pool.started == 0


def _never_started(descriptor: int) -> Any:
    raise AssertionError("a reader was started")
