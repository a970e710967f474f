"""Fitted costs against those that probes were made of, and the search for pools against looking at all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_cluster import ROOT
from twinpool.cli.load.open_loop import Content, asks_of
from twinpool.contracts.errors import ConfigError
from twinpool.sim.fabric.virtual_time import StepCosts, pairs_of
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import (
    BatchProbe,
    ClusterPlan,
    DecodePool,
    MeasuredCosts,
    PrefillPool,
    PromptProbe,
    fit_costs,
    read_costs,
)
from twinpool.sim.scale.scale_command import PoolPrediction, PoolSearch
from twinpool.sim.scale.scale_figures import RunReport
from twinpool.sim.scale.traffic import SimRequest, read_trace, replayed, scaled_block

SLICE = ROOT / "bench/traces/conversation_200.jsonl"
CHUNK = 512


def probes(costs: StepCosts) -> tuple[list[PromptProbe], list[BatchProbe]]:
    """What a client would measure of workers that take exactly so long."""
    prompts = []
    for tokens in (16, 64, 256, 512, 1024, 2040):
        at, ttft = 0, 2 * costs.message_s
        while at < tokens:
            chunk = min(CHUNK, tokens - at)
            ttft += costs.prefill_s(chunk, pairs_of(at, chunk))
            at += chunk
        prompts.append(PromptProbe(tokens, ttft, costs.handover_s(tokens) + costs.decode_s(1, tokens)))
    for count in (2, 4):  # They fill a step each, so one is computed after the other.
        step_s = costs.prefill_s(CHUNK, pairs_of(0, CHUNK))
        prompts.append(PromptProbe(CHUNK, 2 * costs.message_s + count * step_s, prompts=count))
    batches = [
        BatchProbe(rows, context, costs.decode_s(rows, rows * context))
        for rows in (1, 2, 4, 8, 16)
        for context in (128, 1088)
    ]
    return prompts, batches


@pytest.mark.parametrize(
    "costs",
    [
        StepCosts(0.004, 1e-4, 2e-8, 0.003, 4e-4, 3e-7, 0, 1.0, 0.002, 2e-6, message_s=0.001),
        StepCosts(0.004, 1e-4, 0.0, 0.003, 4e-4, 0.0, 0, 1.0, 0.002, 0.0, message_s=0.0),
        StepCosts(0.02, 2e-6, 1e-9, 0.01, 1e-5, 1e-9, 0, 1.0, 0.001, 1e-7),
    ],
)
def test_costs_that_were_measured_exactly_are_found_again(costs: StepCosts) -> None:
    fit = fit_costs(*probes(costs), CHUNK)
    assert fit.prompt_error + fit.batch_error < 1e-6
    for name in ("prefill_base_s", "prefill_token_s", "prefill_pair_s", "decode_base_s", "decode_row_s",
                 "decode_context_s", "handover_base_s", "handover_token_s", "message_s"):  # fmt: skip
        assert getattr(fit.costs, name) == pytest.approx(getattr(costs, name), rel=1e-3, abs=2e-9), name


def test_what_drafts_gain_is_found_apart_from_the_costs_of_steps() -> None:
    costs = StepCosts(0.004, 1e-4, 2e-8, 0.003, 4e-4, 3e-7, 4, 0.3, 0.002, 2e-6)
    prompts, batches = probes(costs)
    assert next(probe.token_s for probe in batches if probe.rows == 4) == pytest.approx(0.3 * (0.0046 + 4 * 128 * 3e-7))
    plain = replace(costs, draft_rows=0)
    prompts = [
        replace(probe, gap_s=plain.handover_s(probe.tokens) + plain.decode_s(1, probe.tokens)) for probe in prompts
    ]
    fit = fit_costs(prompts, batches, CHUNK, draft_rows=4)
    assert fit.costs.draft_rows == 4
    assert fit.costs.draft_gain == pytest.approx(0.3)
    assert fit.costs.decode_row_s == pytest.approx(4e-4)
    assert fit.batch_error < 1e-6
    with pytest.raises(ConfigError, match="draft_gain"):
        replace(costs, draft_gain=0.0)


def test_noise_makes_no_cost_negative_and_is_told() -> None:
    costs, rng = StepCosts(0.004, 1e-4, 0.0, 0.003, 4e-4, 0.0), random.Random(1)
    prompts, batches = probes(costs)
    noisy = [replace(probe, ttft_s=probe.ttft_s * rng.uniform(0.7, 1.3)) for probe in prompts]
    fit = fit_costs(noisy, batches, CHUNK)
    assert 0.01 < fit.prompt_error < 0.3
    assert fit.costs.prefill_token_s == pytest.approx(1e-4, rel=0.4)


def test_what_a_request_takes_besides_its_steps_is_told_apart_by_prompts_that_come_at_once() -> None:
    """Short prompts alone can't tell: each is one step and one request."""
    costs = StepCosts(0.2, 1e-4, 0.0, 0.2, 1e-4, 0.0, message_s=0.001)
    prompts, batches = probes(costs)
    short = [probe for probe in prompts if probe.tokens <= CHUNK]
    fit = fit_costs(short, batches, CHUNK)
    assert fit.costs.prefill_base_s == pytest.approx(0.2, rel=1e-3)
    assert fit.costs.message_s == pytest.approx(0.001, rel=0.01)
    blind = fit_costs([probe for probe in short if probe.prompts == 1], batches, CHUNK)
    assert blind.costs.prefill_base_s + 2 * blind.costs.message_s == pytest.approx(0.202, rel=0.01), (
        "their sum is known"
    )


