"""The nodes of a Ray that a cluster has joined: each is measured once, and divided among the workers that it may take.

Imports Ray.
"""

from __future__ import annotations

import dataclasses

from twinpool.cluster.assembly.node_shares import MemoryShort
from twinpool.cluster.ray_nodes.ray_cluster import measure_nodes
from twinpool.cluster.serve.preflight import ServePlan, on_device, weight_bytes
from twinpool.contracts.config.plane_choice import PlaneOfOneHost, check_hosts, with_plane


class JoinedNodes:
    """What is known of the nodes beside their shares, which the plan has."""

    def __init__(self) -> None:
        self._refused: set[str] = set()
        """Nodes that are too small for a worker, or out of the plane's reach, by Ray id."""

    def measure(self, plan: ServePlan) -> tuple[ServePlan, list[str]]:
        """Measure and divide nodes that have joined since the last call; returns the plan with their shares, and a line
        for each that can't take a worker."""
        refused = []
        nodes = measure_nodes({*plan.shares, *self._refused}, plan.config.engine.device)
        if nodes:
            # The first nodes decide: numerics of a GPU and of a CPU are of two classes.
            config = with_plane(on_device(plan.config, all(facts.cards for facts in nodes)), one_host=False)
            plan = dataclasses.replace(plan, config=config, weights=weight_bytes(plan.spec, config))
        for facts in nodes:
            try:
                check_hosts(plan.config, {facts.host, *(share.facts.host for share in plan.shares.values())})
                share = plan.divide(facts)
            except (MemoryShort, PlaneOfOneHost) as error:
                self._refused.add(facts.node_id)
                refused.append(f"node {facts.host} ({facts.node_id[:8]}) takes no worker: {error}")
            else:
                plan = dataclasses.replace(plan, shares={**plan.shares, facts.node_id: share})
        return plan, refused
