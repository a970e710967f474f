"""The command `twinpool sim`: runs one seed and prints its log, or many and prints a summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

from twinpool.contracts.errors import ConfigError
from twinpool.sim.run.run_scenario import run_plan
from twinpool.sim.run.run_seeds import ClusterKind, plan_of, run_seeds
from twinpool.sim.scenario.scenario import KINDS, Scenario
from twinpool.sim.scenario.shrink import shrink

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
