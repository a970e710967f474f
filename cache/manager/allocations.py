"""The allocations of a worker, each from its beginning to its one end; and what of a prefix is loaded for them.

    begins     `allocate`: a prompt that this worker computes, its prefix from the tiers, the rest leased
               `preallocate`: a prompt that another worker computes; `commit_transfer` once its pages have arrived
               `hold_for_push`, `reserve_for_pull`: cached pages for no request in particular, sent to another worker's
               tree or received from one (`insert_pulled`)
               `open`: with pages that the caller has leased, as a swapped out request does that returns
    starts     `launch`: its state slots are filled, once a round, after the loads that were planned for it have begun
    is used    once it is `ready`: everything loaded for it has come undamaged; else it is marked (`invalidate`)
    ends       `free`: pages and slots that launched operations still name are pinned until these are complete

Pages are leased in all pools or in none. Where the tree has parts of a prefix, these are locked, not leased again.
Which of those that the host has are worth loading rather than computing again the `LoadPlanner` says: it weighs the
time that loads took lately against the time that steps took. Pages into which is loaded are leased with the request's
own, and stay within `cache.load_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from twinpool.cache.allocation import NULL_PAGE, Allocation, CachedTokens, PageRun, page_digests
from twinpool.cache.device.device_port import DEVICE, Completion, Device, DeviceOp, DeviceStream, PageSpanUse, attempt
from twinpool.cache.manager.running_pages import PageSupply, copy_slot
from twinpool.cache.manager.tier_set import NoLoadBack, NoPrefetcher
from twinpool.cache.memory.kv_cache_spec import due, missing
from twinpool.cache.pool.page_allocator import InFlightPins, Lease
from twinpool.cache.prefix_cache.radix_tree import PrefixMatch
from twinpool.cache.prefix_cache.tree_node import NodeLock, PageOffer, Tier, TokenPrefix
from twinpool.cache.tiers.load_back import LoadBack
from twinpool.cache.tiers.prefetch import Prefetcher, PrefetchRequest
from twinpool.contracts.config.cache_config import CacheConfig


class LoadPlanner:
    """Plans loads of parts that a request's lock keeps on the host: whether they are worth it, and whether they fit."""

    def __init__(self, supply: PageSupply, load_back: LoadBack | NoLoadBack, config: CacheConfig) -> None:
        self._supply, self._load_back = supply, load_back
        self._spec = supply.pools.spec
        self._policy, self._max_bytes = config.load_back, config.load_bytes
        self._page_bytes = sum(map(self._spec.unit_bytes, supply.kinds.paged))
        self._tokens_per_s = 0.0
        """A moving average of tokens computed per second; 0 before the first step."""
        self.counters = {"loads_skipped": 0.0}

    @property
    def enabled(self) -> bool:
        """Whether the policy (`load_back` of the cache configuration) allows any loads."""
        return self._policy != "never"

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step's speed; `worth_loading` weighs loading against it."""
        if seconds > 0:
            rate = tokens / seconds
            self._tokens_per_s = rate if not self._tokens_per_s else 0.8 * self._tokens_per_s + 0.2 * rate

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second that were computed, and that were loaded from the host; those that aren't known are left
        out."""
        loaded = self._load_back.bytes_per_s * self._spec.page_tokens / self._page_bytes if self._page_bytes else 0.0
        rates = {"compute_tokens_per_s": self._tokens_per_s, "load_tokens_per_s": loaded}
        return {name: rate for name, rate in rates.items() if rate}

    def worth_loading(self, match: PrefixMatch) -> bool:
        """Whether to load the pages that the host has below the device's anchor, rather than compute them again."""
        below, loaded_per_s = match.depth - match.device_depth, self._load_back.bytes_per_s
        if not below or not self.enabled:
            return False
        if self._policy == "always" or not self._tokens_per_s or not loaded_per_s:
            return True
        worth = below * self._page_bytes / loaded_per_s < below * self._spec.page_tokens / self._tokens_per_s
        self.counters["loads_skipped"] += not worth
        return worth

    def loads(self, lock: NodeLock) -> Counter[str]:
        """Pages (and slots) by pool that must be loaded from the host before the parts of `lock` can be used."""
        loads = Counter[str]()
        for part in self._load_back.missing(lock):
            loads[part.component] += len(part)
        return loads

    def lease(self, lock: NodeLock, loads: Mapping[str, int], needs: Mapping[str, int]) -> dict[str, Lease] | None:
        """Lease `needs` for the owner of `lock`, and further pages into which `loads` are planned.

        All pools or none: returns None without room, and has given `lock` back then. The tree owns the pages of loads.
        """
        leases = None
        if self._fit(loads):
            leases = self._supply.lease_all({pool: needs[pool] + loads.get(pool, 0) for pool in needs}, lock.owner)
        if leases is None:
            self._supply.tree.locks.unlock(lock)
            return None
        if loads:
            into = {pool: leases[pool].split(count, lock.owner) for pool, count in loads.items()}
            self._load_back.plan(lock, into)
        return leases

    def _fit(self, loads: Mapping[str, int]) -> bool:
        """Whether `loads` and those under way stay within `load_bytes`; with none under way, always."""
        if not loads or not self._load_back.nbytes:
            return True
        nbytes = sum(count * self._spec.unit_bytes(pool) for pool, count in loads.items())
        return self._load_back.nbytes + nbytes <= self._max_bytes


