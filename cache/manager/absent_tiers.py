"""Stand-ins for tiers that a worker doesn't have: each answers like a real tier that holds nothing.

A worker without host memory has no backup, load back, prefetch, swap storage nor arena; one without storage neither
prefetch nor swap storage. `cache.manager.tier_set` decides once which tiers are absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from twinpool.cache.device.device_port import Completion
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import NodeLock, NodePart, TreeNode
from twinpool.cache.swap.swapped_state import SwappedState
from twinpool.cache.tiers.prefetch_request import PrefetchRequest

_NOTHING: Mapping[str, float] = MappingProxyType({})


class NoBackup:
    """The backup of a worker without host memory: it copies nothing down."""

    counters = _NOTHING
    busy = False
    locks = 0

    def save(self, nodes: Iterable[TreeNode]) -> bool:
        return False

    def leased(self, component: str) -> int:
        return 0

    def poll(self) -> None:
        pass

    def check(self) -> list[str]:
        return []


class NoLoadBack:
    """The load back of a worker without host memory: it finds nothing to load."""

    counters = _NOTHING
    busy = False
    locks = 0
    nbytes = 0
    bytes_per_s = 0.0

    def missing(self, lock: NodeLock) -> list[NodePart]:
        return []

    def plan(self, lock: NodeLock, leases: dict[str, Lease]) -> None:
        assert not leases, "there is nothing to load from"

    def launch(self) -> None:
        pass

    def under_way(self, lock: NodeLock) -> bool:
        return False

    def completions(self, lock: NodeLock) -> list[Completion]:
        return []

    def poll(self) -> list[NodeLock]:
        return []


class NoPrefetcher:
    """The prefetcher of a worker without storage: it reads nothing, and no request waits for it."""

    counters = _NOTHING
    locks = 0

    def __len__(self) -> int:
        return 0

    def start(self, prefix: TokenPrefix, owner: str = "") -> PrefetchRequest | None:
        return None

    def may_run(self, prefetch: PrefetchRequest) -> bool:
        return True

    def deadline(self, prefetch: PrefetchRequest) -> float | None:
        return None

    def release(self, prefetch: PrefetchRequest) -> None:
        pass

    def leased(self, component: str) -> int:
        return 0

    def poll(self) -> None:
        pass

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class NoSwapStorage:
    """The swap storage of a worker without storage: it takes nothing."""

    counters = _NOTHING
    busy = False

    def takes(self, swapped: SwappedState) -> bool:
        return False

    def store(self, swapped: SwappedState, keys: Sequence[bytes]) -> None:
        raise AssertionError("there is no storage to put it on")

    def fetch(self, swapped: SwappedState, keys: Sequence[bytes]) -> None:
        raise AssertionError("there is no storage to fetch it from")

    def poll(self) -> None:
        pass


class NoArena:
    """The arena keeper of a worker whose host memory ends with its process: nothing to take over or to check."""

    counters = _NOTHING
    bond = b""

    def take_copies(self) -> int:
        return 0

    def adopt(self, unfinished: bool = False) -> int:
        return 0

    def begin(self, bond: bytes) -> None:
        pass

    def seal_swapped(self, swapped: SwappedState) -> None:
        pass

    def unproven(self, part: NodePart) -> bool:
        return False

    def proved(self, part: NodePart) -> None:
        pass

    def torn(self, part: NodePart, count: int) -> bool:
        return False

    def poll(self, idle: bool) -> None:
        pass

    def check(self) -> list[str]:
        return []


class NoEvents:
    """The KV events of a worker that publishes none."""

    endpoint = replay_endpoint = ""

    def round(self) -> None:
        pass

    def close(self) -> None:
        pass
