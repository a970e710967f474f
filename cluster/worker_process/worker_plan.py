"""What a worker's process is told, and how it says that it ended."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.assembly.node_shares import WorkerShare
from cluster.processes.process_ids import start_time
from cluster.worker_process.worker_thread import WorkerEnd
from contracts.clock import SystemClock
from contracts.config.cluster_config import Config
from contracts.errors import ConfigError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.interfaces.worker_interface import Worker

if TYPE_CHECKING:
    from cluster.arena.arena_client import ArenaProvider


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All that a worker's process needs to know; travels to it by value."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    model: Path
    config: Config
    counts: dict[str, int]
    """Pages and slots that each pool can lease."""
    host: str
    """Address its services bind to and are reached at; empty: its Ray node's."""
    controller: str
    """The controller's endpoint."""
    logs: Path
    rank: int = 0
    """Which of the worker's tensor-parallel ranks this process is; 0 is the leader."""
    meeting: str = field(default="", repr=False)
    """Hex: by which the ranks of this incarnation find and know each other; empty where there is one."""
    node_id: str = ""
    """The Ray node that it runs on."""
    arena: str = field(default="", repr=False)
    """Hex: the token of the agents that keep host memory; empty where there are none."""
    secret: str = field(default="", repr=False)
    """Hex; what workers authenticate each other with where they don't meet on loopback."""
    by_node: Mapping[str, WorkerShare] = field(default_factory=dict)
    """By Ray node id: what it gets there, which `counts` and `config` say where there is one node only."""

    def on(self, node_id: str) -> WorkerPlan:
        """The plan for the node that it has landed on. Raises `ConfigError` for one that it was not planned for."""
        plan = dataclasses.replace(self, node_id=node_id)
        if not self.by_node:
            return plan
        sizes = self.by_node.get(node_id)
        if sizes is None:
            raise ConfigError(f"node {node_id[:8]} was not measured before this start, which is tried again")
        config = sizes.applied_to(self.config, self.role)
        return dataclasses.replace(plan, config=config, counts=dict(sizes.counts), by_node={})


BuildWorker = Callable[[WorkerPlan], Worker]


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a worker's process ended."""

    end: WorkerEnd
    reason: str


def arenas_of(plan: WorkerPlan) -> ArenaProvider:
    """Where its ranks get memory that outlives them."""
    from cluster.arena.arena_client import ArenaClient

    return ArenaClient(plan.arena, plan.name, plan.incarnation, SystemClock(), time.sleep)


def exit_file(logs: Path, name: WorkerName, incarnation: Incarnation) -> Path:
    """Where an incarnation writes why it ended; absent when it was killed."""
    return logs / f".{name}.{incarnation}.exit"


def write_exit(plan: WorkerPlan, reason: str) -> None:
    """Whole or not at all: this process may be killed while it writes."""
    path = exit_file(plan.logs, plan.name, plan.incarnation)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(" ".join(reason.split()))
    unfinished.replace(path)


def node_name() -> str:
    """This machine, as operators know it."""
    return socket.gethostname()


def process_mark() -> tuple[int, int]:
    """This process's pid and start time."""
    return os.getpid(), start_time(os.getpid()) or 0
