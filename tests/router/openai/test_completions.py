"""Completions over real HTTP from fakes: every option reaches the answer, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.router.fake_worker import expected
from tests.router.http_server import DEMO, Server
from twinpool.contracts.sampling_params import SamplingParams

PROMPT = (5, 6, 7)


def answer(max_tokens: int = 8, *, seed: int = 1, choice: int = 0, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return expected(prompt, SamplingParams(max_tokens, seed=seed, choice=choice))


def text_of(server: Server, tokens: list[int]) -> str:
    return server.service.model_tokenizer.decode(tokens)


def test_a_completion_is_the_tokens_of_both_legs_in_order(server: Server) -> None:
    body = server.complete(max_tokens=8, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["token_ids"] == answer()
    assert choice["prompt_token_ids"] == list(PROMPT)
    assert choice["text"] == text_of(server, answer())
    assert choice["finish_reason"] == "length"
    assert body["object"] == "text_completion"
    assert body["model"] == "demo"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_says_the_same_as_a_whole_answer(server: Server) -> None:
    asked = {"prompt": list(PROMPT), "seed": 1, "max_tokens": 8, "return_token_ids": True}
    *chunks, last = server.stream("/v1/completions", asked)
    assert last == "[DONE]"
    choices = [c["choices"][0] for c in chunks if isinstance(c, dict)]
    assert [t for c in choices for t in c["token_ids"]] == answer()
    assert "".join(c["text"] for c in choices) == text_of(server, answer())
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    assert choices[0]["prompt_token_ids"] == list(PROMPT)
    assert all("prompt_token_ids" not in c for c in choices[1:])
    assert len({c["id"] for c in chunks if isinstance(c, dict)}) == 1


def test_legs_name_each_other_and_share_a_room(server: Server) -> None:
    server.complete(max_tokens=8)
    (prefill,) = (s for n in ("prefill-0", "prefill-1") for s in server.cluster[n].submits)
    (decode,) = (s for n in ("decode-0", "decode-1") for s in server.cluster[n].submits)
    assert prefill.room == decode.room
    assert len(prefill.room) >= 24
    assert prefill.peer is not None
    assert prefill.peer.name.startswith("decode-")
    assert decode.peer is not None
    assert decode.peer.control == f"inproc://{decode.peer.name}"
    assert prefill.sampling == decode.sampling
    assert prefill.tokens == decode.tokens == PROMPT


def test_one_token_needs_prefill_alone(server: Server) -> None:
    body = server.complete(max_tokens=1, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == answer(1)
    assert not any(server.cluster[n].submits for n in ("decode-0", "decode-1"))
    assert next(s.peer for n in ("prefill-0", "prefill-1") for s in server.cluster[n].submits) is None


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_of_several_prompts_stand_in_order(server: Server, stream: bool) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    asked: dict[str, Any] = {"prompt": prompts, "n": 2, "seed": 3, "max_tokens": 4, "return_token_ids": True}
    got: dict[int, list[int]] = {}
    for name in ("prefill-0", "prefill-1"):
        server.cluster[name].cached = 1
    if stream:
        for chunk in server.stream("/v1/completions", {**asked, "stream_options": {"include_usage": True}})[:-1]:
            assert isinstance(chunk, dict)
            for c in chunk["choices"]:
                got.setdefault(c["index"], []).extend(c["token_ids"])
            usage = chunk["usage"]
    else:
        body = server.complete(**asked)
        got = {c["index"]: c["token_ids"] for c in body["choices"]}
        usage = body["usage"]
    want = [answer(4, seed=3, choice=c, prompt=tuple(p)) for p in prompts for c in range(2)]
    assert [got[i] for i in range(4)] == want
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 16)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}, "of each prompt once"


def test_a_stop_token_ends_the_answer_counts_and_has_no_text(server: Server) -> None:
    stop = answer()[4]
    body = server.complete(max_tokens=8, stop_token_ids=[stop], return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["token_ids"] == answer()[:5]
    assert choice["text"] == text_of(server, answer()[:4])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    shown = server.complete(max_tokens=8, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == text_of(server, answer()[:5])


def test_a_first_token_that_stops_needs_no_decode_step(server: Server) -> None:
    body = server.complete(max_tokens=8, stop_token_ids=[answer()[0]], return_token_ids=True)
    assert body["choices"][0]["token_ids"] == answer()[:1]
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_and_frees_the_workers(server: Server, stream: bool) -> None:
    whole = text_of(server, answer(40))
    at = len(text_of(server, answer(6))) - 1
    stop = whole[at : at + 4]
    asked = {"prompt": list(PROMPT), "seed": 1, "max_tokens": 40, "stop": ["never", stop]}
    if stream:
        chunks = [c["choices"][0] for c in server.stream("/v1/completions", asked)[:-1] if isinstance(c, dict)]
        text, last = "".join(c["text"] for c in chunks), chunks[-1]
    else:
        (last,) = server.complete(**asked)["choices"]
        text = last["text"]
    assert text == whole[: whole.index(stop)]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    server.at_rest()


@pytest.mark.parametrize("min_tokens", [1, 6])
def test_the_text_of_the_first_min_tokens_is_shown_and_no_stop_string_is_looked_for_in_it(
    server: Server, min_tokens: int
) -> None:
    first, whole = (text_of(server, answer(n)) for n in (min_tokens, 40))
    early, later = first[:2], whole[len(first) + 9 : len(first) + 13]
    assert early not in whole[len(first) :]
    body = server.complete(max_tokens=40, min_tokens=min_tokens, stop=[early, later])
    (choice,) = body["choices"]
    assert choice["text"] == first + whole[len(first) : whole.index(later, len(first))]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", later)


def test_echo_with_scores_gives_the_prompt_and_its_log_probabilities(server: Server) -> None:
    body = server.complete(max_tokens=2, echo=True, logprobs=2)
    (choice,) = body["choices"]
    shown = choice["logprobs"]
    assert choice["text"] == text_of(server, [*PROMPT, *answer(2)])
    assert shown["token_logprobs"] == [None, *(-t / 1000 for t in (*PROMPT[1:], *answer(2)))]
    assert shown["top_logprobs"][0] is None
    assert all(len(t) == 2 for t in shown["top_logprobs"][1:])
    assert shown["tokens"] == [text_of(server, [t]) for t in (*PROMPT, *answer(2))]
    assert "".join(shown["tokens"])[shown["text_offset"][2] :].startswith(shown["tokens"][2])


def test_every_choice_that_is_echoed_has_the_prompts_log_probabilities(server: Server) -> None:
    choices = server.complete(max_tokens=1, n=2, echo=True, logprobs=0)["choices"]
    assert [one["logprobs"]["token_logprobs"][:3] for one in choices] == [[None, -0.006, -0.007]] * 2


def test_echo_without_tokens_only_scores(server: Server) -> None:
    (choice,) = server.complete(max_tokens=0, echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.006, -0.007]
    assert choice["text"] == text_of(server, list(PROMPT))
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_usage_names_the_cached_tokens(server: Server, stream: bool) -> None:
    for name in ("prefill-0", "prefill-1"):
        server.cluster[name].cached = 2
    if stream:
        asked = {"prompt": list(PROMPT), "max_tokens": 4, "stream_options": {"continuous_usage_stats": True}}
        *chunks, closing, done = server.stream("/v1/completions", asked)
        assert done == "[DONE]"
        assert isinstance(closing, dict)
        usage = closing["usage"]
        assert closing["choices"] == []
        counts = [c["usage"]["completion_tokens"] for c in chunks if isinstance(c, dict)]
        assert counts == sorted(counts)
        assert counts[-1] == 4
    else:
        usage = server.complete(max_tokens=4)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_missing_seed_is_minted_and_a_given_one_repeats(server: Server) -> None:
    def tokens(**seed: int) -> list[int]:
        response = server.post("/v1/completions", {"prompt": [5], "return_token_ids": True, "max_tokens": 6, **seed})
        return list(response.json()["choices"][0]["token_ids"])

    assert tokens(seed=-5) == tokens(seed=-5)
    assert tokens() != tokens()


def test_without_max_tokens_the_default_counts_bounded_by_the_context(server: Server) -> None:
    prompt = [5] * 2040
    assert server.complete()["usage"]["completion_tokens"] == 512
    assert server.complete(prompt=prompt)["usage"]["completion_tokens"] == 8


@pytest.mark.slow
def test_a_chat_without_max_tokens_may_use_the_rest_of_the_context(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == server.service.spec.context


@pytest.mark.parametrize("priority", [None, 7, -2])
def test_a_requests_priority_goes_to_both_workers(server: Server, priority: int | None) -> None:
    server.complete(max_tokens=4, priority=priority)
    submits = [s for worker in server.cluster.workers.values() for s in worker.submits]
    assert [s.priority for s in submits] == [priority or 0] * 2


def test_the_timeline_says_who_did_what(server: Server) -> None:
    asked = {"prompt": list(PROMPT), "max_tokens": 4, "seed": 1}
    header = {"X-Twinpool-Timeline": "1"}
    whole = server.post("/v1/completions", asked, **header).json()["twinpool"]
    *_, closing, done = server.stream("/v1/completions", asked, **header)
    assert done == "[DONE]"
    assert isinstance(closing, dict)
    for shown in (whole, closing["twinpool"]):
        assert shown["prefill_worker"].startswith("prefill-")
        assert shown["decode_worker"].startswith("decode-")
        assert (shown["transfer_bytes"], shown["held_by_decode"]) == (20, 1)
        assert shown["computed"] == {"prefill": 3, "decode": 0}
        assert shown["attempts"] == 1
        times = shown["timeline"]
        assert times["transfer"] == pytest.approx(0.002)
        assert 0 <= times["queue"] <= times["first_token"] <= times["total"]
        assert {"queue", "prefill"} <= times["prefill"].keys()
        assert {"grant", "arrived", "first_step", "done"} <= times["decode"].keys()
    alone = server.post("/v1/completions", {**asked, "max_tokens": 1}, **header).json()["twinpool"]
    assert (alone["decode_worker"], alone["transfer_bytes"]) == (None, 0)
    stop = text_of(server, answer(4)[2:3])
    stopped = server.post("/v1/completions", {**asked, "max_tokens": 30, "stop": stop}, **header).json()["twinpool"]
    assert stopped["transfer_bytes"] == 20
    each = server.post("/v1/completions", {**asked, "n": 2}, **header).json()["twinpool"]
    assert len(each) == 2
    assert "twinpool" not in server.post("/v1/completions", asked).json()


def test_request_ids_come_back_clean(server: Server) -> None:
    def sent_back(**headers: str) -> str:
        return server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, **headers).headers["x-request-id"]

    assert sent_back(**{"X-Request-Id": "abc-1"}) == "abc-1"
    assert sent_back(**{"X-Request-Id": "a\tb<c>" + "x" * 100}) == ("abc" + "x" * 100)[:64]
    assert len(sent_back()) == 16


def test_d7_large_prompts_are_read_by_another_process(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's lock, which parsing and tokenising hold, is not this process's."""
    here: list[str] = []
    encode = server.service.model_tokenizer.encode

    def watched(text: str, **options: Any) -> tuple[int, ...]:
        here.append(text[:5])
        return encode(text, **options)

    monkeypatch.setattr(server.service.model_tokenizer, "encode", watched)
    server.complete(prompt="small", max_tokens=1)
    large = server.complete(prompt="word " * 1000, max_tokens=1, return_token_ids=True)
    assert here == ["small"]
    assert server.call(lambda: server.service.readers.pids)
    oracle = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert large["choices"][0]["prompt_token_ids"] == oracle.encode("word " * 1000).ids


def test_a_failing_tick_does_not_end_the_ticks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[int] = []

    def fail() -> None:
        ticks.append(1)
        raise AssertionError("planted")

    monkeypatch.setattr(server.service.core, "tick", fail)
    server.wait_until(lambda: len(ticks) >= 2)
