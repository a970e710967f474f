"""The cores and memory of each node, and the share that a worker gets there: threads, pools, and host tier.

Every node is planned by its own cores and memory, which are measured once, before any of our workers runs there: the
memory that a worker sees as free later depends on the others. A node is planned for as many workers of each role as it
has places for (at most as many as are wanted), so that any of them fit there, and a worker that is started again gets
the same share as before.

All host tiers of a node have one budget, of which every worker gets the same multiple of its device pools.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from twinpool.cluster.assembly.device_cards import CardFacts, Dealt, cards_of
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import Role

if TYPE_CHECKING:
    from twinpool.cluster.assembly.memory_plan import MemoryPlan
    from twinpool.cluster.assembly.step_memory import StepMemory


CGROUP = Path("/sys/fs/cgroup")
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""The files with the limit and the use of memory in bytes, for cgroup v2 and v1."""


class MemoryShort(TwinpoolError):
    """Raised when weights and pools don't fit into free memory, the text says which sizes would; and for a node that
    lacks what `engine.device` asks for."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The resources of a node, measured before any worker of ours runs there."""

    host: str
    cores: int
    free: int
    """Bytes of memory that are free."""
    places: Mapping[Role, int]
    """Number of processes of each role that may be placed there: a worker takes one for each rank."""
    node_id: str = ""
    """The Ray node id; empty without Ray."""
    cards: tuple[CardFacts, ...] = ()
    """The GPUs that `engine.device` names there; none: its workers run on the CPU."""
    no_cards: str = ""
    """Why it has none of the GPUs that `engine.device` asks for, in words."""


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The share of a worker of one role on one node; it travels to the worker with its `WorkerPlan`."""

    threads: int
    """Threads that each rank computes with."""
    counts: Mapping[str, int]
    """Pages and slots that each pool can lease."""
    host_bytes: int
    """Bytes of the worker's host tier, all ranks together; 0: none."""
    copy_threads: bool = False
    """Whether a worker on a CPU copies and sends on threads of their own."""

    def applied_to(self, config: Config, role: Role) -> Config:
        """`config` with this share's threads and host tier, for a worker of `role`."""
        override = replace(config.override_for(role), host_bytes=self.host_bytes)
        copies: Literal["on", "off"] = "on" if self.copy_threads else "off"
        engine = replace(config.engine, threads=self.threads, copy_threads=copies)
        return replace(config, engine=engine).with_cache(role, override)


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The division of a node among workers."""

    facts: NodeFacts
    workers: Mapping[Role, int]
    """Number of workers of each role that the node is planned for."""
    threads: int
    """Threads that each rank computes with."""
    weights: int
    """Bytes of a worker's weights."""
    plans: Mapping[Role, MemoryPlan]
    """The memory plan of a worker of each role."""
    host_budget: int
    """Bytes that all host tiers of the node may take together, with the indices of their arenas; 0 where the
    configuration sets the host tier of a role (`cache.host_bytes`)."""
    host_bytes: Mapping[Role, int]
    """Bytes of the host tier of a worker of each role."""
    device_bytes: Mapping[Role, int] = field(default_factory=dict)
    """Bytes of its cards that the pools of a worker of each role may take; empty where they lie in host memory."""
    steps: Mapping[Role, StepMemory] = field(default_factory=dict)
    """What steps of a worker of each role take besides, on each rank."""
    dealt: Dealt = field(default_factory=dict)
    """The cards of the ranks of each worker; empty where there are none, or Ray deals them out."""
    copy_threads: bool = False
    """Whether its workers copy and send on threads of their own, if they compute on the CPU."""

    def sizes(self, role: Role) -> WorkerShare:
        return WorkerShare(self.threads, self.plans[role].counts, self.host_bytes[role], self.copy_threads)


def copies_beside(config: Config, cores: int, computing: int) -> bool:
    """Whether workers on a CPU copy and send on threads of their own (`engine.copy_threads`), on a node of so many
    `cores` with so many `computing` threads of all its ranks."""
    asked = config.engine.copy_threads
    return asked == "on" or (asked == "auto" and cores > computing)


def measured(places: Mapping[Role, int], node_id: str = "", device: str = "cpu") -> NodeFacts:
    """Measure the machine that this process runs on, with the GPUs that `device` (`engine.device`) names. Raises
    `ConfigError` where it has some that ``auto`` would be, and they can't be measured."""
    cards: tuple[CardFacts, ...] = ()
    no_cards = ""
    try:
        cards = cards_of(device)
    except ConfigError as error:
        if device == "auto":
            raise  # No reason to compute on its CPU.
        no_cards = str(error)
    return NodeFacts(socket.gethostname(), cores(), free_bytes(), dict(places), node_id, cards, no_cards)


def by_machine(nodes: Iterable[NodeFacts]) -> list[NodeFacts]:
    """Divide cores and memory among nodes that share a machine, since each of them has measured the whole machine. Its
    cards stay whole: Ray knows which node has which."""
    nodes = list(nodes)
    on_host = Counter(node.host for node in nodes)
    return [
        replace(node, cores=max(1, node.cores // on_host[node.host]), free=node.free // on_host[node.host])
        for node in nodes
    ]


def cores(cgroup: Path = CGROUP) -> int:
    """Number of cores that this process may use, by its CPU affinity or its control group's quota if that is less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(bound, math.ceil(int(quota) / int(period))))
    return bound


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of free memory: the machine's, or the rest of its control group's limit if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for most, used in MEMORY_FILES:
        limit, now = _read(cgroup / most), _read(cgroup / used)
        if limit.isdigit() and now.isdigit():
            # The page cache counts as used there, and is given up as soon as a process needs the memory.
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
