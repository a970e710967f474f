"""Chat, models, tokenise and detokenise: what is asked of the checkpoint's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, demo_spec, serving
from twinpool.contracts.checkpoint.tokenizer_files import TokenizerFiles
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import CheckpointError, ConfigError, RequestError
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.openai.parse_request import read_chat
from twinpool.router.text.chat_template import ChatTemplate, read_chat_template
from twinpool.router.text.tokenizer import read_model_tokenizer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def chat(server: Server, **body: Any) -> dict[str, Any]:
    response = server.post(CHAT, {"messages": HELLO, "seed": 1, "max_tokens": 6, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def prompt_of(server: Server, text: str = HELLO_TEXT) -> list[int]:
    return list(server.service.model_tokenizer.encode(text, add_special=False))


def test_a_chat_is_rendered_by_the_checkpoints_template(server: Server) -> None:
    body = chat(server, return_token_ids=True)
    (choice,) = body["choices"]
    want = expected(prompt_of(server), SamplingParams(6, seed=1))
    assert body["object"] == "chat.completion"
    assert body["prompt_token_ids"] == prompt_of(server)
    assert choice["token_ids"] == want
    assert choice["message"] == {"role": "assistant", "content": server.service.model_tokenizer.decode(want)}


def test_a_chat_stream_opens_with_the_role_and_says_the_same(server: Server) -> None:
    whole = chat(server, return_token_ids=True)
    *chunks, done = server.stream(CHAT, {"messages": HELLO, "seed": 1, "max_tokens": 6, "return_token_ids": True})
    assert done == "[DONE]"
    assert all(isinstance(c, dict) and c["object"] == "chat.completion.chunk" for c in chunks)
    choices = [c["choices"][0] for c in chunks if isinstance(c, dict)]
    assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(c["delta"]["content"] for c in choices) == whole["choices"][0]["message"]["content"]
    assert [t for c in choices for t in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert isinstance(chunks[0], dict)
    assert chunks[0]["prompt_token_ids"] == prompt_of(server)
    assert choices[-1]["finish_reason"] == "length"


def test_content_parts_and_other_roles_are_rendered(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert chat(server, messages=messages, return_token_ids=True)["prompt_token_ids"] == prompt_of(server, text)


def test_the_newer_name_of_the_limit_counts(server: Server) -> None:
    assert chat(server, max_tokens=9, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_chat_log_probabilities_have_the_bytes_and_the_best(server: Server) -> None:
    entries = chat(server, logprobs=True, top_logprobs=2, max_tokens=3)["choices"][0]["logprobs"]["content"]
    tokens = expected(prompt_of(server), SamplingParams(3, seed=1))
    assert [e["logprob"] for e in entries] == [-t / 1000 for t in tokens]
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    assert b"".join(bytes(e["bytes"]) for e in entries) == b"".join(
        map(server.service.model_tokenizer.token_bytes, tokens)
    )
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(server)["choices"][0]["logprobs"] is None


def test_the_models_end_tokens_stop_unless_ignored(server: Server) -> None:
    end = demo_spec().eos_token_ids[0]
    chat(server)
    stops = [s.sampling.stop_token_ids for n in server.cluster.workers.values() for s in n.submits]
    assert all(end in s for s in stops)
    for worker in server.cluster.workers.values():
        worker.submits.clear()
    chat(server, ignore_eos=True, stop_token_ids=[77])
    assert {s.sampling.stop_token_ids for n in server.cluster.workers.values() for s in n.submits} == {(77,)}
    asked = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "guided_regex": "a+"}
    assert end in read_chat(asked, demo_spec()).sampling.stop_token_ids, "a grammar must have an end"


def test_every_sampling_field_reaches_the_workers(server: Server) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": -0.3, "min_tokens": 2, "seed": -1,
    }  # fmt: skip
    chat(server, **asked, logit_bias={"9": -5, "5": 2}, cache_salt="pepper")
    submits = [s for n in server.cluster.workers.values() for s in n.submits]
    assert len(submits) == 2
    for submit in submits:
        sampling = submit.sampling
        assert {k: getattr(sampling, k) for k in asked if k != "seed"} == {
            k: v for k, v in asked.items() if k != "seed"
        }
        assert sampling.seed == 2**64 - 1
        assert sampling.logit_bias == ((5, 2.0), (9, -5.0))
        assert submit.salt == "pepper"


@pytest.mark.slow
def test_generation_defaults_of_the_checkpoint_count_where_nothing_is_asked() -> None:
    spec = demo_spec(generation_defaults={"temperature": 0.6, "top_k": 20.0})
    with serving(FakeCluster(), spec=spec) as server:
        server.complete(max_tokens=1)
        server.complete(max_tokens=1, temperature=0, top_k=-1)
        first, second = (s.sampling for s in server.cluster["prefill-0"].submits)
        assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
        assert (second.temperature, second.top_k) == (0.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "told"),
    [("none", (1.0, 0, 1.0)), ("temperature=0, top_p=0.5", (0.0, 20, 0.5)), ("top_k=3", (0.6, 3, 1.0))],
)
def test_the_setting_counts_before_the_checkpoint_and_v1_models_says_so(
    setting: str, told: tuple[float, int, float]
) -> None:
    spec = demo_spec(generation_defaults={"temperature": 0.6, "top_k": 20.0})
    with serving(
        FakeCluster(), spec=spec, config=config_from_dict({"router": {"sampling_defaults": setting}})
    ) as server:
        for text in ("word", "word " * 600):  # On the loop, and by a reader.
            server.complete(max_tokens=1, prompt=text)
            sampling = server.cluster["prefill-0"].submits[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == told
        (model,) = server.client.get("/v1/models").json()["data"]
        assert tuple(model["sampling_defaults"][name] for name in ("temperature", "top_k", "top_p")) == told


@pytest.mark.parametrize("setting", ["", "greedy", "temperature", "temperature=hot", "top_p=2", "top_k=nan", "seed=1"])
def test_defaults_that_cant_be_are_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.sampling_defaults"):
        config_from_dict({"router": {"sampling_defaults": setting}})


def test_the_model_is_listed(server: Server) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 2048)
    assert model["sampling_defaults"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert model["tools"] == {"format": "hermes", "prompt": "template"}
    assert server.client.get("/v1/models/demo").json() == model


def test_tokenise_and_detokenise_are_each_others_inverse(server: Server) -> None:
    text = "Grüße, 你好!"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"messages": HELLO}).json()["tokens"] == prompt_of(server)
    closed = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert closed == prompt_of(server, HELLO_TEXT.removesuffix("<|im_start|>assistant\n"))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
    ],
)
def test_tokenise_and_detokenise_refuse_clearly(server: Server, path: str, body: Any, param: str) -> None:
    assert server.refused(path, body)["param"] == param


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer_serves_token_prompts_only(tmp_path: Path) -> None:
    with serving(FakeCluster(), spec=demo_spec(path=tmp_path)) as server:
        body = server.complete(max_tokens=3, return_token_ids=True)
        assert len(body["choices"][0]["token_ids"]) == 3
        assert body["choices"][0]["text"] == ""
        assert "no tokenizer.json" in server.refused("/v1/completions", {"prompt": "x"})["message"]
        advice = server.refused(CHAT, {"messages": HELLO})["message"]
        assert "no tokenizer.json, so there are no chats" in advice
        assert 'send /v1/completions a "prompt" of token ids' in advice, "what works, as above"
        assert "no tokenizer.json" in server.refused("/tokenize", {"prompt": "x"})["message"]
        assert "no tokenizer.json" in server.refused("/detokenize", {"tokens": [5]})["message"]
        assert "tokenizer" in server.refused("/v1/completions", {"prompt": [5], "stop": "x"})["message"]


@pytest.mark.slow
def test_a_checkpoint_without_a_chat_template_refuses_chat(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_spec().path / "tokenizer.json").read_bytes())
    with serving(FakeCluster(), spec=demo_spec(path=tmp_path)) as server:
        assert "no chat template" in server.refused(CHAT, {"messages": HELLO})["message"]
        assert server.complete(prompt="hello", max_tokens=2)["usage"]["completion_tokens"] == 2


# ---------------------------------------------------------------- templates


def render(source: str, **extra: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, 1000).render(HELLO, True, extra)


def test_templates_have_what_published_ones_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>hello</s>"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if enable_thinking %}y{% endif %}", enable_thinking=True) == "y"
    assert render("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}.") == "."


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
        ("{{ messages[5].content.x }}", "no element"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", "more than 1000 characters"),
        ("{{ 'x' * 100000 }}", "more than 1000 characters"),
        ("{% for i in range(10**9) %}x{% endfor %}", "range"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_clear_refusal(source: str, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        render(source)
    assert says.lower() in str(raised.value).lower()


def test_templates_are_found_in_each_of_their_places(tmp_path: Path) -> None:
    def text(config: dict[str, Any]) -> str | None:
        template = read_chat_template(tmp_path, TokenizerFiles(None, {}, config), 100)
        return template.render(HELLO, True, {}) if template else None

    assert text({}) is None
    assert text({"chat_template": "A"}) == "A"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert text({"chat_template": named}) == "D"
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}")
    assert text({"chat_template": "A", "bos_token": {"content": "<s>"}}) == "J<s>"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        read_model_tokenizer(tmp_path, 100)
    (tmp_path / name).write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(CheckpointError):
        read_model_tokenizer(tmp_path, 100)


OPEN = [*HELLO, {"role": "assistant", "content": "I say"}]
OPEN_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI say"


def test_an_answer_goes_on_with_the_last_message(server: Server) -> None:
    wanted = prompt_of(server, OPEN_TEXT)
    body = chat(server, messages=OPEN, continue_final_message=True, return_token_ids=True)
    assert body["prompt_token_ids"] == wanted
    assert body["choices"][0]["token_ids"] == expected(wanted, SamplingParams(6, seed=1))
    tokens = server.post("/tokenize", {"messages": OPEN, "continue_final_message": True}).json()["tokens"]
    assert tokens == wanted
    both = {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": True}
    assert server.refused(CHAT, both)["param"] == "continue_final_message"
    assert server.refused(CHAT, {"messages": [], "continue_final_message": True})["param"] == "messages"
    closed = chat(server, messages=OPEN, add_generation_prompt=False, return_token_ids=True)
    assert closed["prompt_token_ids"] == prompt_of(server, OPEN_TEXT + "<|im_end|>\n")


def test_an_assistants_last_message_is_continued_by_messages_too(server: Server) -> None:
    asked = {"messages": OPEN, "max_tokens": 6}
    wanted = len(prompt_of(server, OPEN_TEXT))
    assert server.post("/v1/messages", asked).json()["usage"]["input_tokens"] == wanted
    assert server.post("/v1/messages/count_tokens", {"messages": OPEN}).json() == {"input_tokens": wanted}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_prompts_are_cut_to_their_last_tokens_where_asked_for(server: Server, path: str) -> None:
    context, text = server.service.spec.context, "hello and more " * 3000
    body: dict[str, Any] = {"seed": 1, "max_tokens": 6, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    whole = prompt_of(server, HELLO_TEXT.replace("hello", text) if path == CHAT else text)
    assert len(whole) > context
    for most, kept in ((5, 5), (context - 6, context - 6), (-1, context - 6)):
        answer = server.post(path, {**body, "truncate_prompt_tokens": most}).json()
        ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        assert ids == whole[-kept:]
        assert answer["choices"][0]["token_ids"] == expected(whole[-kept:], SamplingParams(6, seed=1))
        assert answer["usage"]["prompt_tokens"] == kept
    assert server.refused(path, {**body, "truncate_prompt_tokens": 0})["param"] == "truncate_prompt_tokens"
    assert server.refused(path, {**body, "truncate_prompt_tokens": -2})["param"] == "truncate_prompt_tokens"
    assert "tokens" in server.refused(path, body)["message"]


def test_a_prompt_that_was_cut_is_echoed_as_it_was_used(server: Server) -> None:
    body = server.complete(prompt="one two three four", echo=True, max_tokens=1, truncate_prompt_tokens=2)
    kept = prompt_of(server, "one two three four")[-2:]
    assert body["choices"][0]["text"].startswith(server.service.model_tokenizer.decode(kept))
