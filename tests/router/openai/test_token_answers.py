"""Token ids in, token ids out (`/inference/v1/generate`), log-probabilities of prompts: over real HTTP, from fakes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, router_config, serving
from twinpool.contracts.compact_json import joined
from twinpool.contracts.sampling_params import ChosenExperts, SamplingParams, TokenLogprob
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.openai.token_answers import PIECE_BYTES, ExpertsFile

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7]


def answer(max_tokens: int = 8, **params: Any) -> list[int]:
    return expected(PROMPT, SamplingParams(max_tokens, **{"seed": 1, **params}))


def generate(server: Server, *, top: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 1, "max_tokens": 8, **params}, **(top or {})}
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_tokens_go_in_and_tokens_come_out(server: Server) -> None:
    body = generate(server)
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "token_ids": answer(),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (body["model"], body["prompt_logprobs"]) == ("demo", None)
    assert isinstance(body["created"], int)
    assert body["request_id"]


def test_a_stream_says_the_same_as_a_whole_answer(server: Server) -> None:
    asked: dict[str, Any] = {
        "token_ids": PROMPT,
        "sampling_params": {"seed": 1, "max_tokens": 8, "logprobs": 2, "n": 2},
        "stream_options": {"include_usage": True},
    }
    *events, last = server.stream(PATH, asked)
    whole = generate(server, logprobs=2, n=2)
    assert last == "[DONE]"
    pieces = [event for event in events if isinstance(event, dict)]
    assert {piece["request_id"] for piece in pieces} == {pieces[0]["request_id"]}
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    for number, choice in enumerate(whole["choices"]):
        mine = [one for piece in pieces for one in piece["choices"] if one["index"] == number]
        assert [token for one in mine for token in one["token_ids"]] == choice["token_ids"] == answer(choice=number)
        told = [entry for one in mine if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]


def test_log_probabilities_name_tokens_by_their_ids(server: Server) -> None:
    (choice,) = generate(server, logprobs=2)["choices"]
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry == {
            "token": f"token_id:{token}",
            "logprob": -token / 1000,
            "bytes": None,
            "top_logprobs": [
                {"token": f"token_id:{token + i}", "logprob": -token / 1000 - i, "bytes": None} for i in range(2)
            ],
        }
    (bare,) = generate(server, logprobs=0)["choices"]
    assert [entry["top_logprobs"] for entry in bare["logprobs"]["content"]] == [[]] * 8


def test_a_stop_token_ends_the_answer_and_is_told(server: Server) -> None:
    third = answer()[2]
    (choice,) = generate(server, stop_token_ids=[third])["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (answer()[:3], "stop", third)


def test_without_a_length_an_answer_may_take_what_is_left_of_the_context(server: Server) -> None:
    server.post(PATH, {"token_ids": PROMPT, "sampling_params": {"stop_token_ids": [answer()[2]], "seed": 1}})
    asked = [s for w in server.cluster.workers.values() for s in w.submits][-1]
    assert asked.sampling.max_tokens == server.service.spec.context - len(PROMPT)


def test_every_parameter_of_sampling_reaches_the_workers(server: Server) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 7, "min_tokens": 1, "max_tokens": 2,
        "logprobs": 3, "prompt_logprobs": 1, "stop_token_ids": [9], "allowed_token_ids": [300, 301], "ignore_eos": True,
        "logit_bias": {"300": 1.5},
    }  # fmt: skip
    generate(server, **asked)
    sampling = [s for w in server.cluster.workers.values() for s in w.submits][-1].sampling
    found = {name: getattr(sampling, name) for name in asked if name != "ignore_eos"}
    want = {name: value for name, value in asked.items() if name != "ignore_eos"}
    assert found == want | {"stop_token_ids": (9,), "allowed_token_ids": (300, 301), "logit_bias": ((300, 1.5),)}


def test_what_shapes_text_is_left_out_and_named(server: Server) -> None:
    params = {"max_tokens": 1, "skip_special_tokens": False, "detokenize": False, "output_kind": 2, "temprature": 1}
    response = server.post(PATH, {"token_ids": PROMPT, "sampling_params": params, "request_id": "x"})
    assert response.status_code == 200, response.text
    ignored = response.headers["x-twinpool-ignored"]
    for name in ("skip_special_tokens", "detokenize", "output_kind", "temprature"):
        assert f"sampling_params.{name}" in ignored
    assert "request_id" in ignored


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "token_ids", "must hold arrays of token ids"),
        ({"token_ids": []}, "token_ids", "missing or empty"),
        ({"token_ids": "text"}, "token_ids", "arrays of token ids"),
        ({"token_ids": [[1]]}, "token_ids", "must be integers"),
        ({"token_ids": [1, 1.5]}, "token_ids", "must be integers"),
        ({"token_ids": [True]}, "token_ids", "must be integers"),
        ({"token_ids": ["1"]}, "token_ids", "must be integers"),
        ({"token_ids": [-1]}, "token_ids", "out of range"),
        ({"token_ids": [10**9]}, "token_ids", "out of range"),
        ({"token_ids": [2**70]}, "token_ids", "out of range"),
        ({"token_ids": [1] * 2048}, "token_ids", "2048 tokens; the context of 2048"),
        ({"token_ids": [1] * 200_000}, "token_ids", "200000 tokens; the context of 2048"),
        ({"sampling_params": [1]}, "sampling_params", "must be an object"),
        ({"sampling_params": {"stop": ["x"]}}, "stop", "use stop_token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature", "from 0"),
        ({"sampling_params": {"logprobs": 21}}, "logprobs", "from 0 to 20"),
        ({"sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs", "from 0 to 20"),
        ({"sampling_params": {"stop_token_ids": [-5]}}, "stop_token_ids", "out of range"),
        ({"sampling_params": {"best_of": 2}}, "best_of", "use n"),
        ({"sampling_params": {"response_format": {"type": "json_object"}}}, "response_format", "other endpoints"),
        ({"temperature": 0}, "temperature", "within sampling_params"),
        ({"prompt": "x"}, "prompt", "other endpoints"),
        ({"model": "other"}, "model", "does not exist"),
        ({"sampling_params": {"prompt_logprobs": 0}, "stream": True}, "prompt_logprobs", "leave stream out"),
        ({"features": {"mm_hashes": {}}}, "features", "text or token ids"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(server: Server, body: dict[str, Any], param: str, says: str) -> None:
    asked = {"token_ids": PROMPT, **body} if body else body
    error = server.refused(PATH, asked, 404 if param == "model" else 400)
    assert (error["param"], says in error["message"]) == (param, True), error


def test_whole_numbers_may_have_a_point(server: Server) -> None:
    raw = b'{"token_ids": [5.0, 6, 7], "sampling_params": {"seed": 1.0, "max_tokens": 8.0}}'
    response = server.client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert response.json()["choices"][0]["token_ids"] == answer()


# ---------------------------------------------------------------- log-probabilities of prompts


def ranked(token: int, best: int, text: Any) -> dict[str, Any]:
    """What fakes say of a token: it is the best, those behind it have the next ids."""
    return {
        str(token + i): {
            "logprob": -token / 1000 - i,
            "rank": i + 1 if best else None,
            "decoded_token": text(token + i),
        }
        for i in range(max(1, best))
    }


@pytest.mark.parametrize("best", [0, 2])
def test_prompts_have_theirs_once_however_many_answers(server: Server, best: int) -> None:
    found = generate(server, n=3, prompt_logprobs=best)["prompt_logprobs"]
    assert found == [None, *(ranked(token, best, lambda _: None) for token in PROMPT[1:])]
    submits = [s for w in server.cluster.workers.values() for s in w.submits if s.peer is not None]
    asked = {s.sampling.choice: s.sampling.prompt_logprobs for s in submits[-6:]}
    assert asked == {0: best, 1: None, 2: None}


def test_a_prompt_of_one_token_has_none(server: Server) -> None:
    assert generate(server, top={"token_ids": [5]}, prompt_logprobs=1)["prompt_logprobs"] == [None]


def test_completions_and_chats_have_them_with_text(server: Server) -> None:
    def text(token: int) -> str:
        return server.service.model_tokenizer.token_bytes(token).decode("utf-8", "replace")

    body = server.complete(max_tokens=2, prompt=[PROMPT, [8, 9]], n=2, prompt_logprobs=1)
    for number, choice in enumerate(body["choices"]):
        prompt = PROMPT if number < 2 else [8, 9]
        assert choice["prompt_logprobs"] == [None, *(ranked(token, 1, text) for token in prompt[1:])]
        assert choice["logprobs"] is None
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    chat = server.post("/v1/chat/completions", {**asked, "return_token_ids": True}).json()
    assert [next(iter(one)) for one in chat["prompt_logprobs"][1:]] == [str(t) for t in chat["prompt_token_ids"][1:]]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in server.complete(max_tokens=1)["choices"][0]


def test_an_echo_beside_them_lists_as_many_as_it_asked_for(server: Server) -> None:
    (choice,) = server.complete(max_tokens=1, echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * 3
    assert [len(one) for one in choice["prompt_logprobs"][1:]] == [3] * 2


def test_more_than_the_bound_is_refused_before_anybody_is_asked(server: Server) -> None:
    before = sum(len(w.submits) for w in server.cluster.workers.values())
    body = {"token_ids": [1] * 2000, "sampling_params": {"prompt_logprobs": 20, "max_tokens": 1}}
    error = server.refused(PATH, body)
    assert error["param"] == "prompt_logprobs"
    assert "asks for 42000 log-probabilities; the limit is 32768" in error["message"]
    just = {"token_ids": [1] * 1639, "sampling_params": {"prompt_logprobs": 19, "max_tokens": 1}}
    assert "asks for 32780 " in server.refused(PATH, just)["message"], "its own beside the 19 best"
    echoed = {"prompt": [1] * 820, "n": 2, "echo": True, "prompt_logprobs": 19, "max_tokens": 1}
    assert "asks for 32800 " in server.refused("/v1/completions", echoed)["message"], (
        "for each choice, as it shows them"
    )
    assert sum(len(w.submits) for w in server.cluster.workers.values()) == before


def test_apis_without_a_place_for_them_refuse_them(server: Server) -> None:
    messages = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1}
    response = server.post("/v1/messages", messages)
    assert response.status_code == 400
    assert "prompt_logprobs" in json.dumps(response.json())
    assert server.refused("/v1/responses", {"input": "hi", "prompt_logprobs": 1})["param"] == "prompt_logprobs"


def routed(choice: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The experts of a choice, as clients of vLLM read them."""
    found: np.ndarray[Any, Any] = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    return found


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_experts_are_of_all_positions_but_the_last_which_nothing_has_computed(server: Server, path: str) -> None:
    more = {"n": 2, "max_tokens": 8, "seed": 1}
    body = {"token_ids": PROMPT, "sampling_params": more} if path == PATH else {"prompt": PROMPT, **more}
    response = server.post(path, {**body, "return_routed_experts": True})
    assert response.status_code == 200, response.text
    for number, choice in enumerate(response.json()["choices"]):
        experts = routed(choice)
        assert experts.dtype == np.uint16
        said = [*PROMPT[1:], *answer(choice=number)]
        assert experts.tolist() == [[[token, token + 1], [token + 2, token + 3]] for token in said]
        assert choice["logprobs"] is None
    sampling = [s for w in server.cluster.workers.values() for s in w.submits][-1].sampling
    assert (sampling.routed_experts, sampling.logprobs) == (True, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1, 2, 3000])
