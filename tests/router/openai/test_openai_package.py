"""The `openai` package against a real router, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.router.fake_worker import expected
from tests.router.http_server import Server
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.sampling_params import SamplingParams

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(server: Server, prompt: list[int], count: int) -> str:
    return server.service.model_tokenizer.decode(expected(prompt, SamplingParams(count, seed=1)))


def hello(server: Server) -> list[int]:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    return list(server.service.model_tokenizer.encode(text, add_special=False))


def test_completions_whole_and_streamed(server: Server, client: OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=[5, 6], max_tokens=8, seed=1, logprobs=2)
    assert whole.choices[0].text == answer(server, [5, 6], 8)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 8
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    stream = client.completions.create(
        model="demo", prompt=[5, 6], max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_chat_whole_and_streamed(server: Server, client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_completion_tokens=8,
        seed=1,
        logprobs=True,
        top_logprobs=1,
    )
    assert whole.choices[0].message.content == answer(server, hello(server), 8)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 8
    chunks = list(client.chat.completions.create(model="demo", messages=HELLO, max_tokens=8, seed=1, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_extensions_go_through_extra_body(server: Server, client: OpenAI) -> None:
    whole = client.completions.create(
        model="demo", prompt="hello", max_tokens=4, seed=1, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    prompt = list(server.service.model_tokenizer.encode("hello", add_special=True))
    extra = whole.choices[0].model_extra or {}
    assert extra["token_ids"] == expected(prompt, SamplingParams(4, seed=1))


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "twinpool"


def test_errors_have_the_packages_own_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="demo", prompt="x", n=0)
    assert wrong.value.param == "n"


def test_an_error_in_mid_stream_raises(server: Server, client: OpenAI) -> None:
    server.pause("decode")
    stream = client.completions.create(model="demo", prompt=[5, 6], max_tokens=8, stream=True)
    assert next(stream).choices
    worker = server.call(lambda: next(w for w in server.cluster.workers.values() if w.legs))
    leg = next(iter(worker.legs.values()))
    done = Done(leg.submit.request_id, 0, "error", error=ErrorKind.INVALID, message="planted")
    server.call(lambda: leg.session.on_events([done]))
    with pytest.raises(openai.APIError, match="planted"):
        list(stream)
    server.call(worker.legs.clear)