class Allocations:
    """All allocations that aren't freed yet, by their locks in the tree."""

    def __init__(
        self,
        device: Device,
        supply: PageSupply,
        planner: LoadPlanner,
        load_back: LoadBack | NoLoadBack,
        prefetcher: Prefetcher | NoPrefetcher,
        in_flight: InFlightPins,
    ) -> None:
        self._device, self._supply, self._planner = device, supply, planner
        self._load_back, self._prefetcher, self._in_flight = load_back, prefetcher, in_flight
        self._pools, self._kinds, self._tree = supply.pools, supply.kinds, supply.tree
        self._open: dict[NodeLock, Allocation] = {}
        self._fresh: list[Allocation] = []
        """Those whose state slots `launch` is still to fill."""
        self.counters = {f"hit_tokens_{tier}": 0.0 for tier in ("device", "host", "storage")}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._open.values())

    # ------------------------------------------------------------ prompts that this worker computes

    def allocate(
        self,
        prefix: TokenPrefix,
        positions: int,
        owner: str,
        *,
        reusable: int,
        prefetch: PrefetchRequest | None = None,
        most: int | None = None,
    ) -> Allocation | None:
        """Allocate for `positions` positions: at most `reusable` pages of `prefix` from the tiers, the rest leased.

        `most`: the length that the request may reach, where it goes on here after its prompt. The full pool is extended
        as it grows; of window and state pools all that the request ever holds at once is leased now. All pools or none:
        returns None when there isn't room now, with nothing taken. Releases `prefetch` on success.
        """
        most = most or positions
        allocation = self._allocate(prefix, positions, most, owner, reusable, prefetch)
        if allocation is None and reusable and not len(self) and not self._supply.coming_back:
            # Nobody else holds pages, so the locked prefix itself may leave no room for the rest: try without it.
            allocation = self._allocate(prefix, positions, most, owner, 0, prefetch)
        return allocation

    def _allocate(
        self,
        prefix: TokenPrefix,
        positions: int,
        most: int,
        owner: str,
        reusable: int,
        prefetch: PrefetchRequest | None,
    ) -> Allocation | None:
        match = self._tree.match(prefix.head(reusable))
        tier = Tier.HOST if self._planner.worth_loading(match) else Tier.DEVICE
        depth = match.depth if tier is Tier.HOST else match.device_depth
        pages = self._pools.pages_for(most)
        needs = self._kinds.needs(dict.fromkeys(self._kinds.paged, pages - depth))
        needs[self._kinds.full] = self._pools.pages_for(positions) - depth
        if not self._supply.fits(needs):
            return None
        lock = self._tree.lock(match, owner, tier=tier)
        loads = self._planner.loads(lock)
        leases = self._planner.lease(lock, loads, needs)
        if leases is None:
            return None
        loaded = depth - match.device_depth
        stored = min(loaded, prefetch.gained) if prefetch is not None else 0
        if prefetch is not None:
            self._prefetcher.release(prefetch)
        spec = self._pools.spec
        size = spec.page_tokens
        cached = CachedTokens((depth - loaded) * size, (loaded - stored) * size, stored * size)
        allocation = Allocation(owner, prefix, pages, lock, depth, cached)
        allocation.loaded_bytes = sum(count * spec.unit_bytes(pool) for pool, count in loads.items())
        for pool in self._kinds.paged:
            held = lock.on_device(pool)
            allocation.enter(pool, held, depth)
            allocation.digests[pool] = page_digests(held, depth)
            allocation.tables[pool].put(depth, leases[pool].indices, leases[pool].epochs)
            allocation.runs[pool] = [PageRun(depth, leases[pool])]
        allocation.slots = {pool: leases[pool] for pool in self._kinds.states}
        return self.open(allocation, fresh=True)

    # ------------------------------------------------------------ prompts that another worker computes

    def preallocate(
        self, prefix: TokenPrefix, prompt: int, positions: int, owner: str, most: int | None = None
    ) -> tuple[Allocation, dict[str, Lease]] | None:
        """Allocate for a prompt of `prompt` positions that is handed over, with room for `positions` in all.

        `most`: the length that the request may reach. The full pool is extended as it grows; of window and state pools
        all that the request ever holds at once is leased now. Parts that the tree has are locked, component by
        component: on the device, or on the host if they can be loaded; they needn't be sent. Returns the allocation and
        a lease for each pool: first the pages (or the slot) that `lacking` names, then those of later positions. The
        receiver owns the leases until `commit_transfer`. Returns None without room, with nothing taken.
        """
        reserved = self._preallocate(prefix, prompt, positions, owner, most or positions)
        if reserved is None and len(prefix) and not len(self):
            # Pages in quarantine aren't waited for here: a writer whose death isn't proven may keep them for long.
            reserved = self._preallocate(prefix.head(0), prompt, positions, owner, most or positions)
        return reserved

    def _preallocate(
        self, prefix: TokenPrefix, prompt: int, positions: int, owner: str, most: int
    ) -> tuple[Allocation, dict[str, Lease]] | None:
        full, wanted = self._kinds.full, due(self._pools.spec, prompt)
        lock, held = self._tree.hold(prefix, wanted, owner, host=self._planner.enabled)
        loads = self._planner.loads(lock)
        lacking = missing(wanted, held)
        pages, pages_here = self._pools.pages_for(most), self._pools.pages_for(prompt)
        needs = self._kinds.needs({pool: len(lacking[pool]) + pages - pages_here for pool in self._kinds.paged})
        needs[full] = len(lacking[full]) + self._pools.pages_for(positions) - pages_here
        leases = self._planner.lease(lock, loads, needs)
        if leases is None:
            return None
        depth = lacking[full].start
        size = self._pools.spec.page_tokens
        from_host = min(loads[full], depth) * size
        cached = CachedTokens(min(prompt, depth * size - from_host), from_host)
        allocation = Allocation(owner, prefix, pages, lock, depth, cached, lacking=lacking)
        for pool in self._kinds.paged:
            allocation.enter_held(pool, wanted[pool])
        return self.open(allocation), leases

    def commit_transfer(
        self, allocation: Allocation, prompt: int, leases: Mapping[str, Lease], digests: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Enter `leases` into the block tables; the allocation owns them from now on.

        Everything in `lacking` must have arrived there, verified. `digests` are those of the pages that arrived, by
        pool and page number. State slots that weren't lacking are filled from the tree's snapshots.
        """
        whole = prompt // self._pools.spec.page_tokens
        for pool in self._kinds.paged:
            lacking, lease = allocation.lacking[pool], leases[pool]
            received = lease.split(len(lacking), allocation.owner)
            for first, part in ((lacking.start, received), (self._pools.pages_for(prompt), lease)):
                allocation.tables[pool].put(first, part.indices, part.epochs)
                allocation.runs[pool].append(PageRun(first, part))
            known = page_digests(allocation.lock.on_device(pool), whole)
            for number, digest in digests.get(pool, {}).items():
                if number < whole:
                    known[number] = digest
            pages = allocation.tables[pool].pages[:whole]
            allocation.digests[pool] = [d if page != NULL_PAGE else None for d, page in zip(known, pages, strict=True)]
        for pool in self._kinds.states:
            allocation.slots[pool] = leases[pool]
            if not allocation.lacking[pool]:
                self._fill_slot(allocation, pool)

    # ------------------------------------------------------------ cached pages, for no request in particular

    def hold_for_push(self, prefix: TokenPrefix, owner: str) -> Allocation:
        """Lock the leading full pages of `prefix` that are on the device, to be written to another worker.

        `depth` of the allocation is their number, perhaps 0; the allocation holds nothing else. The caller frees it.
        """
        full = self._kinds.full
        wanted = {full: range(len(prefix))}
        lock, held = self._tree.hold(prefix, wanted, owner, host=False)
        depth = len(held[full])
        allocation = Allocation(owner, prefix, depth, lock, depth, CachedTokens())
        allocation.enter_nothing(self._kinds.paged)
        allocation.lacking = {full: range(depth, len(prefix))}
        allocation.enter_held(full, wanted[full])
        allocation.digests[full] = page_digests(lock.on_device(full), depth)
        return self.open(allocation)

    def reserve_for_pull(self, prefix: TokenPrefix, owner: str, *, spare: bool) -> tuple[Allocation, Lease] | None:
        """Lease the full pages of `prefix` that the device lacks, for another worker to write.

        With `spare`, only free pages are leased and nothing is evicted. Returns None without room, or if nothing lacks.
        """
        full = self._kinds.full
        wanted = {full: range(len(prefix))}
        lock, held = self._tree.hold(prefix, wanted, owner, host=False)
        lacking = missing(wanted, held)[full]
        room = lacking and not (spare and len(lacking) > self._pools.allocators[full].free)
        leases = self._supply.lease_all({full: len(lacking)}, owner) if room else None
        if leases is None:
            self._tree.locks.unlock(lock)
            return None
        allocation = Allocation(owner, prefix, len(prefix), lock, lacking.start, CachedTokens())
        allocation.enter_nothing(self._kinds.paged)
        allocation.lacking = {full: lacking}
        return self.open(allocation), leases[full]

    def insert_pulled(self, allocation: Allocation, lease: Lease, digests: Mapping[int, int]) -> None:
        """Insert pulled pages, which must be verified, into the tree; frees the allocation and `lease`.

        `digests` are by page number.
        """
        full = self._kinds.full
        lacking = allocation.lacking[full]
        offer = PageOffer(lacking.start, lease, [digests[n] for n in lacking])
        self._tree.insert(allocation.prefix, {full: [offer]}, Tier.DEVICE)
        lease.release()
        self.free(allocation)

    # ------------------------------------------------------------ from its opening to its end

    def open(self, allocation: Allocation, *, fresh: bool = False) -> Allocation:
        """Enter an allocation. `fresh`: its state slots are still to be filled, by `launch`."""
        self._open[allocation.lock] = allocation
        if fresh:
            self._fresh.append(allocation)
        self.counters["hit_tokens_device"] += allocation.cached.device
        self.counters["hit_tokens_host"] += allocation.cached.host
        self.counters["hit_tokens_storage"] += allocation.cached.storage
        return allocation

    def launch(self) -> None:
        """Begin to fill the state slots of the allocations opened as `fresh` since the last call, except those freed
        meanwhile. Loads that were planned for them have begun: see `KVCacheManager.launch`."""
        fresh, self._fresh = self._fresh, []
        for allocation in fresh:
            if not allocation.released:
                for pool in self._kinds.states:
                    self._fill_slot(allocation, pool)

    def _fill_slot(self, allocation: Allocation, pool: str) -> None:
        """Begin to fill the working slot of `pool`: with the tree's snapshot at the allocation's depth, or with zeros.

        A device error shows in `Allocation.start_failed`.
        """
        (slot,) = allocation.slots[pool].indices
        snapshots = [p for p in allocation.lock.of(pool) if p.tier is Tier.DEVICE]
        if not snapshots:
            op = DeviceOp("zero slot", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, pool, (slot,)),))
            allocation.started.append(attempt(self._device, op, lambda: self._pools.zero({pool: (slot,)})))
            return
        source, after = snapshots[0].lease.indices[0], self.completions(allocation)
        allocation.started.append(copy_slot(self._device, self._pools, pool, source, slot, after))

    def ready(self, allocation: Allocation) -> bool:
        """Whether all state loaded for the allocation has arrived undamaged, so that its steps may be committed."""
        if allocation in self._fresh:
            # The operations that fill its state slots aren't even submitted, so `started` is still empty.
            return False
        if not all(c.done for c in allocation.started) or allocation.start_failed:
            return False
        return not allocation.invalid and not self._load_back.under_way(allocation.lock)

    def completions(self, allocation: Allocation) -> list[Completion]:
        """Operations that must be complete before the allocation's pages may be read without a gate."""
        return self._load_back.completions(allocation.lock)

    def invalidate(self, locks: Iterable[NodeLock]) -> list[Allocation]:
        """Mark allocations invalid: those whose recurrent states failed to get into their slots, then those of `locks`,
        which rely on damaged state. Returns those that weren't invalid before."""
        invalid = [a for a in self if not a.invalid and a.start_failed]
        relied = [self._open.get(lock) for lock in locks]
        invalid += [a for a in dict.fromkeys(relied) if a is not None and not a.invalid and a not in invalid]
        for allocation in invalid:
            allocation.invalid = True
        return invalid

    def free(self, allocation: Allocation, after: Sequence[Completion] = ()) -> None:
        """Give back everything that the allocation holds. Idempotent.

        `after`: launched operations that name its pages and slots. These are leased to nobody before the operations
        are complete.
        """
        if allocation.released:
            return
        allocation.released = True
        snapshots = [s for held in allocation.snapshots.values() for s in held]
        under_way = [c for c in [*after, *allocation.started, *(s.completion for s in snapshots)] if not c.done]
        for completion in under_way:
            reason = f"launched for {allocation.owner}"
            self._in_flight.hold(
                completion, *(self._pools.allocators[p].pin(i, reason) for p, i in allocation.named().items())
            )
        del self._open[allocation.lock]
        self._tree.locks.unlock(allocation.lock)
        leases = [s.lease for s in snapshots] + [*allocation.slots.values(), *allocation.spare.values()]
        for lease in leases + [run.lease for runs in allocation.runs.values() for run in runs]:
            lease.release()

    # ------------------------------------------------------------ the whole

    def own(self, pool: str) -> int:
        """Device pages (or slots) of `pool` that allocations leased themselves and still hold."""
        return sum(allocation.own(pool) for allocation in self)

    def check(self) -> list[str]:
        """Check all block tables; returns a line for each fault."""
        found = []
        for allocation in self:
            for pool in self._kinds.paged:
                found += allocation.check(self._pools.allocators[pool], pool)
        return found
