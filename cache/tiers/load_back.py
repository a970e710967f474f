"""Load back, host to device: pages that only the host has below a request's device anchor are loaded layer by layer.

Loads of all requests of a round go together: one operation a layer, so that the first layers can be computed while the
last are still being copied. In the tree a part is on the device as soon as its load is planned: the next request
matches it there, and that request's forward pass waits at the same load gates. A load counts as good only when every
page of every pool has come and its digest, which the load's last operation takes, matches; until then nothing that was
computed from it may be committed. Parts that don't match, and parts of a failed copy, are invalidated with everything
below them, and `poll` returns the locks of the requests that relied on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinpool.cache.device.device_port import Completion, Device, DeviceStream
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PageExtent, PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode
from twinpool.cache.tiers.tier_copy import InFlightCopy, TierCopy
from twinpool.contracts.damage import DamageSite, log_damage

_log = logging.getLogger("twinpool.cache")


@dataclass(eq=False)
class _Load:
    """Parts that are loaded together. When a node is split, the locks on both sides follow alike."""

    sources: NodeLock
    """The parts on the host."""
    targets: NodeLock
    """The parts on the device, in the same order."""
    beside: NodeLock
    """The full parts of the same nodes and tiers, which must stay as long as sources and targets do."""
    copy: InFlightCopy | None = None
    """None: the load is planned, not begun."""
    nbytes: int = 0
    began: float = 0.0

    checked: Mapping[str, PageExtent] | None = None
    """The pages on the device whose digests are taken with the copy, by pool."""

    def digests(self) -> dict[tuple[str, int], int]:
        """Returns the digests of the pages that were checked, by pool and page. The copy must be done."""
        if self.checked is None:
            return {}
        found = self.copy.digests() if self.copy is not None else None
        assert found is not None, "a copy that was to take digests has taken them"
        pages = {pool: zip(self.checked[pool].indices, digests, strict=True) for pool, digests in found.items()}
        return {(pool, index): digest for pool, ends in pages.items() for index, digest in ends}

    @property
    def locks(self) -> tuple[NodeLock, NodeLock, NodeLock]:
        return self.sources, self.targets, self.beside


class AdoptedPages(Protocol):
    """The pages of an earlier incarnation in the host tier, as far as their digests weren't checked since."""

    def unproven(self, part: NodePart) -> bool:
        """Whether a part on the host is to be checked even where checks are off."""

    def proved(self, part: NodePart) -> None:
        """All pages of this part on the host have matched their digests."""

    def torn(self, part: NodePart, count: int) -> bool:
        """Whether `count` pages of a part that don't match are torn: unfinished when the worker died, not damaged.

        Counts and logs them, if so.
        """


