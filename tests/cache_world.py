"""A world around a seat, for tests: requests that compute, share, leave and come back, and a plain model beside them.

Every page carries bytes derived from the tokens up to its end, every state slot bytes derived from the tokens so far;
a forward pass reads all that its request may attend to and compares. The model is three sets of chain keys: what has
ever been shared of each component. It says how much a request may find at most, and exactly how much as long as
nothing was evicted, condemned or damaged.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cache.claim import NO_PAGE, Claim
from cache.components import Window
from cache.device import DEVICE, Completion, CpuDevice, Device, Op, Stream, spans
from cache.lazy import LazyDevice
from cache.moves import gather, scatter
from cache.nodes import Tier
from cache.pools import PoolSet
from cache.prefetch import Prefetch
from cache.prefix import Prefix
from cache.registry import Order, PoolSetSpec
from cache.seat import Seat
from cache.storage import InlineQueue, ObjectName
from cache.storage import Op as StorageOp
from cache.storage.memory import MemoryBackend
from contracts.clock import ManualClock
from contracts.config import CacheConfig, PrefetchConfig


def content(key: bytes, pool: str, nbytes: int) -> torch.Tensor:
    """What a page (or slot) of `pool` holds after the tokens that `key` names: uint8 [nbytes]."""
    seed = int.from_bytes(hashlib.blake2b(key + pool.encode(), digest_size=8).digest())
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@dataclass(eq=False)
class Step:
    """One forward pass under way."""

    completion: Completion
    end: int
    """Pages that are computed when it is done."""
    wrong: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Visitor:
    """One request."""

    name: str
    prefix: Prefix
    prefetch: Prefetch | None
    claim: Claim | None = None
    done: int = 0
    """Committed pages."""
    step: Step | None = None


class World:
    """See the module's prose. `seed` decides device, faults and policies' randomness."""

    def __init__(
        self,
        spec: PoolSetSpec,
        seed: int,
        *,
        lazy: bool = False,
        pages: int = 24,
        host_pages: int = 30,
        write_policy: str = "through",
        eviction: str = "lru",
        prefetch_policy: str = "wait_complete",
        storage: bool = True,
        fault_rate: float = 0.0,
    ) -> None:
        self.spec, self.rng = spec, random.Random(seed)
        self.clock = ManualClock()
        self.device: Device = LazyDevice(seed, clock=self.clock) if lazy else CpuDevice()
        self.pools = PoolSet(spec, spec.even(pages))
        self.host = PoolSet(spec, spec.even(host_pages), order=Order.PAGE_FIRST, tier="host") if host_pages else None
        self.backend = MemoryBackend(f"world {id(self)} {seed}", 1 << 24)
        self.fault_rate = fault_rate
        self.queue = InlineQueue(self.backend, fault=self._fault) if storage and self.host is not None else None
        config = CacheConfig(
            page_tokens=spec.page_tokens,
            load_back="always",
            write_policy=write_policy,  # type: ignore[arg-type]
            eviction=eviction,  # type: ignore[arg-type]
            prefetch=PrefetchConfig(policy=prefetch_policy, base_s=0.01, per_token_s=0.0, batch_pages=2),  # type: ignore[arg-type]
        )
        self.seat = Seat(
            self.pools, self.device, config, self.clock.now, host=self.host, storage=self.queue, fingerprint="model"
        )
        self.visitors: list[Visitor] = []
        self.shared: dict[str, set[bytes]] = {c.name: set() for c in self.seat.tree.components}
        self.disturbed = False
        """Something was evicted, condemned or damaged: finds may be shorter than the model's."""
        self.damaged = False
        self.changes = 0
        """Steps that changed state."""
        self._number = 0

    def _fault(self, op: StorageOp, name: ObjectName) -> str | None:
        if self.rng.random() < self.fault_rate:
            self.disturbed = True
            return "a fault on purpose"
        return None

    # ------------------------------------------------------------ the model

    def expected(self, prefix: Prefix, reusable: int) -> int:
        """How many pages of `prefix` the model would reuse, if nothing had ever been lost."""
        full = self.shared[self.seat.full]
        length = 0
        while length < reusable and prefix.key(length) in full:
            length += 1
        while length and not all(self._has(c.name, prefix, length) for c in self.seat.tree.components[1:]):
            length -= 1
        return length

    def _has(self, name: str, prefix: Prefix, length: int) -> bool:
        component = self.seat.tree.component(name)
        first = length - 1 if component.point else 0
        if isinstance(component, Window):
            first = max(0, length - component.reach)
        return all(prefix.key(page) in self.shared[name] for page in range(first, length))

    # ------------------------------------------------------------ requests

    def arrive(self, tokens: Sequence[int], salt: str = "") -> Visitor:
        self._number += 1
        prefix = Prefix.of(tokens, self.spec.page_tokens, salt)
        visitor = Visitor(f"request {self._number}", prefix, self.seat.prefetch(prefix))
        self.visitors.append(visitor)
        self.changes += 1
        return visitor

    def admit(self, visitor: Visitor) -> bool:
        if visitor.claim is not None:
            return False
        if visitor.prefetch is not None and not self.seat.prefetcher.may_run(visitor.prefetch):  # type: ignore[union-attr]
            return False
        reusable = len(visitor.prefix) - 1 if self.rng.random() < 0.7 else len(visitor.prefix)
        expected = self.expected(visitor.prefix, max(0, reusable))
        positions = len(visitor.prefix) * self.spec.page_tokens
        before = self.seat.counters["pages_evicted"]
        claim = self.seat.claim(
            visitor.prefix, positions, visitor.name, reusable=max(0, reusable), prefetch=visitor.prefetch
        )
        self._look(before)
        if claim is None:
            return False
        assert claim.depth <= expected, f"found {claim.depth} pages, only {expected} were ever shared"
        if not self.disturbed:
            assert claim.depth == expected, f"found {claim.depth} pages, {expected} were shared and nothing was lost"
        assert claim.cached.total == claim.depth * self.spec.page_tokens
        visitor.claim, visitor.done = claim, claim.depth
        self.changes += 1
        return True

    def _look(self, evicted_before: float) -> None:
        self.disturbed |= self.seat.counters["pages_evicted"] != evicted_before
        saver, prefetcher = self.seat.saver, self.seat.prefetcher
        self.disturbed |= saver is not None and saver.counters["saves_left_out"] > 0
        self.disturbed |= prefetcher is not None and prefetcher.counters["prefetch_pages_dropped"] > 0

    def compute(self, visitor: Visitor, pages: int) -> bool:
        """Launch a forward pass over the next `pages` pages."""
        claim = visitor.claim
        if claim is None or visitor.step is not None or visitor.done == len(visitor.prefix):
            return False
        self.seat.launch()
        end = min(len(visitor.prefix), visitor.done + pages)
        reads = {pool: self._seen(claim, pool, visitor.done) for pool in claim.tables}
        reads |= {pool: list(slot.indices) for pool, slot in claim.slots.items()}
        writes = {pool: claim.tables[pool][visitor.done : end] for pool in claim.tables}
        writes |= {pool: list(slot.indices) for pool, slot in claim.slots.items()}
        passages = [self.pools.gates[pool].enter(pool) for pool in self.spec.by_name]
        step = Step(None, end)  # type: ignore[arg-type]
        begin = visitor.done

        def run() -> None:
            for passage, pool in zip(passages, self.spec.pools, strict=True):
                for layer in range(pool.layers):
                    passage.layer(layer)
            step.wrong += self._compare(visitor, reads, begin)
            self._write(visitor, writes, begin, end)

        op = Op("forward", Stream.COMPUTE, spans(DEVICE, reads), spans(DEVICE, writes))
        gates = {gate: waits for passage in passages for gate, waits in passage.gates.items()}
        step.completion = self.device.submit(op, run, gates=gates)
        visitor.step = step
        self.changes += 1
        return True

    def _seen(self, claim: Claim, pool: str, done: int) -> list[int]:
        """The pages that a pass after `done` pages attends to."""
        component = self.seat.tree.component(pool)
        first = max(0, done - component.reach) if isinstance(component, Window) else 0
        pages = claim.tables[pool][first:done]
        assert NO_PAGE not in pages, f"{pool}: pages that attention still sees have been given back"
        return pages

    def _compare(self, visitor: Visitor, reads: dict[str, list[int]], done: int) -> list[str]:
        wrong = []
        for pool, indices in reads.items():
            found = gather(self.pools.region, self.pools.layout, pool, indices)
            size = self.spec.unit_bytes(pool)
            if self.seat.tree.component(pool).point:
                want = [
                    content(visitor.prefix.key(done - 1), pool, size) if done else torch.zeros(size, dtype=torch.uint8)
                ]
            else:
                want = [content(visitor.prefix.key(p), pool, size) for p in range(done - len(indices), done)]
            wrong += [
                f"{visitor.name}: {pool} {i}"
                for i, (a, b) in enumerate(zip(found, want, strict=True))
                if not a.equal(b)
            ]
        return wrong

    def _write(self, visitor: Visitor, writes: dict[str, list[int]], begin: int, end: int) -> None:
        for pool, indices in writes.items():
            point = self.seat.tree.component(pool).point
            keys = [end - 1] if point else range(begin, end)
            rows = [content(visitor.prefix.key(page), pool, self.spec.unit_bytes(pool)) for page in keys]
            scatter(torch.stack(rows), self.pools.region, self.pools.layout, pool, indices)

    def commit(self, visitor: Visitor, *, share: bool, snapshot: bool) -> bool:
        """Take in a forward pass that is complete, if what it read has proved good."""
        step, claim = visitor.step, visitor.claim
        if step is None or claim is None or not step.completion.done:
            return False
        self.poll()
        if visitor.claim is None or not self.seat.settled(claim):
            return True
        assert not step.wrong, f"read other bytes than its own: {step.wrong}"
        visitor.step, visitor.done = None, step.end
        positions = step.end * self.spec.page_tokens
        self.seat.seal([(claim, positions)])
        before = self.seat.counters["pages_evicted"]
        if snapshot and claim.slots:
            self.seat.snapshot(claim, positions)
        if self.rng.random() < 0.5:
            self.seat.slide(claim, positions)
        if share:
            self._share(visitor, claim)
        self._look(before)
        self.changes += 1
        return True

    def _share(self, visitor: Visitor, claim: Claim) -> None:
        prefix = visitor.prefix.head(visitor.done)
        snapshots = [s for held in claim.snapshots.values() for s in held]
        # One that is still being copied may be offered or not.
        self.disturbed |= not all(s.completion.done for s in snapshots)
        self.seat.share(claim, prefix)
        for pool, table in claim.tables.items():
            known = [p for p in range(len(prefix)) if p < claim.depth or table[p] != NO_PAGE]
            if pool != self.seat.full:
                known = [p for p in range(len(prefix)) if table[p] != NO_PAGE]
            self.shared[pool] |= {prefix.key(page) for page in known}
        for pool in claim.slots:
            self.shared[pool] |= {prefix.key(s.depth - 1) for s in snapshots if s.depth <= len(prefix)}

    def leave(self, visitor: Visitor) -> None:
        """Finish or cancel, wherever it is; what a launched pass names stays out of use until it is complete."""
        claim = visitor.claim
        if claim is not None:
            self.seat.release(claim, [visitor.step.completion] if visitor.step is not None else [])
        if visitor.prefetch is not None and not visitor.prefetch.over:
            self.seat.prefetcher.stop(visitor.prefetch)  # type: ignore[union-attr]
        self.visitors.remove(visitor)
        self.changes += 1

    # ------------------------------------------------------------ what happens around them

    def poll(self) -> None:
        for claim in self.seat.poll():
            assert self.damaged, "nothing was damaged, and a load didn't match its tags"
            visitor = next(v for v in self.visitors if v.claim is claim)
            self.leave(visitor)
        self._look(self.seat.counters["pages_evicted"])

    def evict(self, tier: Tier, pool: str, count: int) -> None:
        freed = self.seat.evict(pool, count) if tier is Tier.DEVICE else self.seat.tree.evict(tier, pool, count)
        self.disturbed |= freed > 0
        self.changes += freed > 0

    def condemn(self, prefix: Prefix, page: int) -> None:
        condemned = self.seat.condemn(prefix, page)
        self.disturbed |= condemned > 0
        self.changes += condemned > 0

    def damage_host(self) -> None:
        """Flip a byte of a page that the tree holds on the host and nobody is reading or writing."""
        parts = [p for n in self.seat.tree.nodes() for p in n.parts[Tier.HOST].values() if not p.locks]
        if not parts or self.host is None:
            return
        part = self.rng.choice(parts)
        page = self.host.layout.page(self.host.region, part.component, self.rng.choice(part.lease.indices))
        page[self.rng.randrange(len(page))] ^= 1 + self.rng.randrange(255)
        self.damaged = self.disturbed = True
        self.changes += 1

    def settle(self) -> None:
        """Everybody leaves, everything under way comes to its end; then all pools must be whole."""
        for visitor in list(self.visitors):
            self.leave(visitor)
        for _ in range(200):
            if self.queue is not None:
                self.queue.run_all(self.rng)
            self.seat.launch()
            if isinstance(self.device, LazyDevice):
                self.device.settle()
            self.poll()
            if not self.seat.busy and not (self.queue and self.queue.waiting):
                break
        assert self.check() == []
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST):
            for pool in self.spec.by_name:
                self.seat.tree.evict(tier, pool, 1 << 30)
        assert self.seat.tree.locks == 0, [(lock.owner, lock.parts) for lock in self.seat.tree.locked]
        for pools in (self.pools, *([self.host] if self.host else [])):
            for allocator in pools.allocators.values():
                assert allocator.free == allocator.total, (
                    f"{allocator.name}: {allocator.free} of {allocator.total} free"
                )
                assert allocator.leases == 0
        assert self.check() == []

    def check(self) -> list[str]:
        return self.seat.check()