def test_too_few_probes_are_refused() -> None:
    prompts, batches = probes(StepCosts())
    for few in ((prompts[:2], batches), (prompts, batches[:1])):
        with pytest.raises(ConfigError, match="three lengths, and batches of two sizes"):
            fit_costs(*few, CHUNK)


def test_a_file_of_costs_comes_back_as_it_was_and_another_is_refused(tmp_path: Path) -> None:
    prompts, batches = probes(StepCosts())
    costs = MeasuredCosts(
        "demo", "here", "now", StepCosts(), CHUNK, 16, 64, 1 << 14, 1 << 14, 1536, 0.1, 0.2, tuple(prompts),
        tuple(batches),
    )  # fmt: skip
    path = tmp_path / "costs.json"
    costs.write(path)
    assert read_costs(path) == costs
    for text in ("{}", "[]", "no json", path.read_text().replace('"format": 1', '"format": 2'),
                 path.read_text().replace('"decode_row_s": ', '"decode_row_s": -')):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"twinpool plan --measure makes them|must be 0 seconds"):
            read_costs(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_costs(tmp_path / "nowhere.json")


def report(good: float) -> RunReport:
    none: list[Any] = [0.0] * 9
    rest: list[Any] = [1.0, good, good, 0.0, 0.0, 0.0, 0.0, {}, 0, 0, ""]
    return RunReport(100, 100, 0, 0, 1.0, *none, *rest)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_smallest_sum_with_far_fewer_looks(seed: int) -> None:
    rng, most = random.Random(seed), 16
    least, both = (rng.randrange(1, 14), rng.randrange(1, 14)), rng.choice([0, rng.randrange(2, 24)])

    def good(prefill: int, decode: int) -> bool:
        return prefill >= least[0] and decode >= least[1] and prefill + 2 * decode >= both

    def predict(prefill: int, decode: int) -> PoolPrediction:
        looks.append((prefill, decode))
        return PoolPrediction(prefill, decode, report(0.995 if good(prefill, decode) else 0.5))

    looks: list[tuple[int, int]] = []
    found = PoolSearch(predict, 0.99, most).smallest()
    enough = [(p + d, p) for p in range(1, most + 1) for d in range(1, most + 1) if good(p, d)]
    assert found is not None
    assert (found.workers, found.prefill) == min(enough)
    assert len(looks) == len(set(looks)) < 80, "not all 256 pairs"


def test_a_search_without_an_answer_says_so() -> None:
    search = PoolSearch(lambda p, d: PoolPrediction(p, d, report(0.5)), 0.99, 8)
    assert search.smallest() is None
    assert [(one.prefill, one.decode) for one in search.beside(search.look(8, 1))] == [(7, 1), (8, 2)]


@pytest.mark.parametrize("scale", [0.0625, 0.02, 1.0])
def test_simulated_requests_are_those_that_a_replay_sends(scale: float) -> None:
    lines = read_trace(SLICE, 60)
    asks = list(asks_of(Content(1, 0, 1 << 30), lines, scale, 3.0, 4096))
    requests = list(replayed(lines, speed=3.0, scale=scale, max_context=4096))
    size = scaled_block(scale)
    begins: dict[int, tuple[int, ...]] = {}
    for ask, request in zip(asks, requests, strict=True):
        assert (request.at_s, request.prompt, request.answer) == (ask.at_s, len(ask.tokens), ask.output_tokens)
        for number, key in enumerate(request.keys, 1):
            assert begins.setdefault(key, ask.tokens[: number * size]) == ask.tokens[: number * size]
    assert len(set(begins.values())) == len(begins), "unequal keys are unequal beginnings"


def test_the_peak_of_a_decode_worker_is_what_its_longest_request_holds() -> None:
    plan = ClusterPlan(PrefillPool(1), DecodePool(1))
    model = ClusterModel(plan, iter([SimRequest(0.0, 100, 40, 40, [], "s"), SimRequest(50.0, 33, 7, 7, [], "t")]))
    try:
        model.run()
        assert model.decode_peak == 112 + 39, "pages of 16 for the prompt and its first token, and the rest"
    finally:
        model.close()
