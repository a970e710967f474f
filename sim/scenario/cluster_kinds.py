"""The same plan for clusters of other workers: colocated ones, or decode workers that compute prompts, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twinpool.sim.scenario.scenario import ClusterShape, PlannedFault, Scenario


def as_colocated(plan: Scenario) -> Scenario:
    """Return the plan with colocated workers in place of both pools.

    They have decode's pools and ranks. Faults of a prefill or decode worker strike the colocated one of its number, and
    those between two workers that became one are left out. Where a worker was to change its role, it is drained.
    """
    shapes = {name: _colocated(shape, plan.seed) for name, shape in plan.shapes.items()}
    faults = [_moved(fault, shapes) for fault in plan.faults]
    kept = tuple(f for f in faults if not _pointless(f, shapes[f.model].config["decode"]["tp"]))
    return replace(plan, shape=shapes.pop(""), models=shapes, faults=kept)


def _colocated(shape: ClusterShape, seed: int) -> ClusterShape:
    decode = shape.config["decode"]
    colocate = {"prompt_tokens": 1 + seed % 8, "tp": decode["tp"], "cache": decode["cache"]}
    return replace(shape, colocated=shape.decode, config={**shape.config, "colocate": colocate})


def _moved(fault: PlannedFault, shapes: Mapping[str, ClusterShape]) -> PlannedFault:
    kind, lasts = ("drain", 1.0) if fault.kind == "role" else (fault.kind, fault.lasts)
    return replace(
        fault, kind=kind, lasts=lasts, target=_renamed(fault.target, shapes), other=_renamed(fault.other, shapes)
    )


def _renamed(name: str, shapes: Mapping[str, ClusterShape]) -> str:
    """The colocated worker, or rank of one, that has the place of `name`; other names stay."""
    model, slash, worker = name.rpartition("/")
    role, _, rest = worker.partition("-")
    if role not in ("prefill", "decode"):
        return name
    number, dot, rank = rest.partition(".")
    return f"{model}{slash}colocated-{int(number) % shapes[model].colocated}{dot}{rank}"


def _pointless(fault: PlannedFault, ranks: int) -> bool:
    """Whether nothing is left to strike: two ends have become one, or a rank is named that there isn't."""
    ends = [name for name in (fault.target, fault.other) if name]
    numbers = [int(rank) for name in ends if (rank := name.partition(".rank")[2])]
    return len(set(ends)) < len(ends) or any(number >= ranks for number in numbers)


def as_conditional(plan: Scenario) -> Scenario:
    """Return the plan with conditional disaggregation, under bounds that differ from seed to seed."""
    shapes = {name: _conditional(shape, plan.seed) for name, shape in plan.shapes.items()}
    return replace(plan, shape=shapes.pop(""), models=shapes)


def _conditional(shape: ClusterShape, seed: int) -> ClusterShape:
    bounds = {"step_tokens": shape.page_tokens * (1 + seed % 4), "local_tokens": 1 + 16 * (seed % 5)}
    return replace(shape, config={**shape.config, "disaggregation": {"mode": "conditional", **bounds}})
