"""What each node has for workers, and what a worker gets there: threads, pools, and its part of the host tier.

A node's own cores and memory count, not those of the machine that `serve` runs on, and they are measured once, before
any of our workers runs there: what a worker sees as free later depends on the others. A node is planned for as many
workers of each role as it has places for (at most as many as there are), so that whichever of them land there fit, and
one that is started again gets the same as before.

The host tier has one budget a node, of which every worker gets the same multiple of its device pools.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.config.cache_config import CacheOverride
from contracts.config.cluster_config import Config
from contracts.errors import TwinpoolError
from contracts.ids import Role

if TYPE_CHECKING:
    from cluster.assembly.memory_plan import MemoryPlan


CGROUP = Path("/sys/fs/cgroup")
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use, of both versions of control groups."""


class MemoryShort(TwinpoolError):
    """Raised when weights and pools can't fit into the memory that is free."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node before any worker of ours runs there."""

    host: str
    cores: int
    free: int
    """Bytes of memory that are free."""
    places: Mapping[Role, int]
    """Processes of each role that may be placed there: a worker takes one a rank."""
    node_id: str = ""
    """Ray's; empty without Ray."""


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What a worker of one role gets on one node; travels to it with its plan."""

    threads: int
    counts: Mapping[str, int]
    """Pages and slots that each pool can lease."""
    host_bytes: int
    """Of its host tier; 0: none."""

    def applied_to(self, config: Config, role: Role) -> Config:
        """The configuration of such a worker."""
        section = config.prefill if role is Role.PREFILL else config.decode
        override: CacheOverride = replace(section.cache, host_bytes=self.host_bytes)
        engine = replace(config.engine, threads=self.threads)
        if role is Role.PREFILL:
            return replace(config, engine=engine, prefill=replace(config.prefill, cache=override))
        return replace(config, engine=engine, decode=replace(config.decode, cache=override))


@dataclass(frozen=True, slots=True)
class NodeShare:
    """How a node is divided."""

    facts: NodeFacts
    workers: Mapping[Role, int]
    """Workers that it is planned for."""
    threads: int
    weights: int
    """Bytes of a worker's weights."""
    plans: Mapping[Role, MemoryPlan]
    """The pools of a worker of each role."""
    host_budget: int
    """Bytes that all host tiers of the node may take together, with their indices; 0 where the configuration gives each
    worker its own."""
    host_bytes: Mapping[Role, int]
    """The host tier of a worker of each role."""

    def sizes(self, role: Role) -> WorkerShare:
        return WorkerShare(self.threads, self.plans[role].counts, self.host_bytes[role])


def measured(places: Mapping[Role, int], node_id: str = "") -> NodeFacts:
    """The facts of the machine that this runs on."""
    return NodeFacts(socket.gethostname(), cores(), free_bytes(), dict(places), node_id)


def by_machine(nodes: Iterable[NodeFacts]) -> list[NodeFacts]:
    """Nodes that share a machine, each with its part of it: they have measured the whole."""
    nodes = list(nodes)
    on_host = Counter(node.host for node in nodes)
    return [
        replace(node, cores=max(1, node.cores // on_host[node.host]), free=node.free // on_host[node.host])
        for node in nodes
    ]


def cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: those it is bound to, or what its control group grants of their time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(bound, math.ceil(int(quota) / int(period))))
    return bound


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that is free: the machine's, or what is left of its control group's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for most, used in MEMORY_FILES:
        limit, now = _read(cgroup / most), _read(cgroup / used)
        if limit.isdigit() and now.isdigit():
            # What files have cached counts as used there, and goes as soon as somebody needs the room.
            free = min(free, max(0, int(limit) - int(now) + _inactive_files(cgroup)))
    return free


def _inactive_files(cgroup: Path) -> int:
    for path in (cgroup / "memory.stat", cgroup / "memory" / "memory.stat"):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file") and value.isdigit():
                return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
