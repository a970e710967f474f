"""Rollout is replay: the log-probabilities that an answer was told, drawn row by row with others beside it, are bit for
bit those that its prompt and its tokens have when they are computed again as one prompt, in chunks of any size."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.colocated_worker import colocated
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import Answer, pair
from tests.workers.test_pair import prompts
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob

COUNT, BEST = 24, 3
DRAWN = SamplingParams(max_tokens=COUNT, temperature=0.9, top_p=0.95, seed=11, logprobs=BEST)
SCORED = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=BEST)


def bits(scored: TokenLogprob) -> tuple[int, bytes, tuple[tuple[int, bytes], ...]]:
    """A position's log-probabilities, as bits: minus zero and zero are two numbers here."""
    return (
        scored.token,
        struct.pack("<d", scored.logprob),
        tuple((token, struct.pack("<d", value)) for token, value in scored.top),
    )


def replayed(model: Path, tokens: Sequence[int], **sections: Any) -> tuple[TokenLogprob, ...]:
    """What each of `tokens` but the first has in a replay."""
    with pair(model, **sections) as both:
        (answer,) = both.run(both.submit(list(tokens), SCORED))
    assert [one.token for one in answer.scores] == list(tokens[1:])
    return answer.scores


def expect_replay(model: Path, prompt: Sequence[int], told: Mapping[int, TokenLogprob]) -> None:
    """The log-probabilities `told` of an answer, by position, are those of its replay, whole and in chunks."""
    tokens = [*prompt, *(told[position].token for position in sorted(told))]
    assert sorted(told) == list(range(len(prompt), len(tokens)))
    whole = replayed(model, tokens)
    for chunk in (16, 32):
        assert [bits(one) for one in replayed(model, tokens, prefill={"chunk_tokens": chunk})] == list(map(bits, whole))
    for position, one in told.items():
        assert bits(one) == bits(whole[position - 1]), position


def of_both(answers: Sequence[Answer], asked: Sequence[Sequence[int]], model: Path) -> None:
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.logprobs) == COUNT
        expect_replay(model, prompt, answer.logprobs)


def test_rollout_is_replay_across_two_pools_in_a_batch_and_behind_a_prefix(model: Path, oracle: Oracle) -> None:
    asked = prompts(31, 70, 9)
    with pair(model, prefill={"chunk_tokens": 32}) as both:
        answers = both.run(*[both.submit(prompt, DRAWN) for prompt in asked])
        (again,) = both.run(both.submit(asked[0], DRAWN))
        assert again.progress[Role.PREFILL].cached_tokens >= 48, "the prefix is there"
        assert again.logprobs == answers[0].logprobs
    of_both(answers, asked, model)
    tokens = [*asked[0], *answers[0].list]
    want = oracle.logits(tokens).log_softmax(-1)
    for position, one in answers[0].logprobs.items():
        assert one.logprob == pytest.approx(float(want[position - 1, one.token]), abs=1e-3)


def test_rollout_is_replay_though_its_request_leaves_decode_and_comes_back(model: Path) -> None:
    asked = prompts(32, 40, 21)
    with pair(model, decode={"retract": "copy", "cache": {"host_bytes": 1 << 23}}, faults={"retract_every": 5}) as both:
        answers = both.run(*[both.submit(prompt, DRAWN) for prompt in asked])
        assert both.decode.status().counters["retractions"] > 0
    of_both(answers, asked, model)


def test_rollout_is_replay_though_its_decode_worker_is_lost(model: Path) -> None:
    (prompt,) = prompts(33, 50)
    with company(model, prefills=1, decodes=2) as all_of_them:
        rid = all_of_them.submit(prompt, DRAWN)
        all_of_them.until(generated(all_of_them, rid, 9), "some tokens")
        all_of_them.gone(all_of_them.told[rid].request.workers[Role.DECODE])
        (tokens,) = all_of_them.run(rid)
        told = all_of_them.told[rid]
        assert len(told.replays) == 1
    assert [one.token for one in told.logprobs] == tokens
    expect_replay(model, prompt, dict(enumerate(told.logprobs, len(prompt))))


def test_rollout_is_replay_on_a_worker_of_both_roles(model: Path) -> None:
    asked = prompts(34, 30, 12)
    with colocated(model) as one:
        answers = one.run(*[one.submit(prompt, DRAWN) for prompt in asked])
    of_both(answers, asked, model)


def test_a_prefix_that_is_cached_takes_no_log_probability_away(model: Path) -> None:
    (prompt,) = prompts(35, 80)
    with pair(model) as both:
        (first,) = both.run(both.submit(prompt, SCORED))
        both.run(both.submit(prompt, DRAWN))
        (again,) = both.run(both.submit(prompt, SCORED))
    assert again.progress[Role.PREFILL].cached_tokens == 0
    assert len(again.scores) == len(prompt) - 1
    assert list(map(bits, again.scores)) == list(map(bits, first.scores))
