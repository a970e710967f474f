"""Simulated clusters whose decode workers compute prompts, too: the plans of the same seeds."""

from __future__ import annotations

from collections import Counter

import pytest

from twinpool.sim.run.sim_command import ClusterKind, plan_of, run_seed

BLOCK = 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, BLOCK))
def test_no_seed_violates_anything_and_prompts_of_both_kinds_are_met(first: int) -> None:
    results = [run_seed(seed, ClusterKind.CONDITIONAL) for seed in range(first, first + BLOCK)]
    assert {r.seed: r.violations for r in results if r.violations} == {}
    met = sum((r.counts for r in results), Counter[str]())
    assert met["local_earlier"] > 0
    assert met["local_no_prefill"] > 0
    assert met["answered"] > 0
    assert met["prompt_tokens_held"] > 0, "rooms were granted, too"


def test_a_plan_for_such_a_cluster_has_the_same_workers_requests_and_faults() -> None:
    for seed in range(50):
        plan, always = plan_of(seed, ClusterKind.CONDITIONAL), plan_of(seed)
        assert (plan.shape.workers, plan.asks, plan.faults) == (always.shape.workers, always.asks, always.faults)
        assert plan.shape.config["disaggregation"]["mode"] == "conditional"
        assert plan.shape.config["disaggregation"]["step_tokens"] >= plan.shape.page_tokens
