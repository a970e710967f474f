"""What the simulator promises: runs without a violation, the same run for the same seed, and smaller plans."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.sim.reach import counted, known, moves_of_tables
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.models_app import ModelSwitch
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.sim.run.run_scenario import run_plan
from twinpool.sim.run.sim_command import run_seed, shrink, sim
from twinpool.sim.scenario.scenario import KINDS, PlannedFault, Scenario
from twinpool.sim.scenario.scenario_draw import MODELS, SHARED, draw

ROOT = Path(__file__).resolve().parents[2]


SEEDS: list[int] = known()["seeds"]
"""Few seeds that reach what 0..399 reach: `tests/sim/reach.py` chooses them."""
BLOCK = 5
OFTEN = {
    "answered": 300, "left": 10, "stopped": 5, "late": 2, "replays": 50, "migrated": 2, "retractions": 50,
    "resumptions": 30, "recomputed": 5, "pressed_out": 10, "pressed_seeds": 5, "hit_tokens_host": 50,
    "hit_tokens_storage": 10, "pages_evicted": 200, "pages_invalidated": 5, "pages_damaged": 3, "preemptions": 3,
    "audited": 30, "arena_pages_adopted": 5, "salted": 20, "prioritised": 20, "penalised": 20, "biased": 20,
    "held_open": 1, "logprobs": 20, "scored": 10, "chosen_again": 10, "late_orders": 100, "cancelled_running": 1,
    "damaged_writes": 2, "damaged_metadata": 2, "damaged_notices": 2, "killed_in_write": 1,
    "stores_failed": 2, "stores_truncated": 2, "stores_reordered": 2, "shed": 5, "refused_early": 3,
    "of_other_weights": 20, "ended_by_change": 3, "background": 20,
    "answered_by_another_model": 30, "woken": 3,
    "came_back": 20, "adapted": 20, "resumed_elsewhere": 10, "reconnects": 40, "superseded": 3,
}  # fmt: skip
"""How often the chosen seeds meet each kind of thing at least."""


@dataclass
class Met:
    """What the seeds of this file have met so far."""

    counts: Counter[str] = field(default_factory=Counter)
    reached: set[str] = field(default_factory=set)
    seeds: int = 0


@pytest.fixture(scope="module")
def met() -> Met:
    return Met()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SEEDS), BLOCK))
def test_the_chosen_seeds_violate_nothing(first: int, met: Met) -> None:
    with moves_of_tables(met.reached):
        results = [run_seed(seed) for seed in SEEDS[first : first + BLOCK]]
    assert {r.seed: r.violations for r in results if r.violations} == {}
    for result in results:
        met.counts.update(result.counts)
    met.reached.update(*(counted(result) for result in results))
    met.seeds += len(results)


def test_the_chosen_seeds_reach_what_four_hundred_do(met: Met) -> None:
    """Every move of a state table and every count that several of 0..399 come to. Where this fails after a change that
    is right, choose anew: `python tests/sim/reach.py --choose`."""
    if met.seeds < len(SEEDS):
        pytest.skip("the seeds have not been run here")
    assert sorted(set(known()["reached"]) - met.reached) == []
    assert [kind for kind in KINDS if not met.counts[kind]] == []


def test_the_chosen_seeds_meet_each_kind_of_thing_often_enough(met: Met) -> None:
    if met.seeds < len(SEEDS):
        pytest.skip("the seeds have not been run here")
    assert {what: (met.counts[what], k) for what, k in OFTEN.items() if met.counts[what] < k} == {}


@pytest.mark.slow
def test_plans_draw_all_that_they_can_draw() -> None:
    """Of a hundred plans, which are not run."""
    plans = [draw(seed) for seed in range(100)]
    asks = [ask.sampling for plan in plans for ask in plan.asks]
    assert sum(plan.shape.pressed for plan in plans) == 34, "memory is short in every third"
    assert sum(max(plan.shape.config[role]["tp"] for role in ("prefill", "decode")) > 1 for plan in plans) >= 15
    plain = SamplingParams(1)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "logit_bias", "allowed_token_ids", "min_tokens", "stop_token_ids", "logprobs",
                 "prompt_logprobs", "choice"):  # fmt: skip
        assert sum(getattr(ask, name) != getattr(plain, name) for ask in asks) >= 20, name
    drawn = {name for name in SamplingParams.__struct_fields__ if len({getattr(ask, name) for ask in asks}) > 1}
    # No simulated worker answers with a vector, or has experts: nothing that a simulation looks for hangs on these.
    unsimulated = {"pooling", "routed_experts"}
    assert drawn == set(SamplingParams.__struct_fields__) - unsimulated, (
        "a parameter that no plan draws isn't simulated"
    )
    assert len({ask.salt for plan in plans for ask in plan.asks}) > 1
    assert len({ask.priority for plan in plans for ask in plan.asks}) > 1
    halts = [fault.lasts for plan in plans for fault in plan.faults if fault.kind == "halt"]
    # A lease of 2 s, and what a node takes to carry out a kill.
    assert min(halts) < 2.0
    assert max(halts) > 4.0 + max(plan.shape.kill_s for plan in plans if plan.shape.plane == "shm")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_log_in_processes_that_hash_differently() -> None:
    """Nothing hangs on the order of a set, on an address or on the time of day."""
    # Seeds that between them have every plane, late devices, tiers, storage and most faults.
    replay = (
        "from twinpool.sim.run.sim_command import run_seed\n"
        "for n in range(12): print(*run_seed(n, keep_log=True).log, sep='\\n')"
    )
    logs = []
    for hashing in ("1", "2"):
        outside = {"PYTHONHASHSEED": hashing, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        ran = subprocess.run(
            [sys.executable, "-c", replay], env=outside, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        logs.append(ran.stdout)
    assert len(logs[0].splitlines()) > 1000
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_d5_a_failover_that_draws_anew_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator sees an engine whose draws depend on more than seed and position."""
    right = RoutedRequest.step

    def drawing_anew(self: RoutedRequest, name: str) -> None:
        right(self, name)
        if name == "replay":
            self.sampling = structs.replace(self.sampling, seed=self.sampling.seed + 1)

    monkeypatch.setattr(RoutedRequest, "step", drawing_anew)
    # Where memory is short, or nothing else goes wrong, it takes many requests for one to be begun again; so it may
    # where workers lose each other, or leave in order, or a rank of one of them ends.
    roomy = (plan for plan in map(draw, range(100)) if not plan.shape.pressed)
    striking = (plan for plan in roomy if not {"partition", "drain", "rank"} & {fault.kind for fault in plan.faults})
    failing = next(
        plan for plan in striking if run_plan(plan).violations and not run_plan(replace(plan, faults=())).violations
    )
    smaller = shrink(failing, lambda plan: bool(run_plan(plan).violations))
    assert run_plan(smaller).violations
    assert len(smaller.asks) <= 3, "the one that is begun again, and those whose memory it lacks"
    assert len(smaller.faults) <= 2
    monkeypatch.undo()
    assert run_plan(smaller).violations == ()


