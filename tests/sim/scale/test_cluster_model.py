"""A modelled cluster conserves its requests, is decided by its seed, and refuses what it can't take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.sim.fabric.virtual_time import StepCosts
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import AnswerTarget, ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.scale_command import ScaleOptions, simulate_scale
from twinpool.sim.scale.scale_figures import RunReport
from twinpool.sim.scale.traffic import SimRequest, TrafficShape, drawn, read_trace

TRACE = Path(__file__).parents[3] / "bench" / "traces" / "conversation_200.jsonl"
SHAPE = TrafficShape(150, 60.0, 1, prompts=(700, 1500, 9000), answers=(1, 2, 40, 200), think_s=5.0)


def planned(router: dict[str, Any] | None = None, **sections: Any) -> ClusterPlan:
    config = config_from_dict({"router": {"max_queue": 10_000, **(router or {})}, **sections})
    return ClusterPlan(PrefillPool(4, 1 << 17), DecodePool(2), config=config)


def run(plan: ClusterPlan, requests: Iterator[SimRequest], seed: int = 0) -> tuple[RunReport, ClusterModel]:
    model = ClusterModel(plan, requests, seed)
    try:
        model.run()
        assert model.check() == []
        return model.report(), model
    finally:
        model.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "power_of_two", "round_robin", "session"])
def test_every_request_that_is_sent_is_answered(policy: str) -> None:
    report, model = run(planned({"policy": policy}), drawn(SHAPE))
    assert (report.sent, report.answered, report.refused, report.failed) == (150, 150, 0, 0)
    assert model.figures.answer_tokens == sum(request.answer for request in drawn(SHAPE))
    assert model.figures.prompt_tokens == sum(request.prompt for request in drawn(SHAPE))
    computed = sum(one.prefill.computed for one in model.pools.workers.values() if one.prefill is not None)
    assert computed == model.figures.prompt_tokens - model.figures.held_tokens


def test_a_seed_is_one_run() -> None:
    plan = planned({"policy": "power_of_two"})
    first, again, other = run(plan, drawn(SHAPE))[0], run(plan, drawn(SHAPE))[0], run(plan, drawn(SHAPE), seed=1)[0]
    assert first == again
    assert other.digest != first.digest
    assert run(plan, drawn(replace(SHAPE, seed=2)))[0].digest != first.digest


def test_what_is_too_much_for_the_routers_is_refused_and_counted() -> None:
    report, _ = run(planned({"max_queue": 5}), drawn(SHAPE))
    assert report.refused > 20
    assert report.answered + report.refused == 150


def test_a_prompt_that_would_be_late_is_refused_early() -> None:
    plan = replace(planned(), prefill=PrefillPool(1, 1 << 17), target=AnswerTarget(2.0, 0.1), refuse_late=True)
    report, model = run(plan, drawn(SHAPE))
    patient, _ = run(replace(plan, refuse_late=False), drawn(SHAPE))
    early = sum(core.counts.refused_early for core in model.cores)
    assert report.refused == early > 0
    assert report.answered + report.refused + report.failed == 150
    assert report.ttft_p99_s < patient.ttft_p99_s / 2


def test_a_request_that_takes_too_long_fails_and_leaves_nothing_behind() -> None:
    plan = replace(planned({"request_timeout_s": 3.0}), prefill=PrefillPool(1, 1 << 17))
    report, _ = run(plan, drawn(SHAPE))
    assert report.failed > 0
    assert report.answered + report.failed == 150


def test_several_routers_share_the_requests() -> None:
    report, model = run(replace(planned(), routers=3), drawn(SHAPE))
    assert report.answered == 150
    assert all(core.counts.submitted > 20 for core in model.cores)


def test_caches_are_used_where_conversations_go_on() -> None:
    one_turn, _ = run(planned(), drawn(replace(SHAPE, turns=1.0, system_tokens=0)))
    many_turns, _ = run(planned(), drawn(replace(SHAPE, turns=6.0, think_s=1.0)))
    assert one_turn.hit_rate == 0.0
    assert many_turns.hit_rate > 0.4


def test_the_index_knows_what_workers_hold_and_so_does_the_policy() -> None:
    shape = replace(SHAPE, turns=6.0, think_s=1.0)
    aware, _ = run(planned(), drawn(shape))
    blind, _ = run(planned({"policy": "round_robin"}), drawn(shape))
    assert aware.hit_rate > 1.5 * blind.hit_rate


def test_retracted_requests_come_back() -> None:
    plan = replace(planned(), decode=DecodePool(1, 6_000, first_length=2, output_length_quantile=0.01))
    report, model = run(plan, drawn(replace(SHAPE, prompts=(700, 1500), answers=(2, 400), turns=1.0)))
    (decode,) = [one.decode for one in model.pools.workers.values() if one.decode is not None]
    assert decode.retractions > 0
    assert decode.free_tokens == 6_000
    assert report.answered == 150


def test_the_autoscaler_sizes_the_pools() -> None:
    bounds = {"min_workers": 1, "max_workers": 12}
    scaling = {
        "enabled": True, "ttft_target_s": 3.0, "prefill": bounds, "decode": bounds, "shrink_window_s": 60.0,
        "shrink_cooldown_s": 10.0,
    }  # fmt: skip
    plan = replace(
        planned(autoscaling=scaling),
        prefill=PrefillPool(1, 1 << 17),
        decode=DecodePool(1),
        costs=StepCosts(start_s=5.0),
    )
    shape = replace(SHAPE, requests=600, seconds=200.0)
    report, model = run(plan, drawn(shape))
    assert report.answered == 600
    assert report.role_sizes["prefill"][1] > 3
    ended, sizes = [at for at, _, _ in model.figures.sizes][-1], model.figures.sizes
    still = run(replace(plan, config=planned().config), drawn(shape))[0]
    assert report.ttft_p50_s < still.ttft_p50_s / 3
    assert ended > 0
    assert len(sizes) > 3


def test_a_worker_that_changes_its_role_keeps_its_process_and_its_place() -> None:
    costs = StepCosts(start_s=40.0, role_change_s=3.0)
    model, name = ClusterModel(replace(planned(), costs=costs, places=6), drawn(SHAPE)), WorkerName("prefill-3")
    try:
        end = 10.0
        model.run(until_s=end)
        pools = model.pools
        worker = pools.workers[name, Incarnation(1)]
        pools.core.pools.change_role(name, Role.DECODE)
        pools.core.pools.add(WorkerName("prefill-9"), Role.PREFILL)
        while worker.key in pools.workers:
            model.run(until_s=(end := end + 0.25))
        begun, next_one = end, (name, Incarnation(2))
        assert worker.idle, "what it had has ended"
        while next_one not in pools.workers and end < 100.0:
            model.run(until_s=(end := end + 0.25))
            assert len(pools.workers) == 5 + (next_one in pools.workers)
        assert pools.workers[next_one].role is Role.DECODE
        assert costs.role_change_s - 0.25 <= end - begun <= costs.role_change_s + 0.5
        model.run()
        assert (WorkerName("prefill-9"), Incarnation(1)) not in pools.workers, "no place has become free for it"
        assert model.check() == []
        assert model.report().answered == SHAPE.requests
    finally:
        model.close()


def test_the_command_says_what_came_to_pass() -> None:
    said: list[str] = []
    assert simulate_scale(ScaleOptions(workers=4, requests=40, seconds=60.0), said.append)
    text = "\n".join(said)
    assert "2 prefill and 2 decode workers, policy cache_aware, seed 0" in text
    assert "40 sent, 40 answered, 0 refused, 0 failed" in text
    assert "ready workers, fewest and most: prefill 2 and 2, decode 2 and 2; 0 reversals" in text


def test_the_command_replays_a_trace_or_draws_in_its_shape() -> None:
    said: list[str] = []
    options = ScaleOptions(8, 30, policy="round_robin", seconds=30.0, trace=TRACE, replay=True)
    assert simulate_scale(options, said.append)
    assert [request.prompt for request in options.traffic()] == [line.input_length for line in read_trace(TRACE, 30)]
    assert "30 sent, 30 answered" in "\n".join(said)
    likely = {line.input_length for line in read_trace(TRACE)}
    assert {request.prompt for request in replace(options, replay=False, requests=3).traffic()} <= likely


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (ScaleOptions(workers=1, requests=10), "--workers must be 2 or more"),
        (ScaleOptions(workers=2, requests=0), "--requests must be 1 or more"),
        (ScaleOptions(workers=2, requests=1, seconds=0.0), "above 0 seconds"),
        (ScaleOptions(workers=2, requests=1, replay=True), "--replay needs --trace FILE"),
        (ScaleOptions(workers=2, requests=1, trace=TRACE, replay=True, seconds=-1.0), "--seconds must be above 0"),
        (ScaleOptions(workers=2, requests=1, trace=TRACE.parent), "--trace: "),
    ],
)
def test_what_cannot_be_simulated_is_said(options: ScaleOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        simulate_scale(options, lambda line: None)


def test_plans_that_cannot_run_are_said() -> None:
    with pytest.raises(ConfigError, match="workers must be 1 or more"):
        PrefillPool(0)
    with pytest.raises(ConfigError, match="must be above 0"):
        StepCosts(decode_base_s=0.0)
    with pytest.raises(ConfigError, match="places=3"):
        replace(planned(), places=3)


def test_the_page_of_the_simulator_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(shown, "docs/simulator.md", "exec"), {})
    assert "of 500 requests kept both targets" in capsys.readouterr().out
