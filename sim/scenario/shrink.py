"""Makes a failing plan smaller: fewer requests, fewer faults, a plainer cluster, as long as it still fails.

Delta debugging over the plan (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002): parts
of a list are left out, first halves, then quarters and so on, and stay out if the plan fails without them. The smaller
plan fails for a reason that can be read, though not always for the first plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from twinpool.sim.scenario.scenario import Scenario

T = TypeVar("T")
StillFails = Callable[[Scenario], bool]


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
