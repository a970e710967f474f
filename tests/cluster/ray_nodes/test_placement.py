"""What Ray is told about where a worker may not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinpool.cluster.assembly.node_shares import WorkerShare
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName

NODES = tuple(NodePlace(letter * 56, f"host-{letter}") for letter in "abc")
PLAN = WorkerPlan(WorkerName("decode-0"), Role.DECODE, Incarnation(1), Path("m"), Config(), {}, "", "", Path("logs"))


@pytest.mark.slow
def test_cordoned_and_unmeasured_nodes_are_left_out_by_a_selector_that_ray_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private.label_utils import validate_label_selector

    from twinpool.cluster.ray_nodes.worker_actor import NODE_LABEL
    from twinpool.cluster.ray_nodes.worker_actors import RayLauncher

    launcher = RayLauncher()
    monkeypatch.setattr(launcher, "nodes", lambda: NODES)
    sizes = WorkerShare(1, {}, 0)
    measured = replace(PLAN, by_node={node.node_id: sizes for node in NODES[:2]})
    for plan, avoid, only, out in (
        (PLAN, (), "", ""), (PLAN, ("host-a",), "", "a"), (PLAN, ("b" * 8, "host-a"), "", "ab"),
        (PLAN, ("host-z",), "", ""), (measured, (), "", "c"), (measured, ("host-b",), "", "bc"),
        (PLAN, (), "host-b", "ac"), (PLAN, ("host-a",), "c" * 8, "ab"),
    ):  # fmt: skip
        selector = launcher._elsewhere(plan, avoid, only)
        ids = ",".join(letter * 56 for letter in out)
        assert selector == ({NODE_LABEL: f"!in({ids})"} if out else {})
        assert not validate_label_selector(selector)
