"""The pages and slots of running requests: leased for new positions, given back as windows move on, copied aside.

`PageSupply` leases what is free or what the tree can evict, all pools or none. `RunningPages` extends requests by it.

Tables grow at their end, a step at a time. Pages that a window has left are used again further on, under new epochs.
Recurrent states are in working slots, of which snapshots are taken at page boundaries, for the tree. Copies of slots
are on the stream of the forward passes, so that accesses to a slot keep the order of launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.allocation import Allocation, PageRun, StateSnapshot, TableSlice
from twinpool.cache.device.device_port import DEVICE, Completion, Device, DeviceOp, DeviceStream, PageSpanUse, attempt
from twinpool.cache.manager.tier_set import NoBackup, unaccounted
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.cache.memory.page_moves import PageMove, PoolMove
from twinpool.cache.pool.page_allocator import InFlightPins, Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import Tier, TokenPrefix, TreeNode
from twinpool.cache.tiers.backup import HostBackup
from twinpool.contracts.errors import CapacityError

SNAPSHOTS = 2
"""The most snapshots of a request that aren't in the tree yet: a further one replaces the oldest."""


@dataclass(frozen=True, slots=True)
class PoolKinds:
    """Names of a model's pools by kind, and how many pages or slots of each a request leases at once."""

    full: str
    paged: tuple[str, ...]
    """Pools with block tables: the full pool and the window pools."""
    windows: Mapping[str, int]
    """Window pools, each with the most pages of it that one request holds at once."""
    states: tuple[str, ...]
    """Pools of recurrent states, in slots."""

    @classmethod
    def of(cls, spec: PoolSetSpec, stride: int) -> PoolKinds:
        """`stride`: positions beyond the committed length that launched steps of one request write at most."""
        return cls(
            spec.full.name,
            tuple(p.name for p in spec.pools if p.kind is not PoolKind.STATE),
            {p.name: spec.window_hold(p.name, stride) for p in spec.pools if p.window_tokens},
            tuple(p.name for p in spec.pools if p.kind is PoolKind.STATE),
        )

    def needs(self, pages: Mapping[str, int]) -> dict[str, int]:
        """Return what a request leases to get `pages` new pages, by pool.

        Of a window pool at most what the request ever holds at once, of each state pool one slot.
        """
        needs = {pool: min(count, self.windows.get(pool, count)) for pool, count in pages.items()}
        return needs | dict.fromkeys(self.states, 1)