class LoadBack:
    """Loads parts of one tree from `host` into `pools`: `plan`, then `launch` once a round, then `poll`.

    `now` is in seconds. With `verify`, the digests of all loaded pages are checked, else only those that are unproven.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: PoolSet,
        host: PoolSet,
        device: Device,
        now: Callable[[], float],
        verify: bool,
        adopted: AdoptedPages,
    ) -> None:
        self._tree, self._pools, self._now = tree, pools, now
        self._copier = TierCopy(device, host, pools, DeviceStream.LOAD)
        self._verify, self._adopted = verify, adopted
        self._planned: _Load | None = None
        self._loads: list[_Load] = []
        self.bytes_per_s = 0.0
        """The rate of recent loads, smoothed; 0 before the first has ended."""
        self.counters = {"pages_loaded": 0.0, "pages_damaged_on_host": 0.0, "loads_failed": 0.0}

    @property
    def busy(self) -> bool:
        return bool(self._planned or self._loads)

    @property
    def locks(self) -> int:
        """The number of the tree's locks that loads hold."""
        return sum(len(load.locks) for load in self._all())

    @property
    def nbytes(self) -> int:
        """Bytes planned and in flight."""
        return sum(load.nbytes for load in self._all())

    def _all(self) -> list[_Load]:
        return self._loads if self._planned is None else [*self._loads, self._planned]

    def missing(self, lock: NodeLock) -> list[NodePart]:
        """Returns the parts that `lock` keeps on the host and the device lacks, full parts first, from the root
        down."""
        lacking = [p for p in lock.parts if p.tier is Tier.HOST and p.component not in p.node.parts[Tier.DEVICE]]
        return sorted(lacking, key=lambda p: p.component != self._tree.full)

    def _size(self, part: NodePart) -> int:
        return len(part) * self._pools.spec.unit_bytes(part.component)

    def plan(self, lock: NodeLock, leases: dict[str, Lease]) -> None:
        """Plan to load the parts that `missing` returns for `lock`; `launch` begins it.

        `leases`: device pages and slots, by pool, exactly as many as are missing; the tree owns them from now on.
        `lock` keeps the parts on the device as well from now on.
        """
        accounts, locks = self._tree.accounts, self._tree.locks
        for source in self.missing(lock):
            if self._planned is None:
                self._planned = _Load(locks.keep((), "load"), locks.keep((), "load"), locks.keep((), "load"))
            load = self._planned
            lease = leases[source.component].split(len(source), f"tree {source.component}")
            target = accounts.attach(source.node, source.component, Tier.DEVICE, lease, source.digests)
            for part in (source, target):
                beside = part.node.parts[part.tier][accounts.full]
                if load.beside not in beside.locks:
                    locks.add(load.beside, beside)
            locks.add(lock, target)
            locks.add(load.sources, source)
            locks.add(load.targets, target)
            load.nbytes += self._size(source)
        for lease in leases.values():
            lease.release()

    def launch(self) -> None:
        """Begin all loads that were planned since the last call, as one copy."""
        load, self._planned = self._planned, None
        if load is None:
            return
        pools = {p.component for p in load.sources.parts}
        froms = {pool: [i for p in load.sources.of(pool) for i in p.lease.indices] for pool in pools}
        tos = {pool: [i for p in load.targets.of(pool) for i in p.lease.indices] for pool in pools}
        load.began = self._now()
        load.checked = self._checked(load)
        load.copy = self._copier.by_layers("load", PageMove.of(froms, tos), digested=load.checked)
        self._loads.append(load)
        self.counters["pages_loaded"] += len(froms.get(self._tree.full, ()))

    def under_way(self, lock: NodeLock) -> bool:
        """Whether a part that `lock` keeps is planned to be loaded, being loaded, or not yet known to be good."""
        loading = {load.targets for load in self._all()}
        return bool(loading) and any(p.locks & loading for p in lock.parts)

    def completions(self, lock: NodeLock) -> list[Completion]:
        """Returns the operations that must be complete before parts that `lock` keeps are read without a load gate."""
        copies = [x.copy for x in self._loads if x.copy and any(x.targets in p.locks for p in lock.parts)]
        return [completion for copy in copies for completion in copy.completions]

    def poll(self) -> list[NodeLock]:
        """Check the loads that are complete; returns the locks of requests that relied on bad parts.

        Bad parts don't match their digests, or their copy failed; they are invalidated with everything below them. A
        lock is in the list once for each bad part that it keeps.
        """
        invalid: list[NodeLock] = []
        for load in [x for x in self._loads if x.copy is not None and x.copy.done]:
            self._loads.remove(load)
            seconds = self._now() - load.began
            if seconds > 0:
                rate = load.nbytes / seconds
                self.bytes_per_s = rate if not self.bytes_per_s else 0.7 * self.bytes_per_s + 0.3 * rate
            bad = self._bad(load)
            for part in bad:
                invalid += [lock for lock in part.locks if lock not in load.locks]
            nodes: list[TreeNode] = [part.node for part in bad]
            for lock in load.locks:
                self._tree.locks.unlock(lock)
            for node in nodes:
                self._tree.eviction.invalidate(node)
        return invalid

    def _checked(self, load: _Load) -> dict[str, PageExtent] | None:
        """Returns the pages on the device whose digests are taken with the load, by pool; None where there are none."""
        checked: dict[str, list[NodePart]] = {}
        for source, target in zip(load.sources.parts, load.targets.parts, strict=True):
            if self._verify or self._adopted.unproven(source):
                checked.setdefault(target.component, []).append(target)
        return {pool: self._extent(parts) for pool, parts in checked.items()} or None

    def _extent(self, parts: Sequence[NodePart]) -> PageExtent:
        size = self._pools.spec.page_tokens
        firsts: list[int] = []
        for part in parts:
            start = part.node.start
            point = self._tree.component(part.component).point
            firsts += [(start + len(part.node)) * size] if point else [(start + i) * size for i in range(len(part))]
        indices = tuple(index for part in parts for index in part.lease.indices)
        epochs = tuple(epoch for part in parts for epoch in part.lease.epochs)
        return PageExtent(indices, epochs, tuple(firsts), tuple(first + size for first in firsts))

    def _bad(self, load: _Load) -> list[NodePart]:
        """Returns the parts of a complete load that don't match their digests; all of them, if the copy failed."""
        if load.copy is None or load.copy.failed:
            self.counters["loads_failed"] += 1
            return list(load.targets.parts)
        # By page: nodes may have been split meanwhile, and the parts of a load with them.
        digests = load.digests()
        bad, damaged = [], []
        for source, target in zip(load.sources.parts, load.targets.parts, strict=True):
            found = [digests.get((target.component, index)) for index in target.lease.indices]
            if found[0] is not None:
                if tuple(found) == target.digests:
                    self._adopted.proved(source)
                    continue
                bad.append(target)
                damaged += [target] if not self._adopted.torn(source, len(target)) else []
        self.counters["pages_damaged_on_host"] += sum(len(p) for p in damaged)
        for part in damaged:
            first = part.node.start
            owners = sorted({lock.owner for lock in part.locks if lock not in load.locks})
            pages = [first, first + len(part.node)]
            log_damage(_log, DamageSite.LOAD, pool=part.component, pages=pages, relied=owners)
        return bad
