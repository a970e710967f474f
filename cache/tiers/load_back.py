"""Host to device: what the host has below a request's device anchor is loaded, layer by layer behind the gates.

Loads of all requests of a round go together: one operation a layer, so that the first layers can be computed while
the last are still on their way. A node's part is on the device as soon as its load is planned: whoever comes next
finds it there, and its forward pass waits at the same gates. A load counts as good only when every page of every
pool has come and its digest matches; until then nothing that was computed from it may be committed. What doesn't
match, or whose copy failed, is invalidated with everything below it, and the requests that relied on it are told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cache.device.device_port import DEVICE, HOST, Completion, Device, DeviceOp, DeviceStream, attempt, failure, spans
from cache.memory.page_moves import PageMove
from cache.pool.page_allocator import Lease
from cache.pool.pool_set import PoolSet
from cache.prefix_cache.radix_tree import RadixTree
from cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode
from contracts.damage import DamageSite, log_damage

_log = logging.getLogger("twinpool.cache")


@dataclass(eq=False)
class _Load:
    """Parts that are loaded together. Locks follow the splits of nodes, on both sides alike."""

    sources: NodeLock
    """The parts on the host."""
    targets: NodeLock
    """The parts on the device, in the same order."""
    beside: NodeLock
    """The full parts of their nodes, which must stay as long as they do."""
    completions: list[Completion]
    nbytes: int = 0
    began: float = 0.0

    @property
    def locks(self) -> tuple[NodeLock, NodeLock, NodeLock]:
        return self.sources, self.targets, self.beside


class LoadBack:
    """Loads parts of one tree from its host pools. `now` is in seconds."""

    def __init__(
        self, tree: RadixTree, pools: PoolSet, host: PoolSet, device: Device, now: Callable[[], float], verify: bool
    ) -> None:
        self._tree, self._pools, self._host, self._device, self._now = tree, pools, host, device, now
        self._verify = verify
        self.unproven: Callable[[NodePart], bool] = lambda part: False
        """Whether a part of the host is to be checked even where `verify` is off: nobody of this process wrote it."""
        self.proved: Callable[[NodePart], None] = lambda part: None
        """Told of parts of the host that matched."""
        self.torn: Callable[[NodePart, int], bool] = lambda part, count: False
        """Asked about parts of the host that didn't: whether that is no damage."""
        self._planned: _Load | None = None
        self._loads: list[_Load] = []
        self.bytes_per_s = 0.0
        """Of loads lately; 0 before the first."""
        self.counters = {"pages_loaded": 0.0, "pages_damaged_on_host": 0.0, "loads_failed": 0.0}

    @property
    def busy(self) -> bool:
        return bool(self._planned or self._loads)

    @property
    def locks(self) -> int:
        """Locks in the tree that it holds."""
        return sum(len(load.locks) for load in self._all())

    @property
    def nbytes(self) -> int:
        """Bytes planned and under way."""
        return sum(load.nbytes for load in self._all())

    def _all(self) -> list[_Load]:
        return self._loads if self._planned is None else [*self._loads, self._planned]

    def missing(self, lock: NodeLock) -> list[NodePart]:
        """What `lock` keeps on the host and the device lacks, full parts first and from the root down."""
        lacking = [p for p in lock.parts if p.tier is Tier.HOST and p.component not in p.node.parts[Tier.DEVICE]]
        return sorted(lacking, key=lambda p: p.component != self._tree.full)

    def _size(self, part: NodePart) -> int:
        return len(part) * self._pools.spec.unit_bytes(part.component)

    def plan(self, lock: NodeLock, leases: dict[str, Lease]) -> None:
        """Load what `lock` is missing into `leases` (by pool, exactly as much); the tree owns it from now on."""
        accounts, locks = self._tree.accounts, self._tree.locks
        for source in self.missing(lock):
            if self._planned is None:
                self._planned = _Load(locks.keep((), "load"), locks.keep((), "load"), locks.keep((), "load"), [])
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
        """Begin everything that was planned since the last call."""
        load, self._planned = self._planned, None
        if load is None:
            return
        pools = {p.component for p in load.sources.parts}
        froms = {pool: [i for p in load.sources.of(pool) for i in p.lease.indices] for pool in pools}
        tos = {pool: [i for p in load.targets.of(pool) for i in p.lease.indices] for pool in pools}
        move, spec = PageMove.of(froms, tos), self._pools.spec
        load.began = self._now()
        for layer in range(max(spec.by_name[pool].layers for pool in pools)):
            load.completions.append(self._submit(move, layer))
        self._loads.append(load)
        self.counters["pages_loaded"] += len(froms.get(self._tree.full, ()))

    def _submit(self, move: PageMove, layer: int) -> Completion:
        here = {p.pool: p for p in move.parts if layer < self._pools.spec.by_name[p.pool].layers}
        reads = spans(HOST, {pool: part.sources for pool, part in here.items()}, (layer,))
        writes = spans(DEVICE, {pool: part.targets for pool, part in here.items()}, (layer,))
        host, pools, chosen = self._host, self._pools, PageMove(tuple(here.values()))
        completion = attempt(
            self._device,
            DeviceOp(f"load layer {layer}", DeviceStream.LOAD, reads, writes),
            lambda: host.copy(chosen, pools, range(layer, layer + 1)),
        )
        for pool in here:
            pools.gates[pool].expect(layer, completion)
        return completion

    def under_way(self, lock: NodeLock) -> bool:
        """Whether anything that `lock` keeps is still being loaded, or not yet known to be good."""
        loading = {load.targets for load in self._all()}
        return bool(loading) and any(p.locks & loading for p in lock.parts)

    def completions(self, lock: NodeLock) -> list[Completion]:
        """What must be complete before anything that `lock` keeps may be read without a gate."""
        return [c for load in self._loads if any(load.targets in p.locks for p in lock.parts) for c in load.completions]

    def poll(self) -> list[NodeLock]:
        """Take in what is complete; returns the locks of those who relied on what turned out damaged."""
        invalid: list[NodeLock] = []
        for load in [x for x in self._loads if all(c.done for c in x.completions)]:
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

    def _bad(self, load: _Load) -> list[NodePart]:
        """What of a complete load isn't what it should be."""
        failed = [c for c in load.completions if failure(c) is not None]
        if failed:
            self.counters["loads_failed"] += 1
            return list(load.targets.parts)
        bad, damaged = [], []
        for source, target in zip(load.sources.parts, load.targets.parts, strict=True):
            if self._verify or self.unproven(source):
                if self._matches(target):
                    self.proved(source)
                    continue
                bad.append(target)
                damaged += [target] if not self.torn(source, len(target)) else []
        self.counters["pages_damaged_on_host"] += sum(len(p) for p in damaged)
        for part in damaged:
            first = part.node.start
            owners = sorted({lock.owner for lock in part.locks if lock not in load.locks})
            pages = [first, first + len(part.node)]
            log_damage(_log, DamageSite.LOAD, pool=part.component, pages=pages, relied=owners)
        return bad

    def _matches(self, part: NodePart) -> bool:
        size, start = self._pools.spec.page_tokens, part.node.start
        if self._tree.component(part.component).point:
            firsts = ends = [(start + len(part.node)) * size]
        else:
            firsts = [(start + i) * size for i in range(len(part))]
            ends = [first + size for first in firsts]
        found = self._pools.digest(part.component, part.lease.indices, firsts, ends)
        return tuple(found) == part.digests
