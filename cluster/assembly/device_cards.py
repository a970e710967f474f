"""The cards (GPUs) of a machine, which of them each rank is dealt, and how much of its memory a rank's pools may take.

Ranks that are dealt the same card have equal parts of what is free on it, whatever their roles. Of its part a rank's
weights, its process's own memory and that of its steps (`cluster.assembly.step_memory`) go off first;
`cache.device_share` of the rest is for its pools, and what is over for whatever was counted too low.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.python_command import module_command

if TYPE_CHECKING:
    from twinpool.cache.device.device_choice import GpuView
    from twinpool.cluster.assembly.memory_plan import MemoryPlan

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
    """Tensor-parallel ranks of a worker."""
    shares: Mapping[Role, float]
    """`cache.device_share`."""
    weights: int
    """Bytes of a worker's weights."""
    steps: Mapping[Role, int]
    """Bytes that steps of a worker keep and compute in, on each rank."""

    def budget(self, role: Role) -> int:
        """Bytes that the pools of a worker may take, all its ranks together; 0 where not even its weights fit."""
        left = self.free - self._besides(role)
        return self.ranks[role] * max(0, int(self.shares[role] * left))

    def short(self, plans: Mapping[Role, MemoryPlan]) -> str:
        """Why some worker's memory doesn't fit on its cards, in words; empty where all do."""
        for role, plan in plans.items():
            size = self.ranks[role]
            need = plan.nbytes // size + self._besides(role)
            if need > self.free:
                return (
                    f"each rank of a {role} worker needs about {_mib(need)} of a GPU ({_mib(self.weights // size)} of "
                    f"weights, pools of {_mib(plan.nbytes // size)}, {_mib(self.steps[role])} for steps), and has "
                    f"{_mib(self.free)} there"
                )
        return ""

    def _besides(self, role: Role) -> int:
        return self.weights // self.ranks[role] + PROCESS_BYTES + self.steps[role]


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
    command = module_command("twinpool.cluster.assembly.device_cards", python=python)
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
