"""Every sampling option of a request reaches the worker with its value: real HTTP in, real gRPC out, a fake worker that
keeps what it was sent. Asked of chat and of completions, each option with a value that is not its default."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from msgspec import structs

from tests.router.fake_worker import FakeCluster
from tests.router.grpc_fakes import grpc_cluster
from tests.router.http_server import Server, demo_spec, serving
from tests.wire.instances import fields_of
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.openai.request_fields import CHAT, COMPLETION, STRUCTURED_OUTPUT

SENT: dict[str, tuple[Any, Any]] = {
    "max_tokens": (7, 7),
    "temperature": (0.625, 0.625),
    "top_p": (0.375, 0.375),
    "top_k": (11, 11),
    "min_p": (0.0625, 0.0625),
    "repetition_penalty": (1.125, 1.125),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (-0.75, -0.75),
    "logit_bias": ({"17": 2.5, "13": -1.5}, ((13, -1.5), (17, 2.5))),
    "allowed_token_ids": ([19, 13, 17, 13], (13, 17, 19)),
    "seed": (-5, 2**64 - 5),
    "min_tokens": (3, 3),
    "stop_token_ids": ([901, 902], (901, 902)),
}
"""By option: what a client sends, and what `SamplingParams` has then; its other fields have tests of their own."""
OTHERS = {"choice", "logprobs", "prompt_logprobs", "grammar", "adapter", "pooling", "routed_experts"}
GRAMMARS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "é"}}},
    "structured_outputs": {"choice": ['"é"']},
    "guided_json": {"enum": ["é"]},
    "guided_json_object": True,
    "guided_regex": '"é"',
    "guided_choice": ['"é"'],
    "guided_grammar": 'start: "\\"é\\""',
    "json_schema": json.dumps({"const": "é"}),
    "regex": '"é"',
    "ebnf": 'root ::= "\\"é\\""',
}
"""Fields that ask for a grammar: all but one for the same one word."""
GRAMMARS_FORM = {"guided_whitespace_pattern"}
"""Fields that change the grammars that others ask for (tests/router/openai/test_structured_output.py)."""
SUBMITTED: dict[str, tuple[str, Any]] = {"cache_salt": ("salt", "a tenant's"), "priority": ("priority", -3)}
"""Options that are no sampling and reach the worker, too: the field of `Submit`, and a value."""
ROUTERS_OWN = {
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "n", "stream", "return_token_ids",
    "add_special_tokens", "user", "echo", "best_of", "logprobs", "top_logprobs", "add_generation_prompt",
    "max_completion_tokens", "timeout", "separate_reasoning", "continue_final_message", "truncate_prompt_tokens",
    "return_tokens_as_token_ids", "prompt_logprobs", "return_routed_experts",
}  # fmt: skip
"""Options that act in the router, or are worked into another one."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
both = pytest.mark.parametrize("path", BODIES)


