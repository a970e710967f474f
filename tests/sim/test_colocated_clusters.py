"""Simulated clusters of colocated workers: the plans of the same seeds, with both roles in one worker."""

from __future__ import annotations

import pytest

from twinpool.contracts.ids import Role
from twinpool.sim.run.sim_command import ClusterKind, plan_of, run_seed

BLOCK = 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, BLOCK))
def test_no_seed_violates_anything(first: int) -> None:
    results = [run_seed(seed, ClusterKind.COLOCATED) for seed in range(first, first + BLOCK)]
    assert {r.seed: r.violations for r in results if r.violations} == {}


def test_a_plan_for_colocated_workers_strikes_nobody_that_is_not_there() -> None:
    for seed in range(200):
        plan, split = plan_of(seed, ClusterKind.COLOCATED), plan_of(seed)
        assert plan.shape.workers == {Role.COLOCATED: split.shape.decode}
        assert plan.asks == split.asks
        routers = {f"router-{n}" for n in range(plan.shape.routers)}
        for fault in plan.faults:
            shape = plan.shapes[fault.model]
            names = {f"colocated-{n}" for n in range(shape.colocated)}
            ranks = {f"{name}.rank{n}" for name in names for n in range(1, shape.config["colocate"]["tp"])}
            for end in (fault.target, fault.other):
                name = end.removeprefix(f"{fault.model}/")
                assert name in {"", "*"} | routers | names | ranks or name.startswith("node-"), fault
            assert not fault.other or fault.other != fault.target
            assert fault.kind != "role"
