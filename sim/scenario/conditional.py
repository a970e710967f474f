"""The same plan for a cluster whose decode workers compute prompts, too: the same requests, workers and faults."""

from __future__ import annotations

from dataclasses import replace

from twinpool.sim.scenario.scenario import Scenario


def as_conditional(plan: Scenario) -> Scenario:
    """Return the plan with conditional disaggregation, under bounds that differ from seed to seed."""
    shape = plan.shape
    bounds = {"step_tokens": shape.page_tokens * (1 + plan.seed % 4), "local_tokens": 1 + 16 * (plan.seed % 5)}
    config = {**shape.config, "disaggregation": {"mode": "conditional", **bounds}}
    return replace(plan, shape=replace(shape, config=config))