@contextmanager
def served(cluster: FakeCluster) -> Iterator[Server]:
    """A router in front of workers that it reaches over gRPC, as in a real cluster."""
    loop = asyncio.new_event_loop()
    grpc = grpc_cluster(cluster)
    target = loop.run_until_complete(grpc.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with serving(cluster, directory=ControllerDirectory(target)) as server:
            yield server
    finally:
        asyncio.run_coroutine_threadsafe(grpc.__aexit__(None, None, None), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with served(FakeCluster()) as server:
        yield server


def submits(server: Server, path: str, **options: Any) -> tuple[list[Submit], list[Submit]]:
    """What prefill and decode were sent for one request."""
    for worker in server.cluster.workers.values():
        worker.submits.clear()
    response = server.post(path, {**BODIES[path], "ignore_eos": True, "seed": 1, "max_tokens": 4, **options})
    assert response.status_code == 200, response.text
    prefill, decode = server.cluster["prefill-0"].submits, server.cluster["decode-0"].submits
    return list(prefill), list(decode)


def test_every_option_is_tried() -> None:
    """A new field of `SamplingParams`, or of a request's body, needs a line above."""
    assert set(fields_of(SamplingParams)) == set(SENT) | OTHERS
    assert set(GRAMMARS) | GRAMMARS_FORM == set(STRUCTURED_OUTPUT)
    plain = {name for name, field in (*CHAT.items(), *COMPLETION.items()) if field.kind}
    assert plain <= set(SENT) | set(SUBMITTED) | ROUTERS_OWN
    defaults = SamplingParams(4, seed=1)
    for name, (_, value) in SENT.items():
        assert value != getattr(defaults, name), f"{name}: lost, it would look the same"


@both
@pytest.mark.parametrize("name", SENT)
def test_a_sampling_option_reaches_both_workers_and_changes_no_other(running: Server, path: str, name: str) -> None:
    asked, value = SENT[name]
    for leg in submits(running, path, **{name: asked}):
        (submit,) = leg
        assert getattr(submit.sampling, name) == value
        others = structs.replace(submit.sampling, **{name: getattr(SamplingParams(4, seed=1), name)})
        defaults = demo_spec().generation_defaults
        known: dict[str, Any] = {k: v for k, v in defaults.items() if k != name and hasattr(others, k)}
        assert others == structs.replace(SamplingParams(4, seed=1), **known)


@both
@pytest.mark.parametrize("field", GRAMMARS)
def test_a_grammar_reaches_both_workers(running: Server, path: str, field: str) -> None:
    text = "{}" if field == "guided_json_object" else '"é"'
    for leg in submits(running, path, **{field: GRAMMARS[field], "ignore_eos": True, "stop_token_ids": [901]}):
        (submit,) = leg
        matcher = LLMatcher(LLTokenizer("byte"), submit.sampling.grammar)
        assert matcher.consume_tokens(list(text.encode()))
        assert matcher.is_stopped() or (field == "guided_json_object" and matcher.is_accepting())
        assert submit.sampling.stop_token_ids == (901, *demo_spec().eos_token_ids), "a grammar's end ends the answer"


@both
def test_all_options_at_once_reach_both_workers(running: Server, path: str) -> None:
    want = SamplingParams(**{name: value for name, (_, value) in SENT.items()})
    legs = submits(running, path, **{name: asked for name, (asked, _) in SENT.items()})
    assert [[submit.sampling for submit in leg] for leg in legs] == [[want], [want]]


@both
@pytest.mark.parametrize("name", SUBMITTED)
def test_an_option_of_the_request_reaches_both_workers(running: Server, path: str, name: str) -> None:
    field, value = SUBMITTED[name]
    legs = submits(running, path, **{name: value})
    assert [[getattr(submit, field) for submit in leg] for leg in legs] == [[value], [value]]


@both
def test_answers_of_one_request_are_different_choices_of_one_seed(running: Server, path: str) -> None:
    for leg in submits(running, path, n=4, seed=9):
        assert sorted(submit.sampling.choice for submit in leg) == [0, 1, 2, 3]
        assert {submit.sampling.seed for submit in leg} == {9}
        assert len({submit.request_id for submit in leg}) == len({submit.room for submit in leg}) == 4


def test_choices_of_several_prompts_are_counted_for_each_prompt(running: Server) -> None:
    for leg in submits(running, "/v1/completions", prompt=[[5, 6], [7, 8]], n=2):
        assert sorted((submit.tokens, submit.sampling.choice) for submit in leg) == [
            ((5, 6), 0), ((5, 6), 1), ((7, 8), 0), ((7, 8), 1),
        ]  # fmt: skip


def test_log_probabilities_are_asked_of_the_workers_as_each_endpoint_has_them(running: Server) -> None:
    chat, completions = "/v1/chat/completions", "/v1/completions"
    for path, options, want in (
        (completions, {}, (None, None)),
        (completions, {"logprobs": 0}, (0, None)),
        (completions, {"logprobs": 3}, (3, None)),
        (completions, {"logprobs": 3, "echo": True}, (3, 3)),
        (completions, {"prompt_logprobs": 2}, (None, 2)),
        (completions, {"return_routed_experts": True}, (0, 0)),
        (completions, {"return_routed_experts": True, "logprobs": 2, "prompt_logprobs": 1}, (2, 1)),
        (completions, {"logprobs": 3, "echo": True, "prompt_logprobs": 2}, (3, 3)),
        (completions, {"logprobs": 1, "echo": True, "prompt_logprobs": 2}, (1, 2)),
        (chat, {"prompt_logprobs": 0}, (None, 0)),
        (chat, {}, (None, None)),
        (chat, {"logprobs": True}, (0, None)),
        (chat, {"logprobs": True, "top_logprobs": 5}, (5, None)),
    ):
        for leg in submits(running, path, **options):
            (submit,) = leg
            assert (submit.sampling.logprobs, submit.sampling.prompt_logprobs) == want, (path, options)
            assert submit.sampling.routed_experts == ("return_routed_experts" in options)


def test_the_models_end_tokens_reach_the_workers_unless_they_are_ignored(running: Server) -> None:
    ends = demo_spec().eos_token_ids
    assert ends
    for leg in submits(running, "/v1/completions", ignore_eos=False, stop_token_ids=[901]):
        assert [submit.sampling.stop_token_ids for submit in leg] == [(901, *ends)]
    for leg in submits(running, "/v1/completions", ignore_eos=True):
        assert [submit.sampling.stop_token_ids for submit in leg] == [()]


def test_the_newer_name_of_the_limit_reaches_the_workers(running: Server) -> None:
    for leg in submits(running, "/v1/chat/completions", max_completion_tokens=6):
        assert [submit.sampling.max_tokens for submit in leg] == [6]
