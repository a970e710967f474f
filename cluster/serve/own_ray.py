"""A Ray of the cluster's own: started for one run, or for a detached cluster, whose next supervisor takes it over.

Imports Ray.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.processes.run_folder import RunFiles
from twinpool.cluster.ray_nodes.ray_cluster import (
    OwnRay,
    end_kept_ray,
    join_kept_ray,
    leave_ray,
    ray_build,
    start_kept_ray,
    start_own_ray,
)
from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.preflight import ServePlan
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
