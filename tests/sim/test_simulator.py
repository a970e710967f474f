"""What the simulator promises: runs without a violation, the same run for the same seed, and smaller plans."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from router.request import Request
from sim.command import sim
from sim.many import run_seed, summed
from sim.plan import KINDS, Fault, Plan, draw
from sim.run import run_plan
from sim.shrink import shrink

ROOT = Path(__file__).resolve().parents[2]


BLOCKS, BLOCK = 8, 25


@pytest.fixture(scope="module")
def met() -> Counter[str]:
    """What the seeds of this file have met so far."""
    return Counter()


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_two_hundred_seeds_violate_nothing(block: int, met: Counter[str]) -> None:
    results = [run_seed(seed) for seed in range(block * BLOCK, (block + 1) * BLOCK)]
    assert {r.seed: r.violations for r in results if r.violations} == {}
    met.update(summed(results))
    met["seeds"] += len(results)


def test_two_hundred_seeds_meet_every_fault_and_every_end(met: Counter[str]) -> None:
    if met["seeds"] < BLOCKS * BLOCK:
        pytest.skip("the seeds have not been run here")
    assert [kind for kind in KINDS if not met[kind]] == []
    wanted = ("answered", "left", "stopped", "late", "replays", "hit_tokens_host", "pages_damaged", "pages_evicted")
    assert [what for what in wanted if not met[what]] == [], met


@pytest.mark.slow
def test_the_same_seed_gives_the_same_log_in_processes_that_hash_differently() -> None:
    """Nothing hangs on the order of a set, on an address or on the time of day."""
    # Seeds that between them have every plane, late devices, tiers, storage and most faults.
    replay = "from sim.many import run_seed\nfor n in range(12): print(*run_seed(n, keep_log=True).log, sep='\\n')"
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
    right = Request.move

    def drawing_anew(self: Request, name: str) -> None:
        right(self, name)
        if name == "replay":
            self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)

    monkeypatch.setattr(Request, "move", drawing_anew)
    failing = next(plan for plan in map(draw, range(100)) if run_plan(plan).violations)
    smaller = shrink(failing, lambda plan: bool(run_plan(plan).violations))
    assert run_plan(smaller).violations
    assert len(smaller.asks) <= 2
    assert len(smaller.faults) <= 2
    monkeypatch.undo()
    assert run_plan(smaller).violations == ()


def test_a_plan_is_made_as_small_as_its_failure_allows() -> None:
    plan = next(p for p in map(draw, range(100)) if len(p.faults) > 5 and len(p.asks) > 5)
    wanted = {plan.faults[1], plan.faults[4]}

    def fails(smaller: Plan) -> bool:
        return wanted <= set(smaller.faults) and plan.asks[3] in smaller.asks

    smaller = shrink(replace(plan, shape=replace(plan.shape, prefill=9, decode=9)), fails)
    assert set(smaller.faults) == wanted
    assert smaller.asks == (plan.asks[3],)


def test_a_fault_is_readable() -> None:
    assert str(Fault("stall", 1.0, "prefill-0", "router-0", 2.5)) == "stall prefill-0 and router-0 for 2.50 s"


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
