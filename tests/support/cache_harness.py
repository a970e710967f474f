"""A world around a KV cache manager: requests that compute, share, leave and come back, and a plain model beside them.

Every page carries bytes derived from the tokens up to its end, every state slot bytes derived from the tokens so far;
a forward pass goes through the gates layer by layer, reads all that its request may attend to and compares. Passes may
be launched one ahead of what is committed; what was committed may be sent while everything goes on. The model is a
set of block hashes for each component: what has ever been shared. It says how much a request may find at most, and
exactly how much as long as nothing was evicted, invalidated, damaged or left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count

import torch

from tests.support.cache_faults import FaultyDevice, Watch, damage_host, damage_storage
from tests.support.cache_requests import Step, Visitor, as_bytes, content
from tests.support.pool_sets import worn
from twinpool.cache.allocation import NULL_PAGE, Allocation
from twinpool.cache.arena.arena import Arena
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import (
    DEVICE,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    attempt,
    failure,
    spans,
)
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import LayoutOrder, PoolSetLayout, PoolSetSpec
from twinpool.cache.memory.page_moves import gather
from twinpool.cache.pool.page_allocator import Pin
from twinpool.cache.pool.pool_set import LayerBuffers, PoolSet
from twinpool.cache.prefix_cache.tree_components import WindowComponent
from twinpool.cache.prefix_cache.tree_node import Tier, TokenPrefix, TreeNode
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue, StorageOp
from twinpool.cache.storage.storage_backend import ObjectName
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import CacheConfig, PrefetchConfig

_worlds = count()


class World:
    """See the module's prose. `seed` decides device, faults and policies' randomness."""

    def __init__(
        self,
        spec: PoolSetSpec,
        seed: int,
        *,
        adversarial: bool = False,
        pages: int = 24,
        host_pages: int = 30,
        write_policy: str = "through",
        eviction: str = "lru",
        prefetch_policy: str = "wait_complete",
        storage: bool = True,
        fault_rate: float = 0.0,
        device_fault_rate: float = 0.0,
        stride: int = 1 << 40,
        counts: Mapping[str, int] | None = None,
        segment: memoryview | None = None,
        chunk_bytes: int = CacheConfig().copy_chunk_bytes,
    ) -> None:
        """`segment`: memory for the host tier that outlives this world; what is left there is taken over."""
        self.spec, self.rng = spec, random.Random(seed)
        self.clock = ManualClock()
        self.seen: Counter[str] = Counter()
        """What has happened, for those who want to know that it has."""
        self.adversarial = AdversarialDevice(seed, clock=self.clock) if adversarial else None
        self.device: Device = FaultyDevice(self.adversarial or CpuDevice(), self.rng, device_fault_rate, self._broke)
        self.pools = worn(PoolSet(spec, spec.even(pages) | dict(counts or {})), seed)
        layout = PoolSetLayout(spec, spec.even(host_pages), LayoutOrder.PAGE_FIRST)
        self.arena = Arena(segment, layout, "world") if segment is not None else None
        region = self.arena.region if self.arena is not None else None
        self.host = PoolSet(spec, layout.counts, region, LayoutOrder.PAGE_FIRST, "host") if host_pages else None
        if self.host is not None:
            worn(self.host, f"host {seed}")
        self.backend = MemoryBackend(f"world {next(_worlds)}", 1 << 24)
        self.fault_rate = fault_rate
        self.queue = InlineIoQueue(self.backend, fault=self._fault) if storage and self.host is not None else None
        config = CacheConfig(
            page_tokens=spec.page_tokens,
            load_back="always",
            copy_chunk_bytes=chunk_bytes,
            write_policy=write_policy,  # type: ignore[arg-type]
            eviction=eviction,  # type: ignore[arg-type]
            prefetch=PrefetchConfig(policy=prefetch_policy, base_s=0.01, per_token_s=0.0, batch_pages=2),  # type: ignore[arg-type]
        )
        self.manager = KVCacheManager(
            self.pools, self.device, config, self.clock.now, stride=stride,
            below=LowerTiers(self.host, self.queue, fingerprint="model", arena=self.arena),
        )  # fmt: skip
        self.watch = Watch(self.manager, self.seen)
        self.sends: list[tuple[Completion, list[Pin], Allocation, list[str]]] = []
        self.visitors: list[Visitor] = []
        self.shared: dict[str, set[bytes]] = {c.name: set() for c in self.manager.tree.components}
        self.disturbed = False
        """Something was evicted, invalidated or damaged: finds may be shorter than the model's."""
        self.damaged = False
        self.changes = 0
        """Steps that changed state."""
        self._number = 0
        if self.arena is not None:
            if self.arena.bond:
                self._take_over()
            else:
                self.manager.tiers.keeper.begin(b"of these worlds.")

    def _take_over(self) -> None:
        """What is sealed there was shared in an earlier world; not all that was shared is there."""
        self.disturbed = True
        self.seen["adopted"] += self.manager.tiers.keeper.adopt()
        for node in self.manager.tree.accounts.nodes():
            for part in node.parts[Tier.HOST].values():
                point = self.manager.tree.component(part.component).point
                self.shared[part.component] |= set(node.keys[-1:] if point else node.keys)

    def _broke(self, name: str) -> None:
        self.disturbed = self.damaged = True
        self.seen[f"device fault in {name}"] += 1

    def _fault(self, op: StorageOp, name: ObjectName) -> str | None:
        # There are far fewer reads than writes.
        if self.rng.random() < self.fault_rate * (4 if op is StorageOp.READ else 1):
            self.disturbed = True
            self.seen[f"storage fault in {op}"] += 1
            return "a fault on purpose"
        return None

    # ------------------------------------------------------------ the model

    def expected(self, prefix: TokenPrefix, reusable: int) -> int:
        """How many pages of `prefix` the model would reuse, if nothing had ever been lost."""
        full = self.shared[self.manager.full]
        length = 0
        while length < reusable and prefix.key(length) in full:
            length += 1
        while length and not all(self._has(c.name, prefix, length) for c in self.manager.tree.components[1:]):
            length -= 1
        return length

    def _has(self, name: str, prefix: TokenPrefix, length: int) -> bool:
        component = self.manager.tree.component(name)
        first = length - 1 if component.point else 0
        if isinstance(component, WindowComponent):
            first = max(0, length - component.reach)
        return all(prefix.key(page) in self.shared[name] for page in range(first, length))

    # ------------------------------------------------------------ requests

    def arrive(self, tokens: Sequence[int], salt: str = "") -> Visitor:
        self._number += 1
        prefix = TokenPrefix.of(tokens, self.spec.page_tokens, salt)
        # The last page may be left out, as its last position must be computed anyway.
        reusable = max(0, len(prefix) - (self.rng.random() < 0.7))
        visitor = Visitor(
            f"request {self._number}", prefix, reusable, self.manager.tiers.prefetcher.start(prefix.head(reusable))
        )
        self.visitors.append(visitor)
        self.changes += 1
        return visitor

    def admit(self, visitor: Visitor) -> bool:
        if visitor.allocation is not None:
            return False
        if visitor.prefetch is not None and not self.manager.tiers.prefetcher.may_run(visitor.prefetch):
            return False
        expected = self.expected(visitor.prefix, visitor.reusable)
        positions = len(visitor.prefix) * self.spec.page_tokens
        before = self.manager.supply.counters["pages_evicted"]
        allocation = self.manager.allocations.allocate(
            visitor.prefix, positions, visitor.name, reusable=visitor.reusable, prefetch=visitor.prefetch
        )
        self.look(before)
        if allocation is None:
            return False
        assert allocation.depth <= expected, f"found {allocation.depth} pages, only {expected} were ever shared"
        if not self.disturbed:
            assert allocation.depth == expected, (
                f"found {allocation.depth} pages, {expected} were shared and nothing was lost"
            )
        assert allocation.cached.total == allocation.depth * self.spec.page_tokens
        visitor.allocation, visitor.done = allocation, allocation.depth
        self.changes += 1
        self._note(allocation, expected)
        return True

    def _note(self, allocation: Allocation, expected: int) -> None:
        cached = allocation.cached
        self.seen["exact find"] += not self.disturbed and expected > 0
        self.seen["found on host"] += cached.host > 0
        self.seen["found in storage"] += cached.storage > 0
        self.seen["found shorter than ever shared"] += allocation.depth < expected
        self.seen["snapshot used"] += bool(allocation.slots) and allocation.depth > 0

    def look(self, evicted_before: float) -> None:
        self.disturbed |= self.manager.supply.counters["pages_evicted"] != evicted_before
        stats = self.manager.tiers.stats()
        self.disturbed |= stats.get("saves_left_out", 0) + stats.get("prefetch_pages_dropped", 0) > 0

    def compute(self, visitor: Visitor, pages: int, *, snapshot: bool = False) -> bool:
        """Launch a forward pass over the next `pages` pages, perhaps while the one before is under way."""
        allocation, begin = visitor.allocation, visitor.launched
        if allocation is None or len(visitor.steps) > 1 or begin == len(visitor.prefix):
            return False
        self.manager.launch()
        end = self.grow(visitor, min(len(visitor.prefix), begin + pages))
        if end == begin:
            return False
        slots = {pool: list(slot.indices) for pool, slot in allocation.slots.items()}
        reads = {pool: self.attended(allocation, pool, begin) for pool in allocation.tables} | slots
        writes = {pool: allocation.tables[pool].pages[begin:end] for pool in allocation.tables} | slots
        passages = {pool: self.pools.gates[pool].enter(pool) for pool in self.spec.by_name}
        step = Step(None, end, [])  # type: ignore[arg-type]

        def run() -> None:
            for pool in self.spec.by_name:
                for layer in range(self.spec.by_name[pool].layers):
                    buffers = passages[pool].layer(layer)
                    step.wrong += self._read(visitor, pool, layer, buffers, reads[pool], begin)
                    self._write(visitor, pool, layer, buffers, writes[pool], range(begin, end))

        op = DeviceOp("forward", DeviceStream.COMPUTE, spans(DEVICE, reads), spans(DEVICE, writes))
        gates = {gate: waits for passage in passages.values() for gate, waits in passage.gates.items()}
        step.completion = self.device.submit(op, run, gates=gates)
        visitor.steps.append(step)
        self.seen["forward behind a gate"] += bool(gates)
        self.seen["forward one step ahead"] += len(visitor.steps) > 1
        if snapshot and allocation.slots:
            step.copied = self._snapshot(allocation, end)
        self.changes += 1
        return True

    def grow(self, visitor: Visitor, end: int) -> int:
        """Windows get their pages up to page `end`; returns how far they go."""
        allocation, size = visitor.allocation, self.spec.page_tokens
        assert allocation is not None
        there = self.manager.running.extend(allocation, end * size) // size
        if there < end and not visitor.steps:
            self.manager.running.free_window_pages(allocation, visitor.done * size)
            there = self.manager.running.extend(allocation, end * size) // size
        self.seen["a window waited for its pages"] += there < end
        self.seen["a window used its pages again"] += bool(allocation.spare)
        return there

    def _snapshot(self, allocation: Allocation, pages: int) -> list[Completion]:
        before = self.manager.supply.counters["pages_evicted"]
        if not self.manager.running.snapshot(allocation, pages * self.spec.page_tokens):
            self.seen["no slot for a snapshot"] += 1
            return []
        self.look(before)
        return [held[-1].completion for held in allocation.snapshots.values()]

    def attended(self, allocation: Allocation, pool: str, done: int) -> list[int]:
        """The pages that a pass after `done` pages attends to."""
        component = self.manager.tree.component(pool)
        first = max(0, done - component.reach) if isinstance(component, WindowComponent) else 0
        pages = allocation.tables[pool].pages[first:done]
        assert NULL_PAGE not in pages, f"{pool}: pages that attention still sees have been given back"
        return list(pages)

    def _keys(self, visitor: Visitor, pool: str, pages: range) -> list[bytes]:
        """Whose content pages `pages` of a pool have, or its slot after them."""
        wanted = pages[-1:] if self.manager.tree.component(pool).point else pages
        return [visitor.prefix.key(page) for page in wanted]

    def _rows(self, pool: str, layer: int, keys: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """What pages or slots of these keys hold in one layer, by buffer: uint8 [keys, entry_bytes]."""
        size = self.spec.unit_bytes(pool)
        whole = torch.stack([content(key, pool, size) if key else torch.zeros(size, dtype=torch.uint8) for key in keys])
        out, at = {}, 0
        for buffer in self.spec.by_name[pool].buffers:
            entry = buffer.entry_bytes(self.spec.page_tokens)
            start = at + layer * entry
            out[buffer.name] = whole[:, start : start + entry]
            at += buffer.layers * entry
        return out

    def _read(
        self, visitor: Visitor, pool: str, layer: int, buffers: LayerBuffers, indices: Sequence[int], begin: int
    ) -> list[str]:
        """What differs from what `visitor` has computed up to page `begin`, in one layer."""
        if not indices:
            return []
        point = self.manager.tree.component(pool).point
        keys = self._keys(visitor, pool, range(0 if point else begin - len(indices), begin)) or [b""]
        wrong = []
        for name, rows in self._rows(pool, layer, keys).items():
            found = as_bytes(buffers[name][list(indices)])
            wrong += [
                f"{visitor.name}: {name} of {pool} page {index}, layer {layer}"
                for index, mine, want in zip(indices, found, rows, strict=True)
                if not mine.equal(want)
            ]
        return wrong

    def _write(
        self, visitor: Visitor, pool: str, layer: int, buffers: LayerBuffers, indices: Sequence[int], pages: range
    ) -> None:
        for name, rows in self._rows(pool, layer, self._keys(visitor, pool, pages)).items():
            view = buffers[name]
            view[list(indices)] = rows.contiguous().view(view.dtype).view(-1, *view.shape[1:])

    def commit(self, visitor: Visitor, *, share: bool, snapshot: bool = False) -> bool:
        """Take in the oldest forward pass if it is complete and what it read has proved good."""
        allocation = visitor.allocation
        if allocation is None or not visitor.steps or not visitor.steps[0].completion.done:
            return False
        self.poll()
        if allocation.released or not self.manager.allocations.ready(allocation):
            return allocation.released
        step = visitor.steps.pop(0)
        assert not step.wrong, f"read other bytes than its own: {step.wrong}"
        assert failure(step.completion) is None
        visitor.done = step.end
        positions = step.end * self.spec.page_tokens
        self.manager.finished.seal([(allocation, positions)])
        before = self.manager.supply.counters["pages_evicted"]
        if snapshot and allocation.slots and not visitor.steps:
            self._snapshot(allocation, step.end)
        if self.rng.random() < 0.5:
            self.manager.running.free_window_pages(allocation, positions)
        if share:
            self._share(visitor, allocation)
        self.look(before)
        self.changes += 1
        return True

    def send(self, visitor: Visitor) -> bool:
        """Send what is launched, as a hand-over does: after the pass that computes it, from pages that are pinned."""
        allocation, end = visitor.allocation, visitor.launched
        if allocation is None or not end or visitor.sends:
            return False
        self.manager.launch()
        after = (
            [step.completion for step in visitor.steps]
            + self.manager.allocations.completions(allocation)
            + allocation.started
        )
        pages = {pool: self.attended(allocation, pool, end) for pool in allocation.tables}
        if not visitor.steps and end == len(visitor.prefix):
            pages |= {pool: list(slot.indices) for pool, slot in allocation.slots.items()}
        wrong: list[str] = []

        def run() -> None:
            for pool, indices in pages.items():
                keys = self._keys(visitor, pool, range(end - len(indices), end))
                size = self.spec.unit_bytes(pool)
                for row, key in zip(gather(self.pools.region, self.pools.layout, pool, indices), keys, strict=True):
                    wrong.extend([] if row.equal(content(key, pool, size)) else [f"{visitor.name}: {pool}"])

        done = attempt(self.device, DeviceOp("send", DeviceStream.SEND, spans(DEVICE, pages)), run, after)
        visitor.sends.append(done)
        pins = [self.pools.allocators[pool].pin(indices, "send") for pool, indices in pages.items()]
        self.sends.append((done, pins, allocation, wrong))
        self.changes += 1
        return True

    def _sent(self) -> None:
        for entry in [e for e in self.sends if e[0].done]:
            self.sends.remove(entry)
            done, pins, allocation, wrong = entry
            for pin in pins:
                pin.release()
            relied = allocation.invalid or (allocation.released and self.damaged)
            assert not wrong or relied, f"sent other bytes than its own: {wrong}"
            broke = failure(done)
            assert broke is None or str(broke).endswith("on purpose")
            self.seen["sent"] += broke is None
        for visitor in self.visitors:
            visitor.sends = [done for done in visitor.sends if not done.done]

    def _share(self, visitor: Visitor, allocation: Allocation) -> None:
        prefix = visitor.prefix.head(visitor.done)
        snapshots = [s for held in allocation.snapshots.values() for s in held]
        there = [s for s in snapshots if s.completion.done and failure(s.completion) is None]
        self.manager.finished.cache_pages(allocation, prefix)
        for pool, table in allocation.tables.items():
            known = [p for p in range(len(prefix)) if p < allocation.depth or table.pages[p] != NULL_PAGE]
            if pool != self.manager.full:
                known = [p for p in range(len(prefix)) if table.pages[p] != NULL_PAGE]
            self.shared[pool] |= {prefix.key(page) for page in known}
        # One that was still being copied may have been offered or not.
        kept = [s for s in snapshots if s in there or not len(s.lease)]
        for pool in allocation.slots:
            self.shared[pool] |= {prefix.key(s.depth - 1) for s in kept if s.depth <= len(prefix)}

    def leave(self, visitor: Visitor) -> None:
        """Finish or cancel, wherever it is; what a launched pass names stays out of use until it is complete."""
        allocation = visitor.allocation
        if allocation is not None:
            self.seen["left with a step launched"] += bool(visitor.steps)
            self.seen["left with a load under way"] += not self.manager.allocations.ready(allocation)
            self.manager.allocations.free(allocation, [step.completion for step in visitor.steps])
        if visitor.prefetch is not None:
            self.manager.tiers.prefetcher.release(visitor.prefetch)
        self.visitors.remove(visitor)
        self.changes += 1

    # ------------------------------------------------------------ what happens around them

    def poll(self) -> None:
        for allocation in self.manager.poll():
            assert self.damaged, "nothing was damaged, and a load didn't match its tags"
            self.seen["allocation invalid"] += 1
            visitor = next(v for v in self.visitors if v.allocation is allocation)
            self.leave(visitor)
        self._sent()
        self.look(self.manager.supply.counters["pages_evicted"])

    def evict(self, tier: Tier, pool: str, count: int) -> None:
        freed = (
            self.manager.supply.evict(pool, count)
            if tier is Tier.DEVICE
            else self.manager.tree.eviction.evict(tier, pool, count)
        )
        self.disturbed |= freed > 0
        self.changes += freed > 0

    def forget(self, *, host: bool) -> bool:
        """Evict what a lower tier has as well, all of it: nothing that was shared is lost."""
        nodes = list(self.manager.tree.accounts.nodes())
        if self.host is None or any(n.parts[Tier.DEVICE].keys() - n.parts[Tier.HOST].keys() for n in nodes):
            return False
        if host and (any(v.allocation is None for v in self.visitors) or not all(map(self._stored, nodes))):
            return False
        tiers = (Tier.DEVICE, Tier.HOST) if host else (Tier.DEVICE,)
        freed = sum(
            self.manager.tree.eviction.evict(tier, pool, 1 << 30) for tier in tiers for pool in self.spec.by_name
        )
        self.seen["forgot what storage has" if host else "forgot what the host has"] += freed > 0
        self.changes += freed > 0
        return freed > 0

    def _stored(self, node: TreeNode) -> bool:
        keys = [(name, key) for name in node.parts[Tier.HOST] for key in node.keys]
        keys = [(n, k) for n, k in keys if not self.manager.tree.component(n).point or k == node.keys[-1]]
        return all(self.backend.exists([ObjectName("model", name, key) for name, key in keys]))

    def invalidate(self, prefix: TokenPrefix, page: int) -> None:
        invalidated = self.manager.finished.invalidate(prefix, page)
        self.disturbed |= invalidated > 0
        self.changes += invalidated > 0

    def damage(self, tier: Tier) -> None:
        """Change bytes on the host or in storage behind the KV cache manager's back."""
        if tier is Tier.HOST:
            done = ["flipped"] if damage_host(self.manager, self.rng) else []
        else:
            # Several at once: few of the many objects are ever read again.
            done = [how for _ in range(4) if (how := damage_storage(self.backend, self.rng))]
        for how in done:
            self.seen[f"{tier.name.lower()} {how}"] += 1
        self.damaged |= bool(done)
        self.disturbed |= bool(done)

    def settle(self) -> None:
        """Everybody leaves, everything under way comes to its end; then all pools must be whole. The world is over."""
        for visitor in list(self.visitors):
            self.leave(visitor)
        for _ in range(200):
            if self.queue is not None:
                self.queue.run_all(self.rng)
            self.manager.launch()
            self._run_out()
            self.poll()
            if not self.manager.busy and not self.sends and not (self.queue and self.queue.waiting):
                break
        assert self.check() == []
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST):
            for pool in self.spec.by_name:
                self.manager.tree.eviction.evict(tier, pool, 1 << 30)
        assert len(self.manager.tree.locks) == 0, [(lock.owner, lock.parts) for lock in self.manager.tree.locks.locked]
        for pools in (self.pools, *([self.host] if self.host else [])):
            for allocator in pools.allocators.values():
                assert allocator.free == allocator.total, (
                    f"{allocator.name}: {allocator.free} of {allocator.total} free"
                )
                assert allocator.leases == 0
        assert self.check() == []
        self.manager.close()
        self.backend.close()
        for pools in (self.pools, *([self.host] if self.host else [])):
            pools.close()

    def _run_out(self) -> None:
        if self.adversarial is None:
            return
        try:
            self.adversarial.settle()
        except RuntimeError as error:
            # Whoever left before it failed never hears of it.
            if not str(error).endswith("on purpose"):
                raise

    def check(self) -> list[str]:
        return self.manager.check()
