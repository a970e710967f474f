"""The KV cache manager: all state of one worker (pools, prefix tree, tiers), by the parts that workers call.

A request's way through the parts:

    prefetch    the request is queued: storage begins to read pages of its prefix to the host (`tiers.prefetcher`)
    allocate    it is admitted: lock cached pages, lease the rest, all pools or none; loads are planned (`allocations`).
                For a prompt that another worker computes, pages are preallocated, and committed on arrival
    launch      the loads of all allocations of this round begin, layer by layer; forward passes wait at the gates
    extend      tables get pages for the positions of the next step; pages that a window left are reused; the recurrent
                state is copied aside at page boundaries (`running`)
    seal        a step was committed: finished pages get their digests, go into the tree, and from there down the tiers
                (`finished`)
    swap        the state goes off the device to host memory, and back into other pages (`swapped`)
    free        locks, pages, slots and snapshots are given back: the only end of an allocation (`allocations`)

Each part uses only parts that come before it: tiers, `supply`, `planner`, `running`, `allocations`, then `finished` and
`swapped`. Only committed positions may be sealed, shared or snapshotted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twinpool.cache.allocation import Allocation
from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.allocations import Allocations, LoadPlanner
from twinpool.cache.manager.finished_pages import FinishedPages
from twinpool.cache.manager.running_pages import PageSupply, PoolKinds, RunningPages
from twinpool.cache.manager.swapped_requests import SwappedRequests
from twinpool.cache.manager.tier_set import NO_TIERS, LowerTiers, NoEvents, TierSet
from twinpool.cache.pool.page_allocator import InFlightPins
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.eviction_policy import POLICIES
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.cache.tiers.kv_event_publisher import KVEventRecorder
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.credentials.certificate_files import CurvePair

_log = logging.getLogger("twinpool.cache")


@dataclass(frozen=True)
class EventSource:
    """What the KV events of a worker are made with, where `cache.events` asks for them."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970."""
    rank: int = 0
    """Is added to the port of `cache.events.endpoint`."""
    curve: CurvePair | None = None
    """The keys of the sockets; None: these are in the clear."""


class KVCacheManager:
    """All state of one worker, by parts; see the module. Single-threaded. `now` is in seconds."""

    def __init__(
        self,
        pools: PoolSet,
        device: Device,
        config: CacheConfig,
        now: Callable[[], float],
        *,
        below: LowerTiers = NO_TIERS,
        events: EventSource = EventSource(),
        stride: int = 1 << 40,
    ) -> None:
        """`below`: what is below the device. `stride`: positions beyond the committed length that launched steps of one
        request write at most. Window pools lease pages for so many positions at a time; by default, for all at once."""
        self.pools, self.spec = pools, pools.spec
        self.kinds = kinds = PoolKinds.of(pools.spec, stride)
        self.full = kinds.full
        write_back = below.host is not None and config.write_policy == "back"
        self.tree = tree = RadixTree(pools.spec, POLICIES[config.eviction], write_back=write_back)
        recorder: KVEventRecorder | NoEvents = NoEvents()
        if config.events.endpoint:
            recorder = KVEventRecorder(tree, config.events, events.wall, events.rank, events.curve)
            _log.info("KV events at %s", recorder.publisher.endpoint)
        self.tiers = tiers = TierSet.build(tree, pools, device, config, now, below, recorder)
        self.host = below.host
        self._in_flight = in_flight = InFlightPins()
        self.supply = supply = PageSupply(pools, kinds, tree, tiers.backup)
        self.planner = planner = LoadPlanner(supply, tiers.load_back, config)
        self.running = RunningPages(device, supply, in_flight)
        self.allocations = Allocations(device, supply, planner, tiers.load_back, tiers.prefetcher, in_flight)
        self.finished = FinishedPages(device, supply, tiers.backup, config)
        self.swapped = SwappedRequests(device, supply, planner, self.allocations, tiers, in_flight, config)

    # ------------------------------------------------------------ rounds

    def launch(self) -> None:
        """Begin the loads planned since the last call, and fill the state slots of requests allocated since then."""
        self.tiers.load_back.launch()
        self.allocations.launch()

    def poll(self) -> list[Allocation]:
        """Take in completed operations, without waiting.

        Returns the allocations that are invalid from now on: state that they rely on is damaged or failed to arrive.
        """
        self.tiers.poll(idle=not len(self.allocations))
        self._in_flight.sweep()
        return self.allocations.invalidate(self.tiers.load_back.poll())

    @property
    def busy(self) -> bool:
        """Whether copies, loads or reads are under way that `poll` is to take in."""
        return len(self._in_flight) > 0 or self.tiers.busy

    def stats(self) -> dict[str, float]:
        """Counters of everything that happened, how fast it went, and how full the tiers are."""
        out: dict[str, float] = {}
        for part in (self.supply, self.finished, self.planner, self.allocations):
            out |= part.counters
        out["device_pages_kept"] = self.tree.accounts.sizes[Tier.DEVICE, self.full]
        out["device_pages_unused"] = self.pools.allocators[self.full].free
        out["host_pages_swapped"] = self.swapped.leased(self.full)
        return out | self.planner.rates | self.tiers.stats()

    def check(self, others: Mapping[str, int] = {}) -> list[str]:
        """Recompute all accounts from scratch; returns a line for each that doesn't add up.

        `others`: how many pages (or slots) of each pool the caller leases itself.
        """
        held = {pool: self.allocations.own(pool) + others.get(pool, 0) for pool in self.pools.allocators}
        found = [
            *self.pools.check(),
            *self.tree.check(),
            *self.supply.check(held),
            *self.allocations.check(),
            *self.swapped.check(),
        ]
        locks = len(self.allocations) + len(self.swapped) + self.tiers.locks
        if locks != len(self.tree.locks):
            found.append(f"tree: {len(self.tree.locks)} locks, allocations and moves hold {locks}")
        return found + self.tiers.check(self.swapped.leased)

    def close(self, timeout_s: float = 5.0) -> None:
        """Free every allocation and end all prefetches; storage operations under way get `timeout_s` seconds.

        Nothing is freed where a storage thread may still write to host memory. Raises the first error of a failed
        operation that pages were waiting for.
        """
        if not self.tiers.close(timeout_s):
            return
        for allocation in list(self.allocations):
            self.allocations.free(allocation)
        self.tiers.prefetcher.close()
        self.tiers.swap_storage.poll()
        self._in_flight.settle()
