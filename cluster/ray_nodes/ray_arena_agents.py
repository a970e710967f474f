"""Arena agents on the nodes of a Ray cluster: one actor on each node that workers can be placed on."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.arena.arena_agent import ArenaAgent
from cluster.arena.arena_client import forget
from cluster.processes.process_ids import die_with_parent
from cluster.ray_nodes.worker_resources import has_places
from contracts.clock import Clock
from contracts.ids import Incarnation, WorkerName

log = logging.getLogger("twinpool.arena")

LOOK_S = 2.0
"""Seconds between two looks for nodes that have joined or gone."""


class ArenaActor:
    """The arena agent of one node, on a thread of the actor's process."""

    def __init__(self, token: str) -> None:
        die_with_parent()
        self._token = token
        agent = ArenaAgent(token)
        threading.Thread(target=agent.serve, args=(os.eventfd(0),), name="arena-agent", daemon=True).start()

    def forget(self, name: str, before: int | None) -> None:
        forget(self._token, name, before)


class RayArenaAgents:
    """The `ArenaAgents` of a Ray cluster that this process has joined.

    The agents end when this process leaves Ray, unless they are detached. Ray restarts an agent that has died: unlike a
    worker, an agent has no incarnation, and live workers hand their segments to the next one.
    """

    def __init__(self, token: str, clock: Clock, *, detached: bool = False) -> None:
        """`detached`: whether the agents outlive this process, and are those of the one before it."""
        self._token, self._clock = token, clock
        self._named = detached
        self._actors: dict[str, Any] = {}
        self._next = clock.now()

    def poll(self) -> list[str]:
        if self._clock.now() < self._next:
            return []
        self._next = self._clock.now() + LOOK_S
        able = {node["NodeID"] for node in ray.nodes() if node["Alive"] and has_places(node["Resources"])}
        for gone in self._actors.keys() - able:
            del self._actors[gone]
        for node in able - self._actors.keys():
            self._actors[node] = self._start(node)
            log.info("arena agent", extra={"node": node})
        return []

    def _start(self, node: str) -> Any:
        kept: dict[str, Any] = {}
        if self._named:
            kept = {"name": f"arena-agent.{node}", "lifetime": "detached", "get_if_exists": True}
        actor = ray.remote(ArenaActor).options(
            **kept,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return actor.remote(self._token)

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        for actor in self._actors.values():
            actor.forget.remote(name, before)

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
