"""The Ray that a cluster runs on: one of its own, started for one run, or for a detached cluster, whose next supervisor
takes it over; or one that it has joined, whose nodes are each measured once, and divided among the workers that they
may take.

Imports Ray.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack

from twinpool.cluster.assembly.node_shares import MemoryShort
from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.processes.run_folder import RunFiles
from twinpool.cluster.ray_nodes.ray_cluster import (
    OwnRay,
    end_kept_ray,
    join_kept_ray,
    leave_ray,
    measure_nodes,
    ray_build,
    start_kept_ray,
    start_own_ray,
)
from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.preflight import ServePlan, on_device, weight_bytes
from twinpool.contracts.config.plane_choice import PlaneOfOneHost, check_hosts, with_plane
from twinpool.contracts.errors import ConfigError

log = logging.getLogger("twinpool.serve")


def own_ray(
    plan: ServePlan, folder: RunFiles, state: DetachedState | None, address: str, python: str, stack: ExitStack
) -> OwnRay:
    """The Ray of a cluster, joined; what ends it goes on `stack`. `address`: where it listens. `python`: the
    interpreter of its workers (`ray_cluster.join_ray`)."""
    config, dashboard = plan.config.cluster, plan.options.dashboard
    if config.ray_storage:
        stack.callback(_end_storage, folder, config.ray_storage)
    stack.callback(leave_ray)
    if state is None:
        started = start_own_ray(folder.temporary, dashboard)
        folder.owns_children()
        return started
    taken = None
    if state.ray:
        taken = join_kept_ray(folder.temporary, state.ray, python, RestartHistory(config))
    if taken is None:
        port = free_port(address, 0)
        state.ray, taken = start_kept_ray(folder.temporary, port, dashboard, config.ray_storage, RestartHistory(config))
        state.ray_build = ray_build()
        state.save()
    stack.callback(taken.close)
    return taken


def _end_storage(folder: RunFiles, storage: str) -> None:
    """End what a Ray with storage leaves behind. The rest of the cluster's end must not wait for that."""
    try:
        end_kept_ray(folder.temporary, storage)
    except ConfigError as error:
        log.warning(str(error))


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
