"""Ten thousand simulated clusters with every fault, and bugs planted in them.

``make soak ARGS="tests/soak/test_ten_thousand_seeds.py"`` takes about an hour and a half on two cores, most of it for
the seeds. `twinpool sim --seed N` replays what is found.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.bugs.run import planted, seeds_to_find
from twinpool.sim.run.sim_command import ClusterKind, run_seeds
from twinpool.sim.scenario.scenario import KINDS

SEEDS, PORTION = 10_000, 500
JOBS = os.cpu_count() or 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_ten_thousand_seeds_violate_nothing(first: int) -> None:
    results = list(run_seeds(range(first, first + PORTION), JOBS))
    assert {r.seed: r.violations for r in results if r.violations} == {}
    met = sum((r.counts for r in results), Counter[str]())
    assert [kind for kind in KINDS if not met[kind]] == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(60, 3060, PORTION))
def test_three_thousand_seeds_of_colocated_workers_violate_nothing(first: int) -> None:
    results = list(run_seeds(range(first, first + PORTION), JOBS, ClusterKind.COLOCATED))
    assert {r.seed: r.violations for r in results if r.violations} == {}
    met = sum((r.counts for r in results), Counter[str]())
    assert min(met[what] for what in ("preemptions", "retractions", "migrated")) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", [bug.path for bug in planted()], ids=lambda path: path.stem)
def test_each_planted_bug_is_found_within_seven_hundred_seeds(bug: Path) -> None:
    seeds, violation = seeds_to_find(bug)
    assert seeds is not None, violation
