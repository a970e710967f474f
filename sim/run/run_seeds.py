"""Runs of many seeds in several processes, each of which takes the next few seeds as soon as it is free."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from itertools import islice

import torch

from twinpool.sim.run.run_scenario import ScenarioResult, run_plan
from twinpool.sim.scenario.colocated import as_colocated
from twinpool.sim.scenario.conditional import as_conditional
from twinpool.sim.scenario.scenario import Scenario
from twinpool.sim.scenario.scenario_draw import draw

_PORTION = 10


class ClusterKind(StrEnum):
    """What the workers of a plan's cluster are."""

    POOLS = "pools"
    COLOCATED = "colocated"
    """Colocated workers, in place of both pools."""
    CONDITIONAL = "conditional"
    """Two pools, of which the decode workers compute prompts, too."""


def plan_of(seed: int, kind: ClusterKind = ClusterKind.POOLS) -> Scenario:
    """Draw the plan of a seed."""
    plan = draw(seed)
    match kind:
        case ClusterKind.POOLS:
            return plan
        case ClusterKind.COLOCATED:
            return as_colocated(plan)
        case ClusterKind.CONDITIONAL:
            return as_conditional(plan)


def run_seed(seed: int, kind: ClusterKind = ClusterKind.POOLS, *, keep_log: bool = False) -> ScenarioResult:
    """Draw the plan of a seed and run it."""
    return run_plan(plan_of(seed, kind), keep_log=keep_log)


def run_seeds(seeds: Sequence[int], jobs: int, kind: ClusterKind = ClusterKind.POOLS) -> Iterator[ScenarioResult]:
    """Run seeds in `jobs` processes; yields the results in the order of the seeds."""
    if jobs == 1 or len(seeds) <= _PORTION:
        yield from (run_seed(seed, kind) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        waiting = iter(range(0, len(seeds), _PORTION))
        # Only a few portions ahead, so that a caller that stops early has not ordered all of them.
        ordered = [pool.submit(_portion, seeds[at : at + _PORTION], kind) for at in islice(waiting, 3 * jobs)]
        while ordered:
            yield from ordered.pop(0).result()
            ordered += [pool.submit(_portion, seeds[at : at + _PORTION], kind) for at in islice(waiting, 1)]


def _portion(seeds: Sequence[int], kind: ClusterKind) -> list[ScenarioResult]:
    return [run_seed(seed, kind) for seed in seeds]


def _one_thread() -> None:
    torch.set_num_threads(1)