async def test_experts_of_a_long_answer_are_written_in_pieces_between_which_others_have_a_turn(size: int) -> None:
    ids = np.random.default_rng(1).integers(0, 1 << 16, (size, 6, 4), "<u2")
    told = [TokenLogprob(7, 0.0, experts=ChosenExperts(4, row.tobytes())) for row in ids]
    first: Any = SimpleNamespace(scores=told[: size // 2], logprobs=[])
    choice: Any = SimpleNamespace(scores=(), logprobs=told[size // 2 :])
    experts = ExpertsFile(first, choice)
    file = io.BytesIO()
    np.save(file, ids if size else ids.reshape(0, 0, 4)[:, :, :1])
    assert joined([b"<", experts, b">"]) == b"<" + base64.b64encode(file.getvalue()) + b">"
    assert all(len(piece) <= 4 * (PIECE_BYTES + 128) // 3 for piece in experts)
    turns, at = 0, list[int]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        at.append(turns)

    other = asyncio.ensure_future(others())
    exchange = HttpExchange({"method": "POST", "path": PATH, "headers": []}, send, send)  # type: ignore[arg-type]
    await exchange.answer_parts(200, [b"<", experts, b">"])
    other.cancel()
    assert len({*at}) > len(experts) // (4 * PIECE_BYTES // 3 + 200), at


def test_experts_of_a_prompt_alone_are_told(server: Server) -> None:
    (choice,) = generate(server, top={"return_routed_experts": True}, max_tokens=0)["choices"]
    assert routed(choice).shape == (2, 2, 2)
    (bare,) = generate(server)["choices"]
    assert "routed_experts" not in bare


def test_experts_come_with_a_whole_answer_and_not_with_a_chat(server: Server) -> None:
    params = {"max_tokens": 2}
    for path, body in (
        (PATH, {"token_ids": PROMPT, "sampling_params": params, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        refused = server.post(path, {**body, "return_routed_experts": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "return_routed_experts"


def test_experts_are_bounded_by_positions_of_prompts_and_answers() -> None:
    with serving(FakeCluster(), config=router_config(max_routed_positions=2 * (3 + 8))) as small:
        generate(small, top={"return_routed_experts": True}, n=2)
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "n": 2}, "return_routed_experts": True}
        refused = small.post(PATH, body)
    assert refused.status_code == 400
    assert "asks for those of 24 positions, of each answer with its prompt; the limit is 22" in refused.text
