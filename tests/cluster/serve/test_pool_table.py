"""What `serve` shows of memory: one row a pool of each role, on one line of a usual terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.pool_sets import pool_sets
from twinpool.cluster.assembly.memory_plan import plan_memory
from twinpool.cluster.serve.preflight import ServeOptions, prepare
from twinpool.cluster.serve.terminal import pool_table
from twinpool.contracts.ids import PAIR, Role


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_each_pool_of_each_role_has_a_row_with_its_pages_bytes_and_what_for(host_bytes: int) -> None:
    assignments = (f"cache.host_bytes={host_bytes}", "cache.page_tokens=4", "cluster.host_memory_share=0")
    spec = pool_sets(4)["all"]
    demo = prepare(ServeOptions(port=0, assignments=assignments), 8 << 30)
    plans = {}
    for role in PAIR:
        plan = plan_memory(spec, demo.config, role, 32_768, 1 << 40)
        assert plan is not None
        plans[role] = plan
    out = io.StringIO()
    Console(file=out, width=80).print(pool_table(replace(demo, pool_set=spec), replace(demo.here, plans=plans)))
    lines = [line.split() for line in out.getvalue().splitlines() if line.split()[:1] in (["prefill"], ["decode"])]
    rows = [line for line in lines if line[1] != "steps"]
    assert [line[:6] for line in lines if line[1] == "steps"] == [
        [role, "steps", f"{steps.rows:,}", "rows", f"{steps.nbytes / (1 << 20):,.1f}", "MiB"]
        for role, steps in demo.here.steps.items()
    ]
    assert [(row[0], row[1]) for row in rows] == [(role, pool) for role in PAIR for pool in spec.by_name]
    for row in rows:
        count = plans[Role(row[0])].counts[row[1]]
        assert row[2:4] == [f"{count:,}", "slots" if row[1] == "state" else "pages"]
        assert row[5] == "MiB"
        assert ("positions" if row[1] == "full" else "requests,") in row
    assert ("host" in out.getvalue()) == bool(host_bytes)
