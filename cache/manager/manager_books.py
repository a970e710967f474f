"""The books of a KV cache manager: pools, tree and tiers together, who has allocations, and what is under way.

`cache.manager.kv_cache_manager` is a request's way through it; this is what all of that stands on: making room, taking
in what completed, giving back, and recounting everything from scratch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cache.allocation.allocation import Allocation, CachedTokens, StateSnapshot
from cache.allocation.block_table import NO_PAGE
from cache.arena.arena import Arena
from cache.arena.arena_keeper import ArenaKeeper
from cache.device.device_port import DEVICE, Completion, Device, DeviceOp, DeviceStream, PageSpanUse, attempt, failure
from cache.memory.kv_cache_spec import PoolKind
from cache.memory.page_moves import PageMove, PoolMove
from cache.pool.in_flight import InFlightPins
from cache.pool.page_allocator import Lease
from cache.pool.pool_set import PoolSet
from cache.prefix_cache.radix_tree import PrefixMatch, RadixTree
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.prefix_cache.tree_eviction import POLICIES
from cache.prefix_cache.tree_node import NodeLock, Tier, TreeNode
from cache.storage.io_queue import IoQueue
from cache.storage.page_store import PageStore
from cache.storage.rank_page_store import RankPageStore
from cache.swap.swap_storage import SwapStorage
from cache.swap.swapped_state import SwappedState
from cache.tiers.backup import HostBackup
from cache.tiers.kv_event_recorder import KVEventRecorder
from cache.tiers.load_back import LoadBack
from cache.tiers.prefetch import Prefetcher
from contracts.config.cache_config import CacheConfig
from contracts.errors import CapacityError

_log = logging.getLogger("twinpool.cache")


class TierSet:
    """See the module's prose. Single-threaded. `now` is in seconds, `wall` in seconds since 1970."""

    def __init__(
        self,
        pools: PoolSet,
        device: Device,
        config: CacheConfig,
        now: Callable[[], float],
        *,
        host: PoolSet | None = None,
        storage: IoQueue | None = None,
        page_store: PageStore | None = None,
        fingerprint: str = "",
        wall: Callable[[], float] = time.time,
        rank: int = 0,
        stride: int = 1 << 40,
        arena: Arena | None = None,
    ) -> None:
        """`stride`: positions beyond what is committed that launched steps of one request write at most. Windows get
        pages for so many at a time; without it, for all at once. `page_store`: storage of a worker of several
        ranks, instead
        of `storage`. `arena`: where `host` lies, if that outlives this process."""
        self.pools, self.host, self.config = pools, host, config
        self._device, self._now = device, now
        if page_store is None and storage is not None and host is not None:
            page_store = RankPageStore(storage, host, fingerprint)
        self._page_store, self._storage = page_store, page_store or storage
        self.spec = pools.spec
        self.full = self.spec.full.name
        self.tree = RadixTree(
            self.spec, POLICIES[config.eviction], write_back=host is not None and config.write_policy == "back"
        )
        self._runs = [p.name for p in self.spec.pools if p.kind is not PoolKind.STATE]
        self._windows = {p.name: self.spec.window_hold(p.name, stride) for p in self.spec.pools if p.window_tokens}
        self._slots = [p.name for p in self.spec.pools if p.kind is PoolKind.STATE]
        self._allocations: dict[NodeLock, Allocation] = {}
        self._fresh: list[Allocation] = []
        self._swapped: list[SwappedState] = []
        self._launched = InFlightPins()
        self.backup = self.load_back = self.prefetcher = self.shelver = None
        if host is not None:
            retry_s = config.storage.retry_s
            self.backup = HostBackup(
                self.tree, pools, host, device, self._page_store, config.copy_chunk_bytes, now, retry_s
            )
            self.load_back = LoadBack(self.tree, pools, host, device, now, config.verify)
            if self._page_store is not None:
                self.prefetcher = Prefetcher(self.tree, host, self._page_store, config.prefetch, now)
                self.shelver = SwapStorage(host, self._page_store, self.backup.lease)
        self.keeper = ArenaKeeper(self.tree, host, arena, device, now) if host is not None and arena else None
        if self.keeper is not None and self.load_back is not None:
            self.load_back.unproven, self.load_back.proved = self.keeper.unproven, self.keeper.proved
            self.load_back.torn = self.keeper.torn
        events = config.events
        self.event_recorder = KVEventRecorder(self.tree, events, wall, rank) if events.endpoint else None
        if self.event_recorder is not None:
            _log.info("KV events at %s", self.event_recorder.publisher.endpoint)
        self._tokens_per_s = 0.0
        self.counters = {"pages_evicted": 0.0, "pages_invalidated": 0.0, "loads_skipped": 0.0}
        self.counters |= {f"hit_tokens_{tier}": 0.0 for tier in ("device", "host", "storage")}

    # ------------------------------------------------------------ room

    def _worth_loading(self, match: PrefixMatch) -> bool:
        """Whether what the host has below the device's anchor is loaded, rather than computed again."""
        below, policy = match.depth - match.device_depth, self.config.load_back
        if self.load_back is None or not below or policy == "never":
            return False
        if policy == "always" or not self._tokens_per_s or not self.load_back.bytes_per_s:
            return True
        size = sum(self.spec.unit_bytes(pool) for pool in self._runs)
        worth = below * size / self.load_back.bytes_per_s < below * self.spec.page_tokens / self._tokens_per_s
        self.counters["loads_skipped"] += not worth
        return worth

    @property
    def _may_load_back(self) -> bool:
        return self.config.load_back != "never"

    def _loads(self, lock: NodeLock) -> Counter[str]:
        """Pages (and slots) that must come from the host before what `lock` keeps can be used."""
        loads = Counter[str]()
        for part in self.load_back.missing(lock) if self.load_back is not None else ():
            loads[part.component] += len(part)
        return loads

    def _plan(self, lock: NodeLock, loads: Counter[str], leases: Mapping[str, Lease]) -> None:
        """Let them come into the first pages of `leases`."""
        if self.load_back is not None and loads:
            self.load_back.plan(lock, {pool: leases[pool].split(count, lock.owner) for pool, count in loads.items()})

    def _may_load(self, loads: Counter[str]) -> bool:
        """Whether loads under way leave room for these; the first one always may."""
        if self.load_back is None or not loads:
            return True
        nbytes = sum(count * self.spec.unit_bytes(pool) for pool, count in loads.items())
        return not self.load_back.nbytes or self.load_back.nbytes + nbytes <= self.config.load_bytes

    def _lease(self, needs: Mapping[str, int], owner: str) -> dict[str, Lease] | None:
        """All of `needs` or nothing; what the tree can spare makes room."""
        leases: dict[str, Lease] = {}
        for pool, count in needs.items():
            allocator = self.pools.allocators[pool]
            if count > allocator.free:
                self.counters["pages_evicted"] += self.evict(pool, count - allocator.free)
            try:
                leases[pool] = allocator.lease(count, owner)
            except CapacityError:
                for lease in leases.values():
                    lease.release()
                return None
        return leases

    def evict(self, pool: str, count: int) -> int:
        """Free up to `count` pages or slots of the device that only the tree holds; returns how many."""
        return self.tree.eviction.evict(Tier.DEVICE, pool, count, self._spill if self.tree.write_back else None)

    def _spill(self, node: TreeNode) -> bool:
        assert self.backup is not None
        return self.backup.save([node]) and self.full not in node.parts[Tier.HOST]

    # ------------------------------------------------------------ recurrent states

    def _start_slot(self, allocation: Allocation, pool: str) -> None:
        (slot,) = allocation.slots[pool].indices
        snapshots = [p for p in allocation.lock.of(pool) if p.tier is Tier.DEVICE]
        if not snapshots:
            op = DeviceOp("zero slot", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, pool, (slot,)),))
            allocation.started.append(attempt(self._device, op, lambda: self.pools.zero({pool: (slot,)})))
            return
        after = self.load_back.completions(allocation.lock) if self.load_back is not None else []
        allocation.started.append(self._copy_slot(pool, snapshots[0].lease.indices[0], slot, after))

    def _copy_slot(self, pool: str, source: int, target: int, after: Sequence[Completion] = ()) -> Completion:
        """On the stream of the forward passes: whatever touches a slot does so in their order."""
        op = DeviceOp(
            "copy slot",
            DeviceStream.COMPUTE,
            (PageSpanUse(DEVICE, pool, (source,)),),
            (PageSpanUse(DEVICE, pool, (target,)),),
        )
        move = PageMove((PoolMove(pool, (source,), (target,)),))
        return attempt(self._device, op, lambda: self.pools.copy(move, self.pools), after)

    # ------------------------------------------------------------ progress

    def poll(self) -> list[Allocation]:
        """Take in what has completed; returns allocations that relied on state which turned out damaged."""
        if self.event_recorder is not None:
            self.event_recorder.round()
        if self.backup is not None:
            self.backup.poll()
        if self.prefetcher is not None:
            self.prefetcher.poll()
        if self.shelver is not None:
            self.shelver.poll()
        if self.keeper is not None:
            self.keeper.poll(idle=not self._allocations)
        self._launched.sweep()
        invalid = [c for c in self._allocations.values() if not c.invalid and _failed(c.started)]
        relied = [self._allocations.get(lock) for lock in (self.load_back.poll() if self.load_back is not None else ())]
        invalid += [c for c in dict.fromkeys(relied) if c is not None and not c.invalid and c not in invalid]
        for allocation in invalid:
            allocation.invalid = True
        return invalid

    def settled(self, allocation: Allocation) -> bool:
        """Whether everything that was loaded for it has come and is what it should be: its steps may be committed."""
        if allocation in self._fresh:
            # Its recurrent state isn't even on its way into its slot.
            return False
        if not all(c.done for c in allocation.started) or _failed(allocation.started):
            return False
        return not allocation.invalid and (self.load_back is None or not self.load_back.under_way(allocation.lock))

    def completions(self, allocation: Allocation) -> list[Completion]:
        """What must be complete before its pages may be read without going through a gate."""
        return self.load_back.completions(allocation.lock) if self.load_back is not None else []

    @property
    def stateful(self) -> bool:
        """Whether requests have recurrent states, of which snapshots are wanted at page boundaries."""
        return bool(self._slots)

    def computed(self, tokens: int, seconds: float) -> None:
        """Tell how fast a step was: it decides whether loading is worth it."""
        if seconds > 0:
            rate = tokens / seconds
            self._tokens_per_s = rate if not self._tokens_per_s else 0.8 * self._tokens_per_s + 0.2 * rate

    def _count(self, cached: CachedTokens) -> None:
        self.counters["hit_tokens_device"] += cached.device
        self.counters["hit_tokens_host"] += cached.host
        self.counters["hit_tokens_storage"] += cached.storage

    def stats(self) -> dict[str, float]:
        """Counters of everything that happened in the tiers, and how full they are."""
        out = {**self.counters, "device_pages_kept": self.tree.accounts.sizes[Tier.DEVICE, self.full]}
        for part in (self.backup, self.load_back, self.prefetcher, self.shelver, self.keeper):
            out |= part.counters if part is not None else {}
        if self.host is not None:
            allocator = self.host.allocators[self.full]
            out |= {"stores_missed": self.tree.accounts.missed, "stores_waiting": len(self.tree.accounts.unstored)}
            out |= {"host_pages_total": allocator.total, "host_pages_used": allocator.total - allocator.free}
        return out

    def _save(self, nodes: Sequence[TreeNode]) -> None:
        """Copy to the host what the write policy wants there by now."""
        policy = self.config.write_policy
        if self.backup is None or policy == "back":
            return
        self.backup.save(n for n in nodes if policy == "through" or n.hits >= self.config.write_hits)

    # ------------------------------------------------------------ ends

    def free(self, allocation: Allocation, after: Sequence[Completion] = ()) -> None:
        """Give back everything that it holds. Idempotent.

        `after`: launched operations that name its pages and slots. Nobody gets those before they are complete.
        """
        if allocation.released:
            return
        allocation.released = True
        snapshots = [s for held in allocation.snapshots.values() for s in held]
        under_way = [c for c in [*after, *allocation.started, *(s.completion for s in snapshots)] if not c.done]
        for completion in under_way:
            reason = f"launched for {allocation.owner}"
            self._launched.hold(
                completion, *(self.pools.allocators[p].pin(i, reason) for p, i in allocation.named().items())
            )
        del self._allocations[allocation.lock]
        self.tree.locks.unlock(allocation.lock)
        leases = [s.lease for s in snapshots] + [*allocation.slots.values(), *allocation.spare.values()]
        for lease in leases + [run.lease for runs in allocation.runs.values() for run in runs]:
            lease.release()

    def _give_back(self, snapshot: StateSnapshot) -> None:
        if not snapshot.completion.done:
            self._launched.hold(snapshot.completion, snapshot.lease.pin("snapshot under way"))
        snapshot.lease.release()

    def invalidate(self, prefix: TokenPrefix, page: int = 0) -> int:
        """Never again use page `page` of `prefix` nor what is below; returns the number of pages."""
        count = self.tree.invalidate(prefix, page)
        self.counters["pages_invalidated"] += count
        return count

    # ------------------------------------------------------------ accounts

    def free_pages(self, pool: str) -> int:
        """Pages (or slots) of the device that are free or only kept for reuse."""
        return self.pools.allocators[pool].free + self.tree.eviction.evictable(pool)

    def kept_pages(self, prefix: TokenPrefix) -> int:
        """Full pages of `prefix` that are on the device and that somebody keeps there."""
        held = 0
        for node, pages in self.tree.walked(prefix):
            part = node.parts[Tier.DEVICE].get(self.full)
            if part is None or not part.locks:
                break
            held += pages
        return held

    @property
    def max_positions(self) -> int:
        """Positions that one request can hold when all pools are empty."""
        bounds = [self.pools.max_positions]
        for pool, most in self._windows.items():
            total = self.pools.allocators[pool].total
            bounds += [total * self.spec.page_tokens] if total < most else []
        return min(bounds)

    @property
    def allocations(self) -> int:
        return len(self._allocations)

    @property
    def swapped(self) -> int:
        """Allocations whose state is in host memory, or on its way there or back."""
        return len(self._swapped)

    @property
    def busy(self) -> bool:
        """Whether copies, loads or reads are under way that `poll` is to take in."""
        return any((
            len(self._launched),
            self.backup is not None and self.backup.busy,
            self.load_back is not None and self.load_back.busy,
            self.prefetcher is not None and len(self.prefetcher),
            self.shelver is not None and self.shelver.busy,
        ))  # fmt: skip

    def check(self, others: Mapping[str, int] = {}) -> list[str]:
        """Recompute all accounts from scratch; `others` are leases of pages that the caller holds, by pool."""
        found = self.pools.check() + self.tree.check()
        for pool, allocator in self.pools.allocators.items():
            held = self.tree.accounts.sizes[Tier.DEVICE, pool] + sum(c.own(pool) for c in self._allocations.values())
            found += _compare(
                allocator.total - allocator.free - allocator.quarantined, held + others.get(pool, 0), pool
            )
        for allocation in self._allocations.values():
            found += self._check_allocation(allocation)
        moves = (self.backup, self.load_back, self.prefetcher)
        found += [line for swapped in self._swapped for line in swapped.check()]
        locks = len(self._allocations) + len(self._swapped) + sum(part.locks for part in moves if part is not None)
        if locks != len(self.tree.locks):
            found.append(f"tree: {len(self.tree.locks)} locks, allocations and moves hold {locks}")
        if self.host is None:
            return found
        assert self.backup is not None
        found += self.host.check() + self.backup.check()
        for pool, allocator in self.host.allocators.items():
            held = self.tree.accounts.sizes[Tier.HOST, pool] + self.backup.leased(pool)
            held += self.prefetcher.leased(pool) if self.prefetcher is not None else 0
            held += sum(swapped.leased(pool) for swapped in self._swapped)
            found += _compare(allocator.total - allocator.free - allocator.quarantined, held, f"host {pool}")
        found += self.keeper.check() if self.keeper is not None else []
        return found + (self.prefetcher.check() if self.prefetcher is not None else [])

    def _check_allocation(self, allocation: Allocation) -> list[str]:
        """Every page of its tables is its own, or one that its lock keeps, under the epoch that it was entered with."""
        found = []
        for pool in self._runs:
            mine = {i for run in allocation.runs[pool] for i in run.lease.indices}
            mine |= {i for p in allocation.lock.of(pool) if p.tier is Tier.DEVICE for i in p.lease.indices}
            table = allocation.tables[pool]
            strangers = [i for i in table if i != NO_PAGE and i not in mine]
            if strangers:
                found.append(
                    f"{allocation.owner}: {pool} pages {strangers} of its table are neither its own nor locked"
                )
            used = [(i, e) for i, e in zip(table, allocation.epochs[pool], strict=True) if i != NO_PAGE]
            if [e for _, e in used] != list(self.pools.allocators[pool].epochs_of([i for i, _ in used])):
                found.append(f"{allocation.owner}: its {pool} table has old epochs")
            for run in allocation.runs[pool]:
                if not run.lease.live:
                    found.append(f"{allocation.owner}: its lease has ended")
                if tuple(table[run.first : run.end]) != run.lease.indices:
                    found.append(f"{allocation.owner}: its {pool} table differs from what it leased")
        return found

    def close(self, timeout_s: float = 5.0) -> None:
        """Release every allocation and end all prefetches; what storage is still busy with gets `timeout_s`."""
        if self.event_recorder is not None:
            self.event_recorder.close()
        if self._storage is not None and not self._storage.close(timeout_s):
            # A thread of it may still write to the host's memory: that must outlive it, and nothing is taken back.
            return
        for allocation in list(self._allocations.values()):
            self.free(allocation)
        if self.prefetcher is not None:
            self.prefetcher.close()
        if self.shelver is not None:
            self.shelver.poll()
        self._launched.settle()


def _failed(operations: Sequence[Completion]) -> bool:
    return any(failure(op) is not None for op in operations if op.done)


def _compare(used: int, held: int, pool: str) -> list[str]:
    return [f"{pool} pages: {used} in use, {held} accounted for"] if used != held else []
