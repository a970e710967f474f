"""Runs of many seeds in several processes, each of which takes the next few seeds as soon as it is free."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import torch

from sim.run.run_scenario import ScenarioResult, run_plan
from sim.scenario.colocated import as_colocated
from sim.scenario.scenario import Scenario
from sim.scenario.scenario_draw import draw

_PORTION = 10


def plan_of(seed: int, *, colocated: bool = False) -> Scenario:
    """Draw the plan of a seed; `colocated`: of a cluster of colocated workers."""
    plan = draw(seed)
    return as_colocated(plan) if colocated else plan


def run_seed(seed: int, *, colocated: bool = False, keep_log: bool = False) -> ScenarioResult:
    """Draw the plan of a seed and run it."""
    return run_plan(plan_of(seed, colocated=colocated), keep_log=keep_log)


def run_seeds(seeds: Sequence[int], jobs: int, *, colocated: bool = False) -> Iterator[ScenarioResult]:
    """Run seeds in `jobs` processes; yields the results in the order of the seeds."""
    if jobs == 1 or len(seeds) <= _PORTION:
        yield from (run_seed(seed, colocated=colocated) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        waiting = iter(range(0, len(seeds), _PORTION))
        # Only a few portions ahead, so that a caller that stops early has not ordered all of them.
        ordered = [pool.submit(_portion, seeds[at : at + _PORTION], colocated) for at in islice(waiting, 3 * jobs)]
        while ordered:
            yield from ordered.pop(0).result()
            ordered += [pool.submit(_portion, seeds[at : at + _PORTION], colocated) for at in islice(waiting, 1)]


def _portion(seeds: Sequence[int], colocated: bool) -> list[ScenarioResult]:
    return [run_seed(seed, colocated=colocated) for seed in seeds]


def _one_thread() -> None:
    torch.set_num_threads(1)
