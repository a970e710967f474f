"""The command `twinpool sim`: runs one seed and prints its log, or many and prints a summary.

Many seeds run in several processes, each of which takes the next few as soon as it is free.

`--shrink` makes a failing plan smaller: fewer requests, fewer faults, a plainer cluster, as long as it still fails.
That is delta debugging over the plan (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input",
2002): parts of a list are left out, first halves, then quarters and so on, and stay out if the plan fails without them.
The smaller plan fails for a reason that can be read, though not always for the first plan's.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from typing import Any, TypeVar

import torch

from twinpool.contracts.errors import ConfigError
from twinpool.sim.run.run_scenario import ScenarioResult, run_plan
from twinpool.sim.scenario.cluster_kinds import as_colocated, as_conditional
from twinpool.sim.scenario.scenario import KINDS, Scenario
from twinpool.sim.scenario.scenario_draw import draw

T = TypeVar("T")
StillFails = Callable[[Scenario], bool]
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


PrintLine = Callable[[str], None]
_MAX_SHOWN = 20


def sim(
    seed: int | None,
    seeds: str | None,
    jobs: int,
    shrinks: bool,
    first: bool,
    say: PrintLine,
    kind: ClusterKind = ClusterKind.POOLS,
) -> bool:
    """Run one seed or a range; True if nothing was violated. Raises `ConfigError` for arguments that don't fit."""
    if (seed is None) == (seeds is None):
        raise ConfigError("sim takes either --seed N, to replay one, or --seeds A..B, to run many")
    if jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, got {jobs}")
    torch.set_num_threads(1)
    if seed is not None:
        return _one(seed, shrinks, kind, say)
    if shrinks:
        raise ConfigError("--shrink makes one seed smaller: name it with --seed N")
    return _many(_range(seeds or ""), jobs, first, kind, say)


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    if not dots or not first.isdigit() or not last.isdigit() or int(last) < int(first):
        raise ConfigError(f"--seeds takes the first and the last seed, such as 0..999; got {text!r}")
    return range(int(first), int(last) + 1)


def _one(seed: int, shrinks: bool, kind: ClusterKind, say: PrintLine) -> bool:
    plan = plan_of(seed, kind)
    if shrinks:
        if not run_plan(plan).violations:
            say(f"seed {seed} violates nothing: there is nothing to shrink")
            return True
        plan = shrink(plan, lambda smaller: bool(run_plan(smaller).violations))
    for line in describe(plan):
        say(line)
    result = run_plan(plan, keep_log=True)
    for line in result.log:
        say(line)
    say(f"{result.events} events in {result.seconds:.1f} s of virtual time; {_counted(result.counts)}")
    for violation in result.violations:
        say(f"VIOLATION {violation}")
    return not result.violations


def describe(plan: Scenario) -> list[str]:
    """Describe the plan in lines that people can read."""
    shape = plan.shape
    workers = ", ".join(f"{many} {role}" for role, many in shape.workers.items())
    lines = [
        f"seed {plan.seed}: {workers}, pools {shape.pools}, plane {shape.plane}, "
        f"{shape.nodes} nodes, device {'late' if shape.adversarial else 'at once'}",
        f"config {shape.config}",
    ]
    for name, other in plan.models.items():
        workers = ", ".join(f"{many} {role}" for role, many in other.workers.items())
        lines += [f"model {name}: {workers}, pools {other.pools}", f"config {other.config}"]
    lines += [f"{fault.at:10.4f}  {fault}" for fault in plan.faults]
    lines += [
        f"{ask.at:10.4f}  request {ask.number}: {len(ask.prompt)} tokens, {ask.sampling.max_tokens} wanted"
        for ask in plan.asks
    ]
    return lines


def _many(seeds: range, jobs: int, first: bool, kind: ClusterKind, say: PrintLine) -> bool:
    began, counts, failed = time.monotonic(), Counter[str](), 0
    virtual, ran = 0.0, 0
    for result in run_seeds(seeds, jobs, kind):
        ran += 1
        counts.update(result.counts)
        virtual += result.seconds
        if result.violations:
            failed += 1
            if failed <= _MAX_SHOWN:
                say(f"seed {result.seed}: {result.violations[0]}")
            if first:
                break
    took = time.monotonic() - began
    say(f"{ran} seeds, {virtual:,.0f} s of virtual time in {took:.0f} s; {_counted(counts)}")
    say(f"{failed} seeds with violations" if failed else "no violation")
    return not failed


def _counted(counts: Counter[str]) -> str:
    faults = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind])
    others = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()) if name not in KINDS and n)
    return f"faults: {faults or 'none'}; met: {others or 'nothing'}"


def shrink(plan: Scenario, fails: StillFails) -> Scenario:
    """Find the smallest plan that still `fails`; `plan` itself must fail."""
    before = None
    while before != plan:
        before = plan
        plan = replace(plan, faults=_fewer(plan.faults, lambda kept, p=plan: fails(replace(p, faults=kept))))  # type: ignore[misc]
        plan = replace(plan, asks=_fewer(plan.asks, lambda kept, p=plan: fails(replace(p, asks=kept))))  # type: ignore[misc]
        for plainer in (*_plainer(plan), replace(plan, asks=tuple(replace(ask, reconnects=()) for ask in plan.asks))):
            if plainer != plan and fails(plainer):
                plan = plainer
    return plan


def _fewer(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Find a part of `items` that still fails and of which no single item can be left out."""
    kept, size = tuple(items), max(1, len(items) // 2)
    while kept:
        for at in range(0, len(kept), size):
            fewer = kept[:at] + kept[at + size :]
            if fails(fewer):
                kept = fewer
                break
        else:
            if size == 1:
                return kept
            size = max(1, size // 2)
            continue
        size = min(size, max(1, len(kept) // 2))
    return kept


def _plainer(plan: Scenario) -> list[Scenario]:
    """List plans that differ from this one by one simplification of the cluster each."""
    shape = plan.shape
    changes: list[dict[str, Any]] = [
        {"adversarial": False},
        {"prefill": max(1, shape.prefill - 1)},
        {"decode": max(1, shape.decode - 1)},
        {"colocated": max(1, shape.colocated - 1)} if shape.colocated else {},
        {"nodes": 1},
        {"routers": 1},
        {"pools": "full"},
        {"config": _with(shape.config, "prefill", tp=1)},
        {"config": _with(shape.config, "decode", tp=1)},
        {"config": _without(shape.config, "storage")},
        {"config": _without(shape.config, "storage", "prefetch", "host_bytes")},
    ]
    names = [f"{role}-{n}" for role, many in shape.workers.items() for n in range(many)]
    shapes = [replace(shape, **change) for change in changes]
    gone = [[n for n in names if int(n.rpartition("-")[2]) >= getattr(s, n.partition("-")[0])] for s in shapes]
    return [
        replace(plan, shape=s, faults=tuple(f for f in plan.faults if f.target not in g and f.other not in g))
        for s, g in zip(shapes, gone, strict=True)
    ]


def _with(config: dict[str, Any], section: str, **changed: Any) -> dict[str, Any]:
    return {**config, section: {**config[section], **changed}}


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {**config, "cache": {k: v for k, v in config["cache"].items() if k not in keys}}