class PageSupply:
    """Leases pages of the device's pools, for which the tree evicts. `backup` saves nodes that are written back.

    The other parts of a manager take `pools`, `kinds` and `tree` from here.
    """

    def __init__(self, pools: PoolSet, kinds: PoolKinds, tree: RadixTree, backup: HostBackup | NoBackup) -> None:
        self.pools, self.kinds, self.tree, self._backup = pools, kinds, tree, backup
        self.counters = {"pages_evicted": 0.0}

    def lease_all(self, needs: Mapping[str, int], owner: str) -> dict[str, Lease] | None:
        """Lease `needs`, by pool, evicting from the tree where too few are free; None, with no lease, without room.

        Evicted pages that an operation still touches aren't free yet: then more are evicted. Where that can't make room
        either, nothing is.
        """
        if any(count > self.free_pages(pool) for pool, count in needs.items()):
            return None
        leases: dict[str, Lease] = {}
        for pool, count in needs.items():
            allocator = self.pools.allocators[pool]
            while count > allocator.free and (evicted := self.evict(pool, count - allocator.free)):
                self.counters["pages_evicted"] += evicted
            try:
                leases[pool] = allocator.lease(count, owner)
            except CapacityError:
                for lease in leases.values():
                    lease.release()
                return None
        return leases

    def evict(self, pool: str, count: int) -> int:
        """Free up to `count` pages (or slots) of `pool` that only the tree holds; returns how many."""
        spill = self._spill if self.tree.write_back else None
        return self.tree.eviction.evict(Tier.DEVICE, pool, count, spill)

    def _spill(self, node: TreeNode) -> bool:
        return self._backup.save([node]) and self.kinds.full not in node.parts[Tier.HOST]

    def free_pages(self, pool: str) -> int:
        """Pages (or slots) of `pool` that are free or that the tree can evict."""
        return self.pools.allocators[pool].free + self.tree.eviction.evictable(pool)

    @property
    def coming_back(self) -> bool:
        """Whether operations under way still keep pages: such as were given back (quarantine), and, where no allocation
        is open, such as copies lock in the tree."""
        protected = self.tree.accounts.protected
        return any(
            allocator.quarantined or protected[Tier.DEVICE, pool] for pool, allocator in self.pools.allocators.items()
        )

    def fits(self, needs: Mapping[str, int]) -> bool:
        """Whether the pools are large enough for `needs`, whatever is free now."""
        return all(count <= self.pools.allocators[pool].total for pool, count in needs.items())

    def cached_pages(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` are on the device."""
        there = 0
        for node, pages in self.tree.walked(prefix):
            if self.kinds.full not in node.parts[Tier.DEVICE]:
                break
            there += pages
        return there

    def kept_pages(self, prefix: TokenPrefix) -> int:
        """How many leading full pages of `prefix` are on the device and locked there."""
        held = 0
        for node, pages in self.tree.walked(prefix):
            part = node.parts[Tier.DEVICE].get(self.kinds.full)
            if part is None or not part.locks:
                break
            held += pages
        return held

    @property
    def max_positions(self) -> int:
        """Positions that one request can hold when all pages of all pools are free."""
        bounds = [self.pools.max_positions]
        for pool, most in self.kinds.windows.items():
            total = self.pools.allocators[pool].total
            bounds += [total * self.pools.spec.page_tokens] if total < most else []
        return min(bounds)

    def check(self, held: Mapping[str, int]) -> list[str]:
        """Return a line for each pool where pages in use aren't the tree's plus `held`, the count of all others'."""
        sizes = self.tree.accounts.sizes
        return unaccounted(self.pools, {pool: sizes[Tier.DEVICE, pool] + count for pool, count in held.items()})


class RunningPages:
    """Extends allocations to the positions of the next step, frees pages that windows left, makes block tables, and
    takes snapshots of recurrent states."""

    def __init__(self, device: Device, supply: PageSupply, in_flight: InFlightPins) -> None:
        self._device, self._supply, self._in_flight = device, supply, in_flight
        self._pools, self._kinds, self._spec = supply.pools, supply.kinds, supply.pools.spec

    def extend(self, allocation: Allocation, end: int) -> int:
        """Extend all tables to positions up to `end`; returns the position that every table reaches, at most `end`.

        Less than `end` where a pool has no free or evictable page left, and where a window can't move on before steps
        under way are committed.
        """
        for pool in self._kinds.paged:
            table = allocation.tables[pool]
            if len(table) * self._spec.page_tokens < end:
                self._extend_pool(allocation, pool, self._pools.pages_for(end) - len(table))
            end = min(end, len(table) * self._spec.page_tokens)
        return end

    def _extend_pool(self, allocation: Allocation, pool: str, lacking: int) -> None:
        """Append up to `lacking` pages: of a window, its spare pages, then the rest of what it may hold at once."""
        spare = allocation.spare.get(pool)
        if spare is not None and len(spare):
            taken = spare.split(min(lacking, len(spare)), allocation.owner)
            lacking -= len(taken)
            self._append(allocation, pool, taken)
        if pool in self._kinds.windows:
            lacking = min(lacking, self._kinds.windows[pool] - allocation.own(pool))
        leases = self._supply.lease_all({pool: lacking}, allocation.owner) if lacking > 0 else None
        if leases is not None:
            self._append(allocation, pool, leases[pool])

    def _append(self, allocation: Allocation, pool: str, lease: Lease) -> None:
        """Append the pages of `lease` to the table of `pool`."""
        runs, first = allocation.runs[pool], len(allocation.tables[pool])
        allocation.tables[pool].put(first, lease.indices, lease.epochs)
        if runs and runs[-1].end == first:
            last = runs.pop()
            first, lease = last.first, self._pools.allocators[pool].join([last.lease, lease], allocation.owner)
        runs.append(PageRun(first, lease))

    def block_tables(self, allocation: Allocation, start: int, end: int) -> dict[str, TableSlice]:
        """The part of each pool's block table that is needed for a forward pass over positions `start .. end-1`.

        A window's table begins at the first page that the pass reads; a state pool's has the one slot.
        """
        stop = self._pools.pages_for(end)
        out = {}
        for pool in self._kinds.paged:
            window = self._spec.by_name[pool].window_tokens
            first = max(0, start - window + 1) // self._spec.page_tokens if window else 0
            out[pool] = TableSlice(allocation.tables[pool], first, stop)
        for pool, lease in allocation.slots.items():
            out[pool] = TableSlice.of(lease.indices, lease.epochs)
        return out

    def free_window_pages(self, allocation: Allocation, committed: int) -> None:
        """Give back the window pages that no position from the last page boundary on can see.

        As many as the request still needs are leased again at once, under new epochs.
        """
        for pool in self._kinds.windows:
            window = self._spec.by_name[pool].window_tokens
            boundary = committed // self._spec.page_tokens * self._spec.page_tokens
            first = max(0, boundary - window + 1) // self._spec.page_tokens
            self._free_before(allocation, pool, first)
            self._set_aside(allocation, pool)

    def _free_before(self, allocation: Allocation, pool: str, first: int) -> None:
        """Give back pages of `pool` before page `first` that the allocation leased itself."""
        kept = []
        for run in allocation.runs[pool]:
            gone = max(0, min(first, run.end) - run.first)
            run.lease.split(gone, allocation.owner).release()
            if len(run.lease):
                kept.append(PageRun(run.first + gone, run.lease))
            else:
                run.lease.release()
            allocation.tables[pool].clear(run.first, run.first + gone)
            for page in range(run.first, run.first + gone):
                if page < len(allocation.digests[pool]):
                    allocation.digests[pool][page] = None
        allocation.runs[pool] = kept

    def replace_windows(self, allocation: Allocation, pages: int) -> bool:
        """Lease spare pages in place of the window pages among the first `pages`, which the tree is to take.

        So the allocation goes on with as many pages of its own as before. Returns False without room for them, with
        nothing taken: then the tree can't have them.
        """
        needs = {pool: self._to_replace(allocation, pool, pages) for pool in self._kinds.windows}
        leases = self._supply.lease_all({pool: n for pool, n in needs.items() if n}, allocation.owner)
        for pool, lease in (leases or {}).items():
            self._add_spare(allocation, pool, lease)
        return leases is not None

    def _to_replace(self, allocation: Allocation, pool: str, pages: int) -> int:
        """How many of its own pages of `pool` are among the first `pages`, as far as positions are still to come."""
        own = sum(max(0, min(pages, run.end) - run.first) for run in allocation.runs[pool])
        spare = allocation.spare.get(pool)
        to_come = allocation.pages - len(allocation.tables[pool]) - (len(spare) if spare is not None else 0)
        return max(0, min(own, to_come))

    def trim(self, allocation: Allocation) -> None:
        """Give back spare window pages beyond what the allocation may hold at once: the tree had pages like those that
        were replaced."""
        for pool, most in self._kinds.windows.items():
            spare = allocation.spare.get(pool)
            if spare is not None:
                spare.split(min(len(spare), max(0, allocation.own(pool) - most)), allocation.owner).release()

    def _add_spare(self, allocation: Allocation, pool: str, lease: Lease) -> None:
        spare, join = allocation.spare.get(pool), self._pools.allocators[pool].join
        allocation.spare[pool] = join([spare, lease], allocation.owner) if spare is not None else lease

    def _set_aside(self, allocation: Allocation, pool: str) -> None:
        """Lease spare pages for positions still to come, up to what the allocation may hold at once."""
        spare = allocation.spare.get(pool)
        to_come = allocation.pages - len(allocation.tables[pool]) - (len(spare) if spare is not None else 0)
        again = min(to_come, self._kinds.windows[pool] - allocation.own(pool), self._pools.allocators[pool].free)
        if again > 0:
            self._add_spare(allocation, pool, self._pools.allocators[pool].lease(again, allocation.owner))

    # ------------------------------------------------------------ recurrent states

    @property
    def stateful(self) -> bool:
        """Whether requests have recurrent states, of which snapshots are wanted at page boundaries."""
        return bool(self._kinds.states)

    def snapshot(self, allocation: Allocation, committed: int) -> bool:
        """Copy the recurrent states aside, as they are after `committed` positions (whole pages).

        Steps must have been launched up to `committed` and no further. Returns False without a free slot in every
        state pool; nothing happens then.
        """
        assert committed % self._pools.spec.page_tokens == 0, "snapshots are taken at page boundaries"
        needs = dict.fromkeys(self._kinds.states, 1)
        leases = self._supply.lease_all(needs, f"snapshot of {allocation.owner}")
        if leases is None:
            return False
        for pool, lease in leases.items():
            source, target = allocation.slots[pool].indices[0], lease.indices[0]
            copied = copy_slot(self._device, self._pools, pool, source, target)
            held = allocation.snapshots.setdefault(pool, [])
            held.append(StateSnapshot(committed // self._pools.spec.page_tokens, lease, copied))
            while len(held) > SNAPSHOTS:
                self._give_back(held.pop(0))
        return True

    def _give_back(self, snapshot: StateSnapshot) -> None:
        if not snapshot.completion.done:
            self._in_flight.hold(snapshot.completion, snapshot.lease.pin("snapshot under way"))
        snapshot.lease.release()


def copy_slot(
    device: Device, pools: PoolSet, pool: str, source: int, target: int, after: Sequence[Completion] = ()
) -> Completion:
    """Begin to copy one slot of a state pool to another, after the operations in `after`, on the stream of steps."""
    read, written = (PageSpanUse(DEVICE, pool, (source,)),), (PageSpanUse(DEVICE, pool, (target,)),)
    move = PageMove((PoolMove(pool, (source,), (target,)),))
    op = DeviceOp("copy slot", DeviceStream.COMPUTE, read, written)
    return attempt(device, op, lambda: pools.copy(move, pools), after)
