"""What goes wrong around a KV cache manager in tests, and a watch that counts what really happened to its tree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from twinpool.cache.device.device_port import Completion, Device, DeviceOp
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.prefix_cache.tree_components import WindowComponent
from twinpool.cache.prefix_cache.tree_node import NodePart, Tier, TreeNode
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.storage_backend import ObjectName, seal
from twinpool.cache.tiers.prefetch import Prefetcher, PrefetchRequest

_MAGIC = b"twinpage"
_MOVERS = ("load", "save", "store", "above a save")


class FaultyDevice:
    """A device whose copies fail now and then: at the launch, or in the middle, with half of it written."""

    def __init__(self, device: Device, rng: random.Random, rate: float, broke: Callable[[str], None]) -> None:
        self.torch_device = device.torch_device
        self.allocate_host, self.register_host, self.touch = device.allocate_host, device.register_host, device.touch
        self.remote_write = device.remote_write
        self.checks, self.marks, self.close = device.checks, device.marks, device.close
        self.end_lane = device.end_lane
        self._device, self._rng, self._rate, self._broke = device, rng, rate, broke

    def submit(
        self, op: DeviceOp, run: Callable[[], object], after: Sequence[Completion] = (), **others: Any
    ) -> Completion:
        if op.name in ("forward", "send") or self._rng.random() >= self._rate:
            return self._device.submit(op, run, after, **others)
        self._broke(op.name.rstrip("0123456789 "))
        if self._rng.random() < 0.3:
            raise RuntimeError(f"{op.name} was not launched, on purpose")
        begun = self._rng.random() < 0.5

        def broken() -> None:
            if begun:
                run()
            raise RuntimeError(f"{op.name} broke, on purpose")

        return self._device.submit(op, broken, after, **others)


def damage_host(manager: KVCacheManager, rng: random.Random) -> bool:
    """Flip bits of a page that the tree holds on the host and nobody is reading or writing."""
    parts = [p for n in manager.tree.accounts.nodes() for p in n.parts[Tier.HOST].values() if not p.locks]
    if not parts or manager.host is None:
        return False
    part = rng.choice(parts)
    page = manager.host.layout.page(manager.host.region, part.component, rng.choice(part.lease.indices))
    page[rng.randrange(len(page))] ^= 1 + rng.randrange(255)
    return True


def damage_storage(backend: MemoryBackend, rng: random.Random) -> str:
    """Do something to stored objects that a disk or a stranger might do; returns what, or nothing."""
    objects = backend.store.objects
    whole = [key for key, stored in objects.items() if _whole(stored)]
    if not whole:
        return ""
    key = rng.choice(whole)
    how = rng.choice(["flipped", "cut", "swapped", "lost", "sealed again"])
    if how == "lost":
        backend.store.pop(key)
    elif how == "swapped":
        other = rng.choice(list(objects))
        sizes = len(objects[other]) - len(objects[key])
        objects[key], objects[other] = objects[other], objects[key]
        assert sizes == len(objects[key]) - len(objects[other]), "what is used in all stays the same"
    elif how == "cut":
        objects[key] = objects[key][: rng.randrange(len(objects[key]))]
        backend.store.used_bytes = sum(map(len, objects.values()))
    else:
        objects[key] = _flipped(objects[key], rng, again=how == "sealed again")
    return how


def _whole(stored: bytes) -> bool:
    """Whether nobody has cut it yet."""
    at = stored.rfind(_MAGIC)
    return at > 0 and len(stored) == at + 40 + int.from_bytes(stored[at + 10 : at + 12], "little")


def _flipped(stored: bytes, rng: random.Random, *, again: bool) -> bytes:
    at = stored.rindex(_MAGIC)
    payload = bytearray(stored[:at])
    payload[rng.randrange(at)] ^= 1 + rng.randrange(255)
    if not again:
        return bytes(payload) + stored[at:]
    size = int.from_bytes(stored[at + 10 : at + 12], "little")
    encoded, digest = stored[-size:], int.from_bytes(stored[at + 24 : at + 32], "little")
    fingerprint, pool, part = encoded[16:].decode().split("\0")
    return bytes(payload) + seal(ObjectName(fingerprint, pool, encoded[:16], part), digest, bytes(payload))


class Watch:
    """Counts splits, healings, evictions and more, as they happen in `manager`'s tree, into `seen`."""

    def __init__(self, manager: KVCacheManager, seen: Counter[str]) -> None:
        self._tree, self._seen = manager.tree, seen
        self._evicting = False
        self._since: dict[int, int] = {}
        tree: Any = manager.tree
        accounts, eviction = tree.accounts, tree.eviction
        self._attach, accounts.hang = accounts.hang, self.attach
        self._split, accounts.split = accounts.split, self.split
        self._detach, accounts.detach = accounts.detach, self.detach
        self._evict, eviction.evict = eviction.evict, self.evict
        self._invalidate, eviction.invalidate = eviction.invalidate, self.invalidate
        supply: Any = manager.supply
        self._spill, supply._spill = supply._spill, self.spill
        if isinstance(manager.tiers.prefetcher, Prefetcher):
            prefetcher: Any = manager.tiers.prefetcher
            self._end, prefetcher._end = prefetcher._end, self.end

    def attach(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        tree, tick = self._tree, self._tree.accounts.tick
        full = node.parts[tier].get(tree.full)
        if isinstance(tree.component(name), WindowComponent) and full is not None and tier is Tier.DEVICE:
            self._seen["tombstone healed"] += self._since.get(id(full), tick) < tick
        part: NodePart = self._attach(node, name, tier, lease, digests)
        if name == tree.full:
            self._since[id(part)] = tick
        return part

    def split(self, node: TreeNode, pages: int) -> TreeNode:
        owners = {
            lock.owner for tier in (Tier.DEVICE, Tier.HOST) for p in node.parts[tier].values() for lock in p.locks
        }
        self._seen["split of a locked node"] += bool(owners.difference(_MOVERS))
        for mover in owners.intersection(("load", "save", "store")):
            self._seen[f"split under a {mover}"] += 1
        upper: TreeNode = self._split(node, pages)
        return upper

    def detach(self, part: NodePart) -> None:
        if self._evicting:
            alone = part.component != self._tree.full and self._tree.full in part.node.parts[part.tier]
            self._seen[f"evicted {part.component} on {part.tier.name.lower()}" + (" alone" if alone else "")] += 1
        self._detach(part)

    def evict(self, *args: Any) -> int:
        self._evicting, before = True, self._evicting
        try:
            freed: int = self._evict(*args)
            return freed
        finally:
            self._evicting = before

    def invalidate(self, node: TreeNode) -> int:
        locked = any(p.locks for tier in (Tier.DEVICE, Tier.HOST) for p in node.parts[tier].values())
        count: int = self._invalidate(node)
        self._seen["invalidated"] += count > 0
        self._seen["invalidated while locked"] += count > 0 and locked
        return count

    def spill(self, node: TreeNode) -> bool:
        spilled: bool = self._spill(node)
        self._seen["spilled before it went"] += spilled
        return spilled

    def end(self, prefetch: PrefetchRequest) -> None:
        self._end(prefetch)
        if prefetch.over:
            wanted = prefetch.target - prefetch.held
            kind = "whole" if prefetch.gained == wanted else "in part" if prefetch.gained else "in vain"
            self._seen[f"prefetched {kind}" if wanted > 0 else "nothing to prefetch"] += 1
            self._seen["prefetch stopped"] += prefetch.stopped and wanted > 0
