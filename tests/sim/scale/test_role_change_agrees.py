"""A change of role at scale says what it says in the full simulator: one decode worker of two begins to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.scale.test_agrees_with_the_full_simulator import (
    CHUNK,
    COSTS,
    PAGE,
    ROWS,
    SHAPE,
    TOKENS,
    TimedRun,
    asked,
    told,
)
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.traffic import SimRequest
from twinpool.sim.scenario.scenario import PlannedFault, Scenario, ScenarioRequest

AT_S = 8.0
SETTLED_S = 3.0
"""Seconds after the order from which requests find the pools as they are then."""
CHANGED = WorkerName("decode-1")
START_S = 0.525
"""What the full simulator's starts take, on average."""


def simulated(asks: Sequence[ScenarioRequest], answers: Sequence[int], *, change: bool) -> ClusterModel:
    """The same requests on modelled workers."""
    plan = ClusterPlan(
        PrefillPool(1, TOKENS, chunk_tokens=CHUNK),
        DecodePool(2, TOKENS, ROWS),
        replace(COSTS, role_change_s=START_S),
        block_tokens=PAGE,
        config=config_from_dict({"router": {"policy": "round_robin"}, "cache": {"page_tokens": PAGE}}),
    )
    keys = [prefix_hashes(ask.prompt, "", PAGE).pages.tolist() for ask in asks]
    requests = (
        SimRequest(ask.at, len(ask.prompt), tokens, ask.sampling.max_tokens, of_prompt, "")
        for ask, tokens, of_prompt in zip(asks, answers, keys, strict=True)
    )
    model = ClusterModel(plan, requests)
    model.run(until_s=AT_S)
    if change:
        model.pools.core.pools.change_role(CHANGED, Role.PREFILL)
    model.run()
    model.close()
    assert model.check() == []
    return model


@pytest.mark.slow
def test_first_tokens_and_answers_after_a_change_of_role_are_within_five_per_cent() -> None:
    asks = asked(120, 5.0)
    full = TimedRun(Scenario(1, SHAPE, asks, (PlannedFault("role", AT_S, CHANGED),)))
    assert not full.run().violations
    assert [host.role for host in full.control.all_hosts if host.name == CHANGED] == [Role.DECODE, Role.PREFILL]
    came = [full.came[ask.number] for ask in asks]
    fast, still = (simulated(asks, [len(times) for times in came], change=change) for change in (True, False))
    assert fast.pools.workers[CHANGED, Incarnation(2)].role is Role.PREFILL
    later = np.array([ask.at > AT_S + SETTLED_S for ask in asks])
    assert later.sum() > 40
    want = told("ttft", np.array([times[0] - ask.at for times, ask in zip(came, asks, strict=True)])[later])
    want |= told("answer", np.array([times[-1] - ask.at for times, ask in zip(came, asks, strict=True)])[later])

    def of(model: ClusterModel) -> dict[str, float]:
        ttft, answer = (np.array(times, np.float64)[later] for times in (model.figures.ttft_s, model.figures.answer_s))
        return told("ttft", ttft) | told("answer", answer)

    assert of(fast) == pytest.approx(want, rel=0.05)
    assert of(still)["ttft mean"] > 1.2 * want["ttft mean"], "the second prefill worker shows"
