"""Backup, device to host: parts of the tree are copied down, parents before children.

A copy locks the parts that it reads, and becomes the nodes' parts on the host once it is complete, not before. When the
host is full, a copy is left out and counted. A copy that fails is counted and given up: nothing depends on it. Parts
that have come to the host go on to storage (`storage_backup.py`), where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from twinpool.cache.device.device_port import Device, DeviceStream
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode
from twinpool.cache.storage.page_store import PageStore
from twinpool.cache.tiers.in_flight_copy import InFlightCopy
from twinpool.cache.tiers.storage_backup import StorageBackup
from twinpool.cache.tiers.tier_copy import TierCopy
from twinpool.contracts.errors import CapacityError


@dataclass(eq=False)
class _Backup:
    """One copy to the host in flight: `lock` keeps the parts that it reads, `above` the full parts of their nodes, and
    `leases` hold the host pages that it writes, by pool."""

    copy: InFlightCopy
    lock: NodeLock
    above: NodeLock
    leases: dict[str, Lease]


class HostBackup:
    """Copies nodes of one tree to its host pools, and on to storage where there is one."""

    def __init__(
        self,
        tree: RadixTree,
        pools: PoolSet,
        host: PoolSet,
        device: Device,
        page_store: PageStore | None,
        chunk_bytes: int,
        now: Callable[[], float],
        retry_s: float,
    ) -> None:
        """`now` is in seconds; `retry_s` is the first rest of a part that storage didn't take (`StorageBackup`)."""
        self._tree, self._host, self._chunk_bytes = tree, host, chunk_bytes
        self._copier = TierCopy(device, pools, host, DeviceStream.SAVE)
        self._storage = StorageBackup(tree, host.spec, page_store, now, retry_s)
        self._saves: list[_Backup] = []
        self._counters = {"pages_saved": 0.0, "saves_left_out": 0.0, "saves_failed": 0.0}

    @property
    def counters(self) -> dict[str, float]:
        return self._counters | self._storage.counters

    @property
    def busy(self) -> bool:
        return bool(self._saves) or self._storage.busy

    @property
    def locks(self) -> int:
        """The number of the tree's locks that copies to the host and writes to storage hold."""
        return 2 * len(self._saves) + self._storage.locks

    def leased(self, component: str) -> int:
        """Returns how many host pages (or slots) copies in flight hold."""
        return sum(len(s.leases[component]) for s in self._saves if component in s.leases)

    def save(self, nodes: Iterable[TreeNode]) -> bool:
        """Begin to copy the parts of `nodes` that the host lacks; False when the host had no room for all of them.

        `nodes` come parents first. A node whose parent neither is on the host nor being copied there is left out,
        unless the host is written back to.
        """
        coming = {s.lock for s in self._saves}
        parts: dict[NodePart, None] = {}
        names = [c.name for c in self._tree.components]
        for node in nodes:
            device, host = node.parts
            if device.keys() <= host.keys() or not self._may_come(node, coming, parts):
                continue
            ordered = [device[name] for name in names if name in device and name not in host]
            parts |= dict.fromkeys(p for p in ordered if p.locks.isdisjoint(coming))
        return not parts or self._copy(list(parts))

    def _may_come(self, node: TreeNode, coming: set[NodeLock], parts: Container[NodePart]) -> bool:
        full, parent = self._tree.full, node.parent
        if full not in node.parts[Tier.DEVICE] or not node.linked:
            return False
        if self._tree.write_back or parent is None or parent.parent is None or full in parent.parts[Tier.HOST]:
            return True
        above = parent.parts[Tier.DEVICE].get(full)
        return above is not None and (above in parts or not above.locks.isdisjoint(coming))

    def _copy(self, parts: list[NodePart]) -> bool:
        above = self._tree.locks.keep([p.node.parts[Tier.DEVICE][self._tree.full] for p in parts], "above a save")
        lock = self._tree.locks.keep(parts, "save")
        leases: dict[str, Lease] = {}
        try:
            for component in self._tree.components:
                count = sum(len(p) for p in lock.of(component.name))
                if count:
                    leases[component.name] = self.lease(component.name, count)
        except CapacityError:
            self._let_go(lock, above, leases)
            if len(parts) > 1:
                # The beginning of a prefix is of use without its end.
                half = len(parts) // 2
                self._copy(parts[:half])
                parts = parts[half:]
            self._counters["saves_left_out"] += sum(map(len, parts))
            return False
        sources = {name: [i for p in lock.of(name) for i in p.lease.indices] for name in leases}
        targets = {name: lease.indices for name, lease in leases.items()}
        copy = self._copier.by_pieces("save", PageMove.of(sources, targets), self._chunk_bytes)
        self._saves.append(_Backup(copy, lock, above, leases))
        self.poll()
        return True

    def lease(self, component: str, count: int) -> Lease:
        """Lease host pages (or slots), evicting from the tree's host tier if need be; raises `CapacityError` if that
        isn't enough."""
        allocator = self._host.allocators[component]
        if count > allocator.free:
            self._tree.eviction.evict(Tier.HOST, component, count - allocator.free)
        return allocator.lease(count, f"save {component}")

    def _let_go(self, lock: NodeLock, above: NodeLock, leases: dict[str, Lease]) -> None:
        self._tree.locks.unlock(lock)
        self._tree.locks.unlock(above)
        for lease in leases.values():
            lease.release()

    def poll(self) -> None:
        """Hang complete copies on their nodes, and go on with writes to storage. To be called once a round."""
        # In order: a parent's copy was begun before its child's, and comes to the host before it.
        while self._saves and self._saves[0].copy.done:
            save = self._saves.pop(0)
            if not save.copy.failed:
                self._finish(save)
            else:
                self._counters["saves_failed"] += 1
            self._let_go(save.lock, save.above, save.leases)
        self._storage.poll()

    def _finish(self, save: _Backup) -> None:
        accounts, arrived = self._tree.accounts, []
        for part in save.lock.parts:
            lease = save.leases[part.component].split(len(part), f"host {part.component}")
            if self._wanted(part):
                arrived.append(accounts.attach(part.node, part.component, Tier.HOST, lease, part.digests))
                self._counters["pages_saved"] += len(part) if part.component == accounts.full else 0
            else:
                lease.release()
        self._storage.offer(arrived)

    def _wanted(self, part: NodePart) -> bool:
        """Whether a copied part may still be hung on its node's host tier: the tree may have changed since the copy
        began."""
        node, full = part.node, self._tree.full
        if part.component in node.parts[Tier.HOST] or not node.linked:
            return False
        if part.component != full:
            return full in node.parts[Tier.HOST]
        parent = node.parent
        assert parent is not None
        return self._tree.write_back or parent.parent is None or full in parent.parts[Tier.HOST]

    def check(self) -> list[str]:
        saves = {s.lock for s in self._saves}
        found = []
        for node in self._tree.accounts.nodes():
            for part in node.parts[Tier.DEVICE].values():
                if len(part.locks & saves) > 1:
                    found.append(f"tree: {part.component} of {len(part)} is saved twice at once")
        for save in self._saves:
            for name, lease in save.leases.items():
                if len(lease) != sum(len(p) for p in save.lock.of(name)):
                    found.append(f"save: {name}: {len(lease)} leased on the host for other parts than it reads")
        return found + self._storage.check()