@pytest.mark.slow
def test_plans_have_several_models_each_with_a_cluster_faults_and_adapters_of_its_own() -> None:
    plans = [plan for plan in map(draw, range(400)) if plan.models]
    assert 25 <= len(plans) <= 80
    assert any(len(plan.models) == 2 for plan in plans)
    sleepy = [name for plan in plans for name, shape in plan.shapes.items() if "cluster" in shape.config]
    assert sleepy.count("") >= 5
    assert len(sleepy) - sleepy.count("") >= 5
    asks = [(plan, ask) for plan in plans for ask in plan.asks]
    assert {ask.model for _, ask in asks} == {"", *MODELS}
    assert sum(bool(ask.model and ask.sampling.adapter) for _, ask in asks) >= 20
    for plan, ask in asks:
        served = config_from_dict({"adapters": plan.shapes[ask.model].config.get("adapters", {})}).adapters.configured
        assert ask.sampling.adapter is None or ask.sampling.adapter.name in served
    struck = {fault.kind for plan in plans for fault in plan.faults if fault.model}
    assert struck >= {"crash", "drain", "weights", "controller", "restart"}
    assert not struck & set(SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the first one", "another"])
def test_a_request_that_reaches_another_model_is_found(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(plan for plan in map(draw, range(100)) if plan.models and any(ask.model for ask in plan.asks))
    plan = replace(plan, faults=())
    assert run_plan(plan).violations == ()
    right = ModelSwitch.named

    def wrong(self: ModelSwitch, model: object) -> RouterService:
        found = right(self, model)
        if which == "another":
            return self.services[(self.services.index(found) + 1) % len(self.services)]
        return self.lead

    monkeypatch.setattr(ModelSwitch, "named", wrong)
    assert any("of another model" in line for line in run_plan(plan).violations)


def test_a_plan_is_made_as_small_as_its_failure_allows() -> None:
    plan = next(p for p in map(draw, range(100)) if len(p.faults) > 5 and len(p.asks) > 5)
    wanted = {plan.faults[1], plan.faults[4]}

    def fails(smaller: Scenario) -> bool:
        return wanted <= set(smaller.faults) and plan.asks[3] in smaller.asks

    smaller = shrink(replace(plan, shape=replace(plan.shape, prefill=9, decode=9)), fails)
    assert set(smaller.faults) == wanted
    assert smaller.asks == (plan.asks[3],)


def test_a_fault_is_readable() -> None:
    assert str(PlannedFault("stall", 1.0, "prefill-0", "router-0", 2.5)) == "stall prefill-0 and router-0 for 2.50 s"


def test_the_log_of_a_seed_tells_of_requests_faults_and_ends() -> None:
    said: list[str] = []
    assert sim(3, None, 1, False, False, said.append)
    assert any("asks r0.1" in line for line in said)
    assert any("fault" in line for line in said)
    assert said[-1].split()[1] == "events"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((None, None, 1, False), "either --seed N"),
        ((1, "1..2", 1, False), "either --seed N"),
        ((None, "5..1", 1, False), "0..999"),
        ((None, "five", 1, False), "0..999"),
        ((None, "1..2", 0, False), "--jobs"),
        ((None, "1..2", 1, True), "--shrink"),
    ],
)
def test_what_cannot_be_asked_of_the_simulator_is_refused_in_words(
    arguments: tuple[int | None, str | None, int, bool], word: str
) -> None:
    with pytest.raises(ConfigError, match=word.replace(".", r"\.")):
        sim(*arguments, False, lambda line: None)
