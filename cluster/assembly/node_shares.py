"""What a node has for workers (cores, memory, cards), and each worker's share of it.

*Cores and memory.* A worker's share is threads, pools, and host tier. Every node is planned by its own cores and
memory, which are measured once, before any of our workers runs there: the memory that a worker sees as free later
depends on the others. A node is planned for as many workers of each role as it has places for (at most as many as are
wanted), so that any of them fit there, and a worker that is started again gets the same share as before.

All host tiers of a node have one budget, of which every worker gets the same multiple of its device pools.

*Cards* (GPUs) are dealt to ranks. Ranks that are dealt the same card have equal parts of what is free on it, whatever
their roles. Of its part a rank's weights, its process's own memory and that of its steps
(`cluster.assembly.memory_plan`) go off first; `cache.device_share` of the rest is for its pools, and what is over for
whatever was counted too low.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.python_command import module_command

if TYPE_CHECKING:
    from twinpool.cache.device.device_choice import GpuView
    from twinpool.cluster.assembly.memory_plan import LargestStage, MemoryPlan, StepMemory

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
    workers: Mapping[Role, float]
    """Number of workers of each role that the node is planned for; of ranks on several nodes so many workers' worth."""
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
    parts: Mapping[Role, float] = field(default_factory=dict)
    """Which part of `weights` a worker of each role has; all where it isn't named."""
    largest: Mapping[Role, float] = field(default_factory=dict)
    """How many times an equal part of a worker its largest rank has, where its ranks may be on several nodes."""

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


PROCESS_BYTES = 1 << 30
"""Bytes of a card that a process takes besides weights, pools and what steps take: its CUDA context, kernels, pages
that it keeps for reuse. Not measured yet (docs/gpu.md)."""
READ_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CardFacts:
    """One card, measured before any worker of ours runs on it."""

    index: int
    """Of ``cuda:N``, as torch counts here."""
    name: str
    total: int
    """Bytes of its memory."""
    free: int
    capability: int
    """Its compute capability, times 10."""
    peers: tuple[int, ...]
    """The other cards here whose memory it reaches."""


@dataclass(frozen=True, slots=True)
class CardParts:
    """What the workers of a node get of its cards."""

    free: int
    """Bytes of a card that each rank has for everything."""
    ranks: Mapping[Role, int]
    """Ranks of a worker."""
    shares: Mapping[Role, float]
    """`cache.device_share`."""
    weights: int
    """Bytes of a worker's weights."""
    steps: Mapping[Role, int]
    """Bytes that steps of a worker keep and compute in, on each rank."""
    stages: Mapping[Role, LargestStage] = field(default_factory=dict)
    """Of workers whose ranks are stages."""

    def budget(self, role: Role) -> int:
        """Bytes that the pools of a worker may take, all its ranks together; 0 where not even its weights fit."""
        left = self.free - self._besides(role)
        return int(max(0, int(self.shares[role] * left)) / self._pools_part(role))

    def short(self, plans: Mapping[Role, MemoryPlan]) -> str:
        """Why some worker's memory doesn't fit on its cards, in words; empty where all do."""
        for role, plan in plans.items():
            pools = int(plan.nbytes * self._pools_part(role))
            need = pools + self._besides(role)
            if need > self.free:
                return (
                    f"each rank of a {role} worker needs about {_mib(need)} of a GPU ({_mib(self._weights(role))} of "
                    f"weights, pools of {_mib(pools)}, {_mib(self.steps[role])} for steps), and has "
                    f"{_mib(self.free)} there"
                )
        return ""

    def _besides(self, role: Role) -> int:
        return self._weights(role) + PROCESS_BYTES + self.steps[role]

    def _weights(self, role: Role) -> int:
        stage = self.stages.get(role)
        return self.weights // self.ranks[role] if stage is None else int(stage.weights * self.weights)

    def _pools_part(self, role: Role) -> float:
        stage = self.stages.get(role)
        return 1 / self.ranks[role] if stage is None else stage.pools


Dealt = Mapping[WorkerName, tuple[int, ...]]
"""The index of the card of each rank of each worker."""


def deal(workers: Sequence[tuple[WorkerName, int]], cards: Sequence[CardFacts]) -> Dealt:
    """Deal the cards out round-robin to workers of so many ranks, rank by rank.

    Raises `ConfigError` where ranks of one worker would share a card.
    """
    out, number = dict[WorkerName, tuple[int, ...]](), 0
    for name, ranks in workers:
        if ranks > len(cards):
            raise ConfigError(f"the {ranks} ranks of {name} need a GPU each; engine.device names {len(cards)}")
        out[name] = tuple(cards[(number + rank) % len(cards)].index for rank in range(ranks))
        number += ranks
    return out


def min_part(dealt: Dealt, cards: Sequence[CardFacts]) -> int:
    """The bytes of a card that each rank has: the least of the equal parts of the cards. A worker whose role is changed
    keeps its cards, so all have the same."""
    users = Counter(card for worker in dealt.values() for card in worker)
    return min(card.free // users[card.index] for card in cards if users[card.index])


def apart(cards: Sequence[CardFacts]) -> str:
    """Why workers on these cards can't write into each other's memory, in words; empty where they can."""
    for card in cards:
        for other in cards:
            if other.index != card.index and other.index not in card.peers:
                return f"cuda:{card.index} ({card.name}) doesn't reach the memory of cuda:{other.index}"
    return ""


def cards_of(
    setting: str, view: GpuView | None = None, read: Callable[[], tuple[CardFacts, ...]] | None = None
) -> tuple[CardFacts, ...]:
    """The cards that `engine.device` names: none for a CPU, one for ``cuda:N``, all for ``cuda`` and ``auto``.

    Raises `ConfigError` for a GPU that can't be used. `view`, `read`: what torch sees, and what measures the cards;
    None: this machine's.
    """
    from twinpool.cache.device.device_choice import chosen_device, gpu_view

    if setting == "cpu":
        return ()
    device = chosen_device(setting, view or gpu_view())
    if device.type == "cpu":
        return ()
    cards = (read or read_cards)()
    return tuple(card for card in cards if card.index == device.index) if ":" in setting else cards


def read_cards(python: str = "") -> tuple[CardFacts, ...]:
    """Measure all cards, in a process of its own: who looks takes some of their memory while it lives. `python` runs
    it; empty: this process's.

    Raises `ConfigError` where that fails.
    """
    command = module_command("twinpool.cluster.assembly.node_shares", python=python)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
        if ended.returncode:
            raise OSError((ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1])
        return tuple(
            CardFacts(index, name, total, free, capability, tuple(peers))
            for index, name, total, free, capability, peers in json.loads(ended.stdout.splitlines()[-1])
        )
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"the GPUs can't be measured: {error!r:.300}; use engine.device=cpu") from None


def _measure() -> list[tuple[int, str, int, int, int, list[int]]]:
    """The values of `CardFacts` of each card. Takes memory of all of them. Not run on a GPU yet."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        others = (other for other in range(torch.cuda.device_count()) if other != index)
        peers = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
        found.append((index, torch.cuda.get_device_name(index), total, free, 10 * major + minor, peers))
    return found


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure()) + "\n")
