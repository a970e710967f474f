"""Every field that OpenAI, vLLM and SGLang know is done, without effect here, or refused by name; on every endpoint."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.router.anthropic.messages_request import IGNORED as ANTHROPIC_IGNORED
from twinpool.router.anthropic.messages_request import OUTPUT
from twinpool.router.anthropic.messages_request import REFUSED as ANTHROPIC_REFUSED
from twinpool.router.openai.request_fields import CHAT, COMPLETION, IGNORED, REFUSED, STREAM_OPTIONS, TOKENIZE
from twinpool.router.openai_responses.responses_request import FIELDS, NAMES, NESTED
from twinpool.router.openai_responses.responses_request import REFUSED as RESPONSES_REFUSED

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ANTHROPIC_SUPPORTED = (
    "model", "max_tokens", "messages", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences", "tools",
    "tool_choice", "thinking", "output_config",
)  # fmt: skip
"""Fields of messages that are read: each changes the chat that is made of them."""
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6], "max_tokens": 2},
    CHATS: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}

# Fields that OpenAI, vLLM and SGLang are known to take, listed by hand: one that is missing here is ignored as unknown.
VOCABULARY = """
model messages prompt max_tokens max_completion_tokens n stream stream_options temperature top_p stop presence_penalty
frequency_penalty logit_bias logprobs top_logprobs user seed echo best_of suffix response_format tools tool_choice
parallel_tool_calls functions function_call store metadata service_tier reasoning_effort verbosity prediction audio
modalities web_search_options safety_identifier prompt_cache_key prompt_cache_retention top_k min_p repetition_penalty
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words add_special_tokens
guided_json guided_regex guided_choice guided_grammar structural_tag guided_decoding_backend guided_whitespace_pattern
structured_outputs use_beam_search early_stopping logits_processors priority request_id return_tokens_as_token_ids
return_token_ids cache_salt kv_transfer_params vllm_xargs chat_template chat_template_kwargs add_generation_prompt
continue_final_message documents include_reasoning mm_processor_kwargs media_io_kwargs prompt_embeds
data_parallel_rank thinking_token_budget detokenize repetition_detection regex ebnf json_schema stop_regex
no_stop_trim lora_path session_params input_ids input_embeds separate_reasoning stream_reasoning return_hidden_states
return_routed_experts return_cached_tokens_details return_meta_info custom_logit_processor custom_params
bootstrap_host bootstrap_port bootstrap_room rid extra_key no_logs log_metrics sampling_params text image_data
audio_data video_data logprob_start_len top_logprobs_num token_ids_logprob return_logprob return_text_in_logprobs
require_reasoning routed_dp_rank use_audio_in_video
"""


def test_no_field_of_the_vocabulary_is_unknown() -> None:
    known = {*COMPLETION, *CHAT, *TOKENIZE, *IGNORED, *REFUSED}
    assert [name for name in VOCABULARY.split() if name not in known] == []
    assert not IGNORED.keys() & REFUSED.keys()
    assert not IGNORED.keys() & (COMPLETION.keys() | CHAT.keys())
    assert not REFUSED.keys() & COMPLETION.keys()
    assert REFUSED.keys() & CHAT.keys() == {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}


ASKED: list[tuple[str, Any]] = [
    ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}),
    ("stop_regex", "a"), ("lora_path", "x"),
    ("best_of", 2),
    ("truncation_side", "right"), ("use_beam_search", True), ("bad_words", ["x"]),
    ("detokenize", False), ("include_reasoning", False), ("no_stop_trim", True),
    ("modalities", ["text", "audio"]), ("documents", [{"a": 1}]),
    ("kv_transfer_params", {"a": 1}), ("extra_key", "x"), ("mirostat_mode", 2), ("sampling_params", {"n": 2}),
    ("chat_template", "{{ 1 }}"), ("input_ids", [5]), ("moderation", {"x": 1}),
    ("return_hidden_states", True), ("num_beams", 4), ("do_sample", False), ("typical_p", 0.9), ("mirostat", 1),
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("name", "value"), ASKED, ids=lambda v: str(v)[:30])
def test_what_would_change_the_answer_is_refused_by_name(server: Server, path: str, name: str, value: Any) -> None:
    error = server.refused(path, {**BODIES[path], name: value})
    assert error["param"] == name
    assert name in error["message"]


NEUTRAL: list[tuple[str, Any]] = [
    ("response_format", {"type": "text"}), ("tools", []), ("best_of", 1), ("use_beam_search", False), ("bad_words", []),
    ("detokenize", True), ("modalities", ["text"]), ("suffix", ""), ("metadata", {"a": "b"}), ("store", True),
    ("service_tier", "auto"), ("parallel_tool_calls", True), ("length_penalty", 2.0), ("user", "x"), ("rid", "y"),
    ("num_beams", 1), ("do_sample", True), ("typical_p", 1.0), ("typical_p", 1), ("tfs", 1.0), ("mirostat", 0),
    ("xtc_probability", 0.0), ("dry_multiplier", 0), ("no_repeat_ngram_size", 0), ("top_a", 0.0),
    ("include_reasoning", True), ("truncation_side", "left"), ("echo", False), ("regex", None),
    ("stream_options", None), ("spaces_between_special_tokens", True),
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=lambda v: str(v)[:30])
def test_what_asks_for_nothing_is_taken(server: Server, path: str, name: str, value: Any) -> None:
    response = server.post(path, {**BODIES[path], name: value})
    assert response.status_code == 200, response.text


ALL_PATHS: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
}
HEADER = "x-twinpool-ignored"


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "by a reader"])
def test_what_nobody_knows_and_what_changes_nothing_is_ignored_and_told(server: Server, large: bool) -> None:
    more = {"frobnicate": {"deep": [1]}, "service_tier": "auto", "large": "x" * 4000 * large, "nothing": None}
    before = counts(server)
    for path, body in ALL_PATHS.items():
        answer = server.post(path, {**body, **more})
        assert answer.status_code == 200, answer.text
        told = set(answer.headers[HEADER].split(", "))
        assert told == {"frobnicate", "service_tier", *(["large"] if large else [])}, path
        assert HEADER not in server.post(path, body).headers
    found = {name: count - before.get(name, 0) for name, count in counts(server).items()}
    each = len(ALL_PATHS)
    assert {n: c for n, c in found.items() if c} == {"service_tier": each, "unknown": each * (1 + large)}


def counts(server: Server) -> dict[str, float]:
    """The metric of ignored fields, by name."""
    lines = re.findall(
        r'^twinpool_ignored_fields_total\{field="(.*)"\} (.*)$', server.client.get("/metrics").text, re.M
    )
    return {name: float(value) for name, value in lines}


def test_streams_tell_what_is_ignored_before_their_first_event(server: Server) -> None:
    for path, body in list(ALL_PATHS.items())[:4]:
        with server.client.stream("POST", path, json={**body, "stream": True, "store": True}) as answer:
            assert answer.headers[HEADER] == "store"
            assert not any('"error":{' in line for line in answer.iter_lines())


def test_fields_within_fields_are_ignored_by_their_whole_name(server: Server) -> None:
    nested = {
        CHATS: ("stream_options", {"include_usage": True, "new": 1}),
        COMPLETIONS: ("stream_options", {"new": 1}),
        "/v1/responses": ("text", {"format": {"type": "text"}, "new": 1}),
        "/v1/messages": ("output_config", {"new": 1}),
    }
    for path, (name, value) in nested.items():
        with server.client.stream("POST", path, json={**ALL_PATHS[path], "stream": True, name: value}) as answer:
            assert (answer.status_code, answer.headers[HEADER]) == (200, f"{name}.new")


def test_a_name_of_a_clients_can_neither_end_the_header_nor_fill_it(server: Server) -> None:
    names = ["a\r\nset-cookie: x", "é" * 100, ", ; =", *(f"n{number}" for number in range(200))]
    answer = server.post(COMPLETIONS, {**BODIES[COMPLETIONS], **dict.fromkeys(names, 1)})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    told = answer.headers[HEADER].split(", ")
    assert told[:3] == ["a??set-cookie??x", "?" * 64, "?????"]
    assert len(told) == 16


def test_a_slip_of_the_pen_is_named_with_what_was_meant(server: Server) -> None:
    for path, name, meant in (
        (COMPLETIONS, "temprature", "temperature"),
        ("/tokenize", "add_special_token", "add_special_tokens"),
    ):
        answer = server.post(path, {**ALL_PATHS[path], name: 0})
        assert answer.headers[HEADER] == f"{name};meant={meant}"


def test_what_another_endpoint_would_do_is_refused(server: Server) -> None:
    for path in ("/tokenize", "/detokenize"):
        error = server.refused(path, {**ALL_PATHS[path], "truncate_prompt_tokens": 5})
        assert error["param"] == "truncate_prompt_tokens"


RESPONSES = {*FIELDS, "temperature", "top_p"} - {"store", "background"}  # Of these only false is taken.
PACKAGES: list[tuple[str, set[str], set[str], set[str]]] = [
    # A type of a package's, what of it is done, ignored and refused. (To import both packages takes seconds.)
    ("openai.types.chat.completion_create_params.CompletionCreateParamsBase", {*CHAT}, {*IGNORED}, {*REFUSED}),
    (
        "openai.types.completion_create_params.CompletionCreateParamsBase",
        {*COMPLETION},
        {*IGNORED},
        {*REFUSED},
    ),
    ("openai.types.chat.ChatCompletionStreamOptionsParam", {*STREAM_OPTIONS}, set(), set()),
    (
        "openai.types.responses.response_create_params.ResponseCreateParamsBase",
        RESPONSES,
        {*IGNORED},
        {*RESPONSES_REFUSED},
    ),
    (
        "openai.types.responses.input_token_count_params.InputTokenCountParams",
        RESPONSES,
        {*IGNORED},
        {*RESPONSES_REFUSED},
    ),
    ("openai.types.shared_params.Reasoning", {*NESTED["reasoning"]}, set(), set()),
    ("openai.types.responses.ResponseTextConfigParam", {*NESTED["text"]}, set(), set()),
    ("openai.types.responses.response_create_params.StreamOptions", {*NESTED["stream_options"]}, set(), set()),
    (
        "anthropic.types.message_create_params.MessageCreateParamsBase",
        {*ANTHROPIC_SUPPORTED},
        {*ANTHROPIC_IGNORED},
        {*ANTHROPIC_REFUSED},
    ),
    (
        "anthropic.types.beta.message_create_params.MessageCreateParamsBase",
        {*ANTHROPIC_SUPPORTED},
        {*ANTHROPIC_IGNORED},
        {*ANTHROPIC_REFUSED},
    ),
    ("anthropic.types.MessageCountTokensParams", {*ANTHROPIC_SUPPORTED}, {*ANTHROPIC_IGNORED}, {*ANTHROPIC_REFUSED}),
    ("anthropic.types.beta.BetaOutputConfigParam", {*OUTPUT}, set(), set()),
]


@pytest.mark.parametrize(
    ("params", "done", "ignored", "refused"), PACKAGES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_field_of_the_packages_types_is_done_ignored_or_refused(
    params: str, done: set[str], ignored: set[str], refused: set[str]
) -> None:
    module, _, name = params.rpartition(".")
    fields = {*getattr(importlib.import_module(module), name).__annotations__}
    assert fields - done - ignored - refused == set(), "new in the package: decide what it is here"
    assert not (done - {*NAMES, "metadata"}) & ignored & fields
    assert not ignored & refused
    assert not (done & refused & fields) - {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("reasoning_effort", "low"),
    ],
)
def test_what_belongs_to_chats_is_refused_elsewhere(server: Server, name: str, value: Any) -> None:
    assert server.refused(COMPLETIONS, {**BODIES[COMPLETIONS], name: value})["param"] == name


def test_whole_numbers_may_be_written_as_floats(server: Server) -> None:
    plain = server.complete(max_tokens=4, top_k=10, min_tokens=1, n=2, logprobs=1, stop_token_ids=[9])
    server.cluster["prefill-0"].submits.clear()
    floats = server.complete(
        prompt=[5.0, 6.0, 7.0], max_tokens=4.0, top_k=10.0, min_tokens=1.0, n=2.0, logprobs=1.0, stop_token_ids=[9.0],
        seed=1.0, priority=3.0,
    )  # fmt: skip
    assert floats["choices"] == plain["choices"]
    sent = [s for worker in server.cluster.workers.values() for s in worker.submits if s.priority == 3]
    assert sent
    for submit in sent:
        values = [*submit.tokens, submit.sampling.top_k, submit.sampling.max_tokens, submit.sampling.seed]
        assert all(type(value) is int for value in values)


def test_top_p_0_keeps_the_best_token_alone(server: Server) -> None:
    server.complete(max_tokens=2, top_p=0, top_k=50, priority=5)
    sent = [s for worker in server.cluster.workers.values() for s in worker.submits if s.priority == 5]
    assert {(s.sampling.top_p, s.sampling.top_k) for s in sent} == {(1.0, 1)}


def test_a_model_has_every_name_that_it_is_served_under() -> None:
    config = config_from_dict({"router": {"served_model_name": "first, org/second"}})
    with serving(FakeCluster(1, 1), config=config) as server:
        assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == ["first", "org/second"]
        assert server.client.get("/v1/models/org/second").json()["id"] == "org/second"
        for name in ("first", "org/second"):
            assert server.complete(model=name, max_tokens=1)["model"] == "first"
            large = server.complete(model=name, max_tokens=1, prompt="word " * 600)  # by a reader
            assert large["model"] == "first"
        message = server.refused(COMPLETIONS, {**BODIES[COMPLETIONS], "model": "demo"}, 404)["message"]
        assert "this server has 'first' and 'org/second'" in message


def test_version_ping_and_load_are_answered(server: Server) -> None:
    assert set(server.client.get("/version").json()) == {"version"}
    assert server.client.get("/load").json() == {"server_load": 0}
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 200
    server.cluster["prefill-0"].state = server.cluster["prefill-1"].state = "draining"
    server.call(server.cluster.changed)
    assert server.client.get("/ping").status_code == 503
