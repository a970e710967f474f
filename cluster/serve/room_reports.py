"""What the nodes of a plan have for workers, as the supervisor tells the controller (`cluster.controller.node_room`).

The numbers are those by which `cluster.serve.memory_fit` has divided the nodes, so what `serve` would refuse is what is
refused later.
"""

from __future__ import annotations

from collections.abc import Callable

from twinpool.cluster.assembly.node_shares import NodeShare
from twinpool.cluster.controller.node_room import ANY_NUMBER, ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config

LOOK_S = 2.0
"""Seconds between two looks at the memory that is free now."""
NEWS_BYTES = 64 << 20
"""Bytes by which free memory must have changed to be told again."""
MIN_STARTS = 2


class RoomReports:
    """Tells what has changed. Used from one thread."""

    def __init__(self, plan: Callable[[], ServePlan], free: Callable[[], int], clock: Clock) -> None:
        """`free`: bytes of this machine's memory that are free now; only asked where all workers run here."""
        self._plan, self._free, self._clock = plan, free, clock
        self._told: ServePlan | None = None
        self._free_told = 0
        self._look_at = clock.now()

    def changed(self) -> ClusterRoom | None:
        """What the nodes have, where that is news since the last call; else None."""
        plan, now = self._plan(), self._clock.now()
        if plan is self._told and now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        free = self._free() if "" in plan.shares else None
        if plan is self._told and (free is None or abs(free - self._free_told) < NEWS_BYTES):
            return None
        self._told, self._free_told = plan, free or 0
        return cluster_room(plan, free)


def cluster_room(plan: ServePlan, free: int | None = None) -> ClusterRoom:
    """What the nodes of `plan` have; `free`: bytes that are free on this machine now, None where that doesn't count."""
    joined = plan.options.ray_address is not None
    nodes = tuple(node_room(share, plan.config, free) for share in plan.shares.values())
    return ClusterRoom(nodes, grows=joined and plan.config.cluster.wait_for_nodes)


def node_room(share: NodeShare, config: Config, free: int | None = None) -> NodeRoom:
    """What a node has for workers by its division."""
    from twinpool.cluster.serve.memory_fit import max_bytes, shared_weights

    facts, cluster = share.facts, config.cluster
    roles: dict[str, RoleRoom] = {
        role: RoleRoom(
            max_bytes(share, config, role),
            config.ranks_for(role),
            planned,
            facts.places.get(role, 0) if facts.node_id else None,
            config.dp_for(role),
        )
        for role, planned in share.workers.items()
    }
    planned_bytes = sum(room.planned * room.nbytes for room in roles.values())
    return NodeRoom(
        NodePlace(facts.node_id, facts.host),
        # The plan was found to fit, with some bytes of indices and roundings that are not counted here.
        max(facts.free - shared_weights(share, config), planned_bytes),
        cluster.workers_per_core * facts.cores or ANY_NUMBER,
        cluster.starts_at_once or max(MIN_STARTS, facts.cores // 2),
        roles,
        tuple(share.dealt) if share.dealt else None,
        free,
    )
