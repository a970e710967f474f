"""Arena agents on the nodes of a Ray cluster: one actor on each node that workers can be placed on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Container
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from twinpool.cluster.arena.arena_agent import ArenaAgent
from twinpool.cluster.arena.arena_client import forget
from twinpool.cluster.processes.process_ids import die_with_parent
from twinpool.cluster.ray_nodes.ray_facts import has_places
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import Incarnation, WorkerName

log = logging.getLogger("twinpool.arena")

LOOK_S = 2.0
"""Seconds between two looks for nodes that have joined or gone."""
IDLE_S = 60.0
"""Seconds without a worker's process after which a node's agent ends. A worker that has died is started again sooner,
and what it left is lost when that takes longer."""
REPLACE_S = 15.0
"""Seconds that an agent of another build may take to end once it was killed."""


PREFIX = "arena-agent."


def _named(node: str) -> str:
    """The name of a detached agent on a node."""
    return f"{PREFIX}{build_id()}.{node}"


class ArenaActor:
    """The arena agent of one node, on a thread of the actor's process."""

    def __init__(self, token: str) -> None:
        die_with_parent()
        self._token = token
        agent = _agent(token)
        threading.Thread(target=agent.serve, args=(os.eventfd(0),), name="arena-agent", daemon=True).start()

    def forget(self, name: str, before: int | None) -> None:
        forget(self._token, name, before)


def _agent(token: str) -> ArenaAgent:
    """The agent of this process, once the one that it replaces has ended. Raises `OSError` where that goes on."""
    deadline = time.monotonic() + REPLACE_S
    while True:
        try:
            return ArenaAgent(token)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class RayArenaAgents:
    """The `ArenaAgents` of a Ray cluster that this process has joined.

    The agents end when this process leaves Ray, unless they are detached. Ray restarts an agent that has died: unlike a
    worker, an agent has no incarnation, and live workers hand their segments to the next one.

    A node that has joined has an agent before a worker is placed there, and loses it when no worker has been there for
    `IDLE_S`: to an autoscaler of Ray, a node with an actor of any kind is never idle. The agent is back when a worker
    is.
    """

    def __init__(
        self, token: str, clock: Clock, in_use: Callable[[], Container[str]], *, detached: bool = False
    ) -> None:
        """`in_use`: tells the nodes, by Ray id, on which processes of workers are. `detached`: whether the agents
        outlive this process, and are those of the one before it, unless they are of another build: those it
        replaces."""
        self._token, self._clock, self._in_use = token, clock, in_use
        self._used_at: dict[str, float] = {}
        """When each node was last seen in use, or has joined."""
        self._named = detached
        self._actors: dict[str, Any] = {}
        self._next = clock.now()
        if detached:
            self._end_other_builds()

    def _end_other_builds(self) -> None:
        for name in ray.util.list_named_actors():
            if name.startswith(PREFIX) and not name.startswith(_named("")):
                log.info("arena agent is replaced", extra={"agent": name})
                with contextlib.suppress(ValueError):  # It has gone meanwhile.
                    ray.kill(ray.get_actor(name), no_restart=True)

    def poll(self) -> list[str]:
        if self._clock.now() < self._next:
            return []
        now, in_use = self._clock.now(), self._in_use()
        self._next = now + LOOK_S
        able = {node["NodeID"] for node in ray.nodes() if node["Alive"] and has_places(node["Resources"])}
        self._used_at = {node: now if node in in_use else self._used_at.get(node, now) for node in able}
        idle = {node for node, at in self._used_at.items() if now - at >= IDLE_S}
        for gone in self._actors.keys() - (able - idle):
            actor = self._actors.pop(gone)
            if gone in able:
                ray.kill(actor, no_restart=True)
                log.info("arena agent ends: no worker is there", extra={"node": gone})
        for node in able - idle - self._actors.keys():
            self._actors[node] = self._start(node)
            log.info("arena agent", extra={"node": node})
        return []

    def _start(self, node: str) -> Any:
        kept: dict[str, Any] = {}
        if self._named:
            kept = {"name": _named(node), "lifetime": "detached", "get_if_exists": True}
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
