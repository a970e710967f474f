"""The same plan for a cluster of colocated workers: one for each decode worker, and every fault strikes one of them."""

from __future__ import annotations

from dataclasses import replace

from twinpool.sim.scenario.scenario import PlannedFault, Scenario


def as_colocated(plan: Scenario) -> Scenario:
    """Return the plan with colocated workers in place of both pools.

    They have decode's pools and ranks. Faults of a prefill or decode worker strike the colocated one of its number, and
    those between two workers that became one are left out. Where a worker was to change its role, it is drained.
    """
    shape = plan.shape
    count = shape.decode
    decode = shape.config["decode"]
    colocate = {"prompt_tokens": 1 + plan.seed % 8, "tp": decode["tp"], "cache": decode["cache"]}
    config = {**shape.config, "colocate": colocate}
    faults = [_moved(fault, count) for fault in plan.faults]
    kept = tuple(f for f in faults if not _pointless(f, decode["tp"]))
    return replace(plan, shape=replace(shape, colocated=count, config=config), faults=kept)


def _moved(fault: PlannedFault, count: int) -> PlannedFault:
    kind, lasts = ("drain", 1.0) if fault.kind == "role" else (fault.kind, fault.lasts)
    return replace(
        fault, kind=kind, lasts=lasts, target=_renamed(fault.target, count), other=_renamed(fault.other, count)
    )


def _renamed(name: str, count: int) -> str:
    """The colocated worker, or rank of one, that has the place of `name`; other names stay."""
    role, _, rest = name.partition("-")
    if role not in ("prefill", "decode"):
        return name
    number, dot, rank = rest.partition(".")
    return f"colocated-{int(number) % count}{dot}{rank}"


def _pointless(fault: PlannedFault, ranks: int) -> bool:
    """Whether nothing is left to strike: two ends have become one, or a rank is named that there isn't."""
    ends = [name for name in (fault.target, fault.other) if name]
    numbers = [int(rank) for name in ends if (rank := name.partition(".rank")[2])]
    return len(set(ends)) < len(ends) or any(number >= ranks for number in numbers)
