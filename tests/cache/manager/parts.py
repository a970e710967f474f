"""Parts of a KV cache manager, put together by hand: pools of a full, a window and a state pool, nothing below them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support.pool_sets import pool_sets
from twinpool.cache.allocation import Allocation, CachedTokens
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.manager.allocations import Allocations, LoadPlanner
from twinpool.cache.manager.finished_pages import FinishedPages
from twinpool.cache.manager.running_pages import PageSupply, PoolKinds, RunningPages
from twinpool.cache.manager.tier_set import NoBackup, NoPrefetcher
from twinpool.cache.pool.page_allocator import InFlightPins, Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, PageOffer, TokenPrefix
from twinpool.contracts.config.cache_config import CacheConfig

PAGE_TOKENS = 4
PAGES = 10


@dataclass
class Operation:
    """A launched operation, complete when a test says so."""

    done: bool = False
    error: BaseException | None = None

    def wait(self) -> None:
        assert self.done
        if self.error is not None:
            raise self.error


@dataclass
class Loads:
    """A load back that is told what is missing and what is under way."""

    lacking: list[Any] = field(default_factory=list)
    planned: list[dict[str, int]] = field(default_factory=list)
    loading: bool = False
    nbytes: int = 0
    bytes_per_s: float = 0.0

    def missing(self, lock: NodeLock) -> list[NodePart]:
        return self.lacking

    def plan(self, lock: NodeLock, leases: dict[str, Lease]) -> None:
        self.planned.append({pool: len(lease) for pool, lease in leases.items()})
        for lease in leases.values():
            lease.release()

    def under_way(self, lock: NodeLock) -> bool:
        return self.loading

    def completions(self, lock: NodeLock) -> list[Any]:
        return []


class Sized:
    """A part of a pool with so many pages."""

    def __init__(self, component: str, pages: int) -> None:
        self.component, self._pages = component, pages

    def __len__(self) -> int:
        return self._pages


class Parts:
    """The lower parts of a manager; `loads` stands for the host."""

    def __init__(self, name: str = "all", load_back: str = "auto", load_bytes: int = 1 << 30) -> None:
        spec = pool_sets(PAGE_TOKENS)[name]
        self.pools = PoolSet(spec, spec.even(1 + PAGES))
        self.kinds = PoolKinds.of(spec, stride=PAGE_TOKENS)
        self.tree = RadixTree(spec)
        self.device, self.in_flight, self.loads = CpuDevice(), InFlightPins(), Loads()
        self.config = CacheConfig(page_tokens=PAGE_TOKENS, load_back=load_back, load_bytes=load_bytes)  # type: ignore[arg-type]
        self.supply = PageSupply(self.pools, self.kinds, self.tree, NoBackup())
        loads: Any = self.loads
        self.planner = LoadPlanner(self.supply, loads, self.config)
        self.running = self.running_on(self.device)
        self.allocations = Allocations(self.device, self.supply, self.planner, loads, NoPrefetcher(), self.in_flight)

    def running_on(self, device: Any) -> RunningPages:
        return RunningPages(device, self.supply, self.in_flight)

    def finished_on(self, device: Any) -> FinishedPages:
        return FinishedPages(device, self.supply, NoBackup(), self.config)

    def free(self) -> dict[str, int]:
        return {pool: allocator.free for pool, allocator in self.pools.allocators.items()}

    def open(self, pages: int = 2, owner: str = "a request") -> Allocation:
        """An allocation of so many pages of the full pool, and a slot of the state pool if there is one."""
        lock = self.tree.locks.keep((), owner)
        allocation = Allocation(owner, self.prefix(0), pages, lock, 0, CachedTokens(4, 3, 2))
        allocation.enter_nothing(self.kinds.paged)
        leases = self.supply.lease_all({self.kinds.full: pages} | dict.fromkeys(self.kinds.states, 1), owner)
        assert leases is not None
        lease = leases[self.kinds.full]
        allocation.tables[self.kinds.full].put(0, lease.indices, lease.epochs)
        allocation.spare[self.kinds.full] = lease
        allocation.slots = {pool: leases[pool] for pool in self.kinds.states}
        return self.allocations.open(allocation)

    def prefix(self, pages: int, first: int = 0) -> TokenPrefix:
        return TokenPrefix.of(range(first, first + pages * PAGE_TOKENS), PAGE_TOKENS)

    def share(self, prefix: TokenPrefix) -> None:
        """Put full pages of `prefix` into the tree, which nobody keeps."""
        lease = self.pools.allocators[self.kinds.full].lease(len(prefix), "whoever computed it")
        self.tree.insert(prefix, {self.kinds.full: [PageOffer(0, lease, list(range(len(prefix))))]})
        lease.release()


def match(depth: int, device_depth: int) -> Any:
    """What a tree says that has so many pages of a prefix in any tier, and on the device."""
    return SimpleNamespace(depth=depth, device_depth=device_depth)
