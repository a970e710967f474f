"""What is on the host comes to storage whole and in order, whatever storage refuses; what comes back is compared."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.support.pool_sets import pool_sets, worn
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import LayoutOrder
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.tree_node import Tier, TokenPrefix
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue, StorageOp, StorageTicket, WriteChain
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName, ObjectOutcome, seal
from twinpool.cache.tiers import prefetch as prefetch_module
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import CacheConfig, PrefetchConfig

PAGE_TOKENS = 2


class ShortLine(InlineIoQueue):
    """Takes so many writes into its line, and fails the others as a full line does."""

    def __init__(self, backend: MemoryBackend, most: int) -> None:
        super().__init__(backend)
        self.most, self.dropped, self.written = most, 0, [list[ObjectName]()]

    def submit_write(
        self, items: Sequence[ObjectBuffer], chain: WriteChain | None = None
    ) -> StorageTicket[list[ObjectOutcome]]:
        ticket = super().submit_write(items, chain)
        if self.waiting > self.most:
            self.dropped += 1
            ticket.cancel()
        return ticket


class Office:
    """A KV cache manager with a host tier and storage, to which requests of one page a token pair come."""

    def __init__(
        self,
        pages: int = 600,
        *,
        line: int = 1 << 20,
        host: int = 600,
        name: str = "",
        model: str = "m",
        batch: int = 32,
        pools: str = "full",
    ) -> None:
        spec = pool_sets(PAGE_TOKENS)[pools]
        self.clock = ManualClock()
        self.backend = MemoryBackend(name or uuid.uuid4().hex, 1 << 30)
        self.queue = ShortLine(self.backend, line)
        self.pools = worn(PoolSet(spec, spec.even(pages)), "device")
        self.host = worn(PoolSet(spec, spec.even(host), order=LayoutOrder.PAGE_FIRST, tier="host"), "host")
        prefetch = PrefetchConfig(policy="wait_complete", batch_pages=batch)
        config = CacheConfig(write_policy="through", prefetch=prefetch)
        self.manager = KVCacheManager(
            self.pools, CpuDevice(), config, self.clock.now, below=LowerTiers(self.host, self.queue, fingerprint=model)
        )

    def ask(self, tokens: Sequence[int]) -> TokenPrefix:
        """A request computes all of `tokens` and shares them."""
        prefix = TokenPrefix.of(tokens, PAGE_TOKENS)
        allocation = self.manager.allocations.allocate(prefix, len(tokens) + 1, "a request", reusable=0)
        assert allocation is not None
        for page, index in enumerate(allocation.tables["full"].pages[: len(prefix)]):
            for buffer in self.pools.layout.buffers["full"]:
                buffer.stack(self.pools.region, self.pools.layout.counts["full"])[:, index] = tokens[2 * page] % 251
        self.manager.finished.seal([(allocation, len(tokens))])
        self.manager.finished.cache_pages(allocation, prefix)
        self.manager.allocations.free(allocation)
        self.manager.poll()
        return prefix

    def work(self, rounds: int = 1, rng: random.Random | None = None) -> None:
        for _ in range(rounds):
            self.queue.run_all(rng)
            self.clock.advance(1.0)
            self.manager.poll()
            assert self.manager.check() == []

    def stored(self, prefix: TokenPrefix, pool: str = "full") -> list[int]:
        """The page numbers of `prefix` that storage has."""
        names = [ObjectName("m", pool, prefix.key(page)) for page in range(len(prefix))]
        return [page for page, there in enumerate(self.backend.exists(names)) if there]

    def found(self, tokens: Sequence[int]) -> int:
        """Pages that a request gets from storage alone."""
        prefix = TokenPrefix.of(tokens, PAGE_TOKENS)
        prefetch = self.manager.tiers.prefetcher.start(prefix, "a request")
        assert prefetch is not None
        while not self.manager.tiers.prefetcher.may_run(prefetch):
            self.work()
        allocation = self.manager.allocations.allocate(
            prefix, len(tokens) + 1, "a request", reusable=len(prefix), prefetch=prefetch
        )
        assert allocation is not None
        self.manager.launch()
        self.work()
        pages = allocation.cached.storage // PAGE_TOKENS
        self.manager.allocations.free(allocation)
        return pages


def test_what_storage_s_line_did_not_take_is_written_later() -> None:
    office = Office(line=2)
    prompts = [office.ask(range(1000 * n, 1000 * n + 260)) for n in range(4)]
    assert office.queue.waiting <= 2
    assert office.queue.dropped, "the line was never full: this shows nothing"
    office.work(40)
    assert [len(office.stored(prompt)) for prompt in prompts] == [130] * 4
    said = office.manager.stats()
    assert said["pages_stored"] == 4 * 130
    assert said["stores_failed"] > 0
    assert said["stores_waiting"] == said["stores_missed"] == 0


@pytest.mark.slow
def test_at_any_moment_storage_has_a_page_only_with_all_pages_before_it() -> None:
    for seed in range(3):
        rng = random.Random(seed)
        office = Office()
        office.queue.fault = lambda op, name, rng=rng: "io" if op is StorageOp.WRITE and rng.random() < 0.01 else None
        prompts: list[TokenPrefix] = []
        for _ in range(5):
            # Prompts fork anywhere from one another, so nodes are split while they are written.
            old = list(rng.choice(prompts).tokens()) if prompts else []
            tokens = [*old[: 2 * rng.randrange(0, len(old) // 2 + 1)], *(rng.randrange(10**6) for _ in range(200))][
                :320
            ]
            prompts.append(office.ask(tokens))
            for _ in range(rng.randrange(6)):
                office.queue.run_next(rng)
                office.manager.poll()
                for prompt in prompts:
                    stored = office.stored(prompt)
                    assert stored == list(range(len(stored))), f"seed {seed}: holes in front of stored pages"
        office.work(150, rng)
        assert all(len(office.stored(prompt)) == len(prompt) for prompt in prompts), f"seed {seed}"


def test_what_storage_refuses_is_offered_again_later_and_later_and_then_is_there() -> None:
    office = Office()
    tries: list[float] = []

    def refuse(op: StorageOp, name: ObjectName) -> str | None:
        if op is StorageOp.WRITE:
            tries.append(office.clock.now())
            return "the disk is full"
        return None

    office.queue.fault = refuse
    prompt = office.ask(range(6))
    office.work(200)
    times = sorted(set(tries))
    waits = [b - a for a, b in pairwise(times)]
    assert waits == sorted(waits)
    assert 64 <= waits[-1] <= 66
    assert len(times) < 12, "a medium that is away isn't asked all the time"
    assert office.manager.stats()["stores_waiting"] == 1
    office.queue.fault = None
    office.work(70)
    assert office.stored(prompt) == [0, 1, 2]


def test_a_windows_page_that_storage_refuses_is_not_taken_for_stored_by_the_full_page_of_its_number() -> None:
    office, last = Office(pools="full+window"), 19

    def fault(op: StorageOp, name: ObjectName) -> str | None:
        refused = op is StorageOp.WRITE and name.pool == "window" and name.chain == prefix.key(last)
        return "io" if refused else None

    prefix = TokenPrefix.of(range(2 * last + 2), PAGE_TOKENS)
    office.queue.fault = fault
    office.ask(range(2 * last + 2))
    office.work(20)
    assert office.stored(prefix) == list(range(last + 1))
    assert office.stored(prefix, "window") == list(range(last))
    said = office.manager.stats()
    assert (said["pages_stored"], said["stores_waiting"]) == (2 * last + 1, 1)
    office.queue.fault = None
    office.clock.advance(3600.0)
    office.work(2)
    assert office.stored(prefix, "window") == list(range(last + 1))
    assert office.manager.stats()["stores_waiting"] == 0


@pytest.mark.slow
def test_what_leaves_the_host_before_storage_took_it_is_counted() -> None:
    office = Office(host=120)
    office.queue.fault = lambda op, name: "away" if op is StorageOp.WRITE else None
    for n in range(5):
        office.ask(range(1000 * n, 1000 * n + 200))
        office.work(70)
    assert office.manager.tree.accounts.sizes[Tier.HOST, "full"] <= 119
    assert office.manager.stats()["stores_missed"] >= 5 * 100 - 119
    assert office.manager.stats()["stores_waiting"] <= 2


def test_what_waits_for_storage_is_not_kept_from_making_room() -> None:
    office = Office(host=120)
    office.ask(range(200))
    assert office.queue.waiting, "its writes are in line, and nobody runs them"
    # Of the first prompt what is in line is locked; of the others nothing is, since the line has room for no more.
    office.queue.most = 0
    for n in range(1, 4):
        office.ask(range(1000 * n, 1000 * n + 40))
    office.queue.run_all()
    office.work(3)
    assert office.manager.supply.evict("full", 10) == 10
    assert office.manager.tree.eviction.evict(Tier.HOST, "full", 119) > 0


def _resealed(name: ObjectName, payload: bytes, digest: int) -> bytes:
    return payload + seal(name, digest, payload)


LIES = ("another's name", "another's tokens", "another's layout", "other bytes", "another's digest", "cut short")


@pytest.mark.parametrize("lie", LIES)
def test_what_comes_from_storage_is_compared_by_name_tokens_layout_bytes_and_digest(lie: str) -> None:
    name, tokens = uuid.uuid4().hex, range(20)
    writer = Office(name=name)
    prefix = writer.ask(tokens)
    writer.ask(range(500, 520))
    writer.work(4)
    other = TokenPrefix.of(range(500, 520), PAGE_TOKENS)
    objects, wanted = writer.backend.store.objects, ObjectName("m", "full", prefix.key(4))
    mine, its = objects[wanted.key], objects[ObjectName("m", "full", other.key(4)).key]
    size = writer.host.spec.unit_bytes("full")
    sealed = int.from_bytes(mine[size + 24 : size + 32], "little")
    assert _resealed(wanted, mine[:size], sealed) == mine, "this test knows what an object looks like"
    objects[wanted.key] = {
        "another's name": its,
        "another's tokens": _resealed(replace(wanted, chain=other.key(4)), mine[:size], sealed),
        "another's layout": _resealed(replace(wanted, fingerprint="n"), mine[:size], sealed),
        "other bytes": _resealed(wanted, bytes([mine[0] ^ 1]) + mine[1:size], sealed),
        "another's digest": _resealed(wanted, mine[:size], sealed ^ 1),
        "cut short": mine[: size - 1] + mine[size:],
    }[lie]
    reader = Office(name=name)
    assert reader.found(tokens) == 4, "what lies before it is of use, and nothing behind it"
    said = reader.manager.stats()
    assert said["pages_damaged_in_storage"] == 1
    assert said["hit_tokens_storage"] == 4 * PAGE_TOKENS
    assert reader.manager.tree.match(prefix).depth == 4


def test_another_model_s_pages_are_nobody_s() -> None:
    name = uuid.uuid4().hex
    writer = Office(name=name)
    writer.ask(range(20))
    writer.work(4)
    assert Office(name=name).found(range(20)) == 10
    assert Office(name=name, model="another").found(range(20)) == 0


@pytest.mark.slow
def test_a_disk_load_that_failed_is_never_taken_for_loaded() -> None:
    """A read that fails leaves whatever it likes in the page; another request's state may have been there before."""
    name, tokens = uuid.uuid4().hex, range(40)
    writer = Office(name=name)
    writer.ask(tokens)
    writer.work(4)
    for failing in range(20):
        reader = Office(name=name)
        key = TokenPrefix.of(tokens, PAGE_TOKENS).key(failing)
        reader.queue.fault = lambda op, n, key=key: "io" if op is StorageOp.READ and n.chain == key else None
        assert reader.found(tokens) == failing
        (allocate_depth,) = {reader.manager.tree.match(TokenPrefix.of(tokens, PAGE_TOKENS)).depth}
        assert allocate_depth == failing, "what failed is not in the tree, nor what lies behind it"
        held = [node.parts[Tier.HOST]["full"] for node in reader.manager.tree.accounts.nodes()]
        for part in held:
            firsts = [PAGE_TOKENS * (part.node.start + i) for i in range(len(part))]
            ends = [first + PAGE_TOKENS for first in firsts]
            assert tuple(reader.host.digest("full", part.lease.indices, firsts, ends)) == part.digests
        assert reader.manager.check() == []


def test_cancels_leak_nothing_however_often_a_request_is_given_up_while_storage_reads_for_it() -> None:
    name, tokens = uuid.uuid4().hex, range(40)
    writer = Office(name=name)
    writer.ask(tokens)
    writer.work(4)
    reader, prefix, rng = Office(name=name), TokenPrefix.of(tokens, PAGE_TOKENS), random.Random(5)
    for _ in range(60):
        prefetch = reader.manager.tiers.prefetcher.start(prefix, "a request")
        assert prefetch is not None
        for _ in range(rng.randrange(5)):
            reader.queue.run_next(rng)
            reader.manager.poll()
        allocation = None
        if rng.random() < 0.5:
            allocation = reader.manager.allocations.allocate(
                prefix, 41, "a request", reusable=len(prefix), prefetch=prefetch
            )
            reader.manager.launch() if rng.random() < 0.5 else None
        reader.manager.tiers.prefetcher.release(prefetch)
        if allocation is not None:
            reader.manager.allocations.free(allocation)
        if rng.random() < 0.3:
            reader.manager.tree.eviction.clear()
    reader.work(5)
    assert len(reader.manager.tree.locks) == len(reader.manager.allocations) == 0
    assert not reader.manager.busy
    reader.manager.tree.eviction.clear()
    for pools in (reader.pools, reader.host):
        assert pools.allocators["full"].free == pools.allocators["full"].total, "everything moves still"
    assert reader.found(tokens) == 20


def test_a_prefetch_never_asks_for_more_at_once_than_storage_s_line_takes() -> None:
    name, tokens = uuid.uuid4().hex, range(2 * 400)
    writer = Office(name=name)
    writer.ask(tokens)
    writer.work(8)
    reader = Office(name=name, batch=2)
    prefetch, most = reader.manager.tiers.prefetcher.start(TokenPrefix.of(tokens, PAGE_TOKENS), "a request"), 0
    assert prefetch is not None
    while not reader.manager.tiers.prefetcher.may_run(prefetch):
        most = max(most, reader.queue.waiting)
        for _ in range(40):
            reader.queue.run_next()
        reader.clock.advance(0.0)
        reader.manager.poll()
    assert 64 < most <= 128, "400 pages are 200 reads, and the line takes 256 of all requests"
    assert prefetch.gained == 400
    reader.manager.tiers.prefetcher.release(prefetch)
    assert reader.manager.check() == []


def test_all_prefetches_together_never_ask_for_more_at_once_than_storage_s_line_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch_module, "_IN_LINE", 8)
    name, prompts = uuid.uuid4().hex, [range(first, first + 2 * 20) for first in (0, 1000, 2000)]
    writer = Office(name=name)
    for tokens in prompts:
        writer.ask(tokens)
    writer.work(3)
    reader = Office(name=name, batch=2)
    prefetcher = reader.manager.tiers.prefetcher
    under_way = [prefetcher.start(TokenPrefix.of(tokens, PAGE_TOKENS), "a request") for tokens in prompts]
    reader.queue.run_all()
    reader.manager.poll()
    most = 0
    while not all([prefetcher.may_run(one) for one in under_way if one is not None]):
        most = max(most, reader.queue.waiting)
        reader.queue.run_next()
        reader.manager.poll()
    assert most == 8, "three times 20 pages are 30 reads of all requests"
    for one in under_way:
        assert one is not None
        assert one.gained == 20
        prefetcher.release(one)
    assert reader.manager.check() == []


def forget(office: Office, *tiers: Tier) -> None:
    for tier in tiers:
        office.manager.tree.eviction.evict(tier, "full", 1 << 30)


def stored_prefix(office: Office, tokens: Sequence[int]) -> TokenPrefix:
    """A prefix that storage alone has."""
    prefix = office.ask(tokens)
    office.work(3)
    assert office.stored(prefix) == list(range(len(prefix)))
    forget(office, Tier.DEVICE, Tier.HOST)
    return prefix


def test_what_a_prefetch_brought_stays_while_its_request_finds_no_room() -> None:
    """It asks again later, and other requests take the host's room in between."""
    office = Office()
    tokens = range(40)
    prefix = stored_prefix(office, tokens)
    manager, device, host = office.manager, office.pools.allocators["full"], office.host.allocators["full"]
    prefetch = manager.tiers.prefetcher.start(prefix, "a request")
    assert prefetch is not None
    while not manager.tiers.prefetcher.may_run(prefetch):
        office.work()
    others = device.lease(device.free, "others")
    for _ in range(2):
        assert manager.allocations.allocate(prefix, 41, "a request", reusable=20, prefetch=prefetch) is None
        forget(office, Tier.HOST)
        assert host.free == host.total - 20
    others.release()
    allocation = manager.allocations.allocate(prefix, 41, "a request", reusable=20, prefetch=prefetch)
    assert allocation is not None
    assert (allocation.cached.storage, allocation.cached.host, allocation.cached.device) == (40, 0, 0)
    manager.launch()
    office.work(2)
    manager.allocations.free(allocation)
    assert manager.check() == []
    forget(office, Tier.DEVICE, Tier.HOST)
    assert host.free == host.total, "the prefetch is over for good"


def test_pages_that_another_request_computed_while_they_were_read_did_not_come_from_storage() -> None:
    office = Office()
    tokens = range(40)
    prefix = stored_prefix(office, tokens)
    manager = office.manager
    prefetch = manager.tiers.prefetcher.start(prefix, "a request")
    assert prefetch is not None
    office.ask(tokens)
    while not manager.tiers.prefetcher.may_run(prefetch):
        office.work()
    assert manager.stats()["pages_prefetched"] == 0
    forget(office, Tier.DEVICE)
    allocation = manager.allocations.allocate(prefix, 41, "a request", reusable=20, prefetch=prefetch)
    assert allocation is not None
    assert (allocation.cached.storage, allocation.cached.host, allocation.cached.device) == (0, 40, 0)
    manager.launch()
    office.work(2)
    manager.allocations.free(allocation)
    assert manager.check() == []


@pytest.mark.parametrize("found", [3, 17])
def test_a_request_waits_for_storage_as_long_as_what_storage_has_is_worth(found: int) -> None:
    office = Office()
    prefix = stored_prefix(office, range(2 * found))
    prefetcher, clock = office.manager.tiers.prefetcher, office.clock
    prefetcher._config = PrefetchConfig(policy="timeout", base_s=1.0, per_token_s=0.5)  # type: ignore[union-attr]
    prefetch = prefetcher.start(TokenPrefix.of(range(2 * 40), PAGE_TOKENS), "a request")
    assert prefetch is not None
    assert prefetcher.deadline(prefetch) == clock.now() + 1.0, "storage hasn't said yet what it has"
    due = clock.now() + 1.0 + 0.5 * 2 * len(prefix)
    office.queue.run_all()
    office.manager.poll()
    assert prefetcher.deadline(prefetch) == due
    clock.advance(due - clock.now() - 0.25)
    assert not prefetcher.may_run(prefetch)
    clock.advance(0.25)
    assert prefetcher.may_run(prefetch)
    prefetcher.release(prefetch)
    assert office.manager.check() == []


def test_pages_that_were_invalidated_are_not_stored_though_somebody_holds_them_still() -> None:
    """Storage had refused them before; who reads them goes on, and nobody is to find them again."""
    office = Office()
    office.queue.fault = lambda op, name: "the disk is full" if op is StorageOp.WRITE else None
    prefix, manager = office.ask(range(40)), office.manager
    while manager.tiers.backup.busy:
        office.queue.run_all()
        manager.poll()
    (node,) = manager.tree.accounts.nodes()
    lock = manager.tree.locks.keep([node.parts[Tier.HOST]["full"]], "a reader")
    assert manager.stats()["stores_waiting"] == 1
    manager.finished.invalidate(prefix, 0)
    assert manager.stats()["stores_waiting"] == 0
    office.queue.fault = None
    for _ in range(200):
        office.queue.run_all()
        office.clock.advance(1.0)
        manager.poll()
    assert office.stored(prefix) == []
    manager.tree.locks.unlock(lock)
    office.work()
    assert manager.stats()["stores_missed"] == 0, "nobody is to miss damaged pages"


def test_pages_that_come_and_go_while_no_step_runs_are_remembered_in_bounded_memory() -> None:
    table = EpochTable(64)
    table.copy_on(torch.device("cpu"))
    for turn in range(20_000):
        table.bump([turn % 64])
    assert len(table._bumped) <= 4096 + 1
    assert table.copy_on(torch.device("cpu")).tolist() == table.host.tolist()


@pytest.mark.parametrize("ending", ["stopped", "released", "its time is over"])
def test_host_pages_that_storage_writes_into_are_nobody_elses_before_it_has_ended(ending: str) -> None:
    """One read runs and others wait: whoever gives the prefetch up gets back at once what no thread has, and the rest
    when that thread has written its last byte."""
    office = Office(batch=2)
    tokens = range(40)
    prefix = office.ask(tokens)
    office.work(3)
    assert office.stored(prefix) == list(range(20))
    for tier in (Tier.DEVICE, Tier.HOST):
        office.manager.tree.eviction.evict(tier, "full", 1 << 30)
    host, prefetcher = office.host.allocators["full"], office.manager.tiers.prefetcher
    before = host.free
    prefetch = prefetcher.start(prefix, "a request")
    assert prefetch is not None
    office.queue.run_all()
    office.manager.poll()
    assert host.free == before - 20, "ten reads of two pages are in line"
    end = office.queue.begin_next()
    assert end is not None
    written = prefetch.batches[0].lease.indices
    if ending == "released":
        prefetcher.release(prefetch)
    else:
        prefetcher.stop(prefetch)  # type: ignore[union-attr]
    office.manager.poll()
    assert not prefetch.over
    assert host.free == before - 2, "what no thread writes into is free at once"
    mine = host.lease(host.free, "another")
    assert not set(mine.indices) & set(written)
    marks = [office.host.layout.page(office.host.region, "full", index).clone() for index in mine.indices[:8]]
    end()
    assert all(
        office.host.layout.page(office.host.region, "full", index).equal(mark)
        for index, mark in zip(mine.indices, marks, strict=False)
    )
    mine.release()
    office.manager.poll()
    assert prefetch.over
    prefetcher.release(prefetch)
    assert office.manager.check() == []
    assert office.found(tokens) == 18, "the next one has all others from storage, and these two from the host"


def test_a_prefetch_that_is_given_up_in_its_question_reads_nothing() -> None:
    office = Office(batch=2)
    prefix = office.ask(range(40))
    office.work(3)
    for tier in (Tier.DEVICE, Tier.HOST):
        office.manager.tree.eviction.evict(tier, "full", 1 << 30)
    free = office.host.allocators["full"].free
    prefetch = office.manager.tiers.prefetcher.start(prefix, "a request")
    assert prefetch is not None
    end = office.queue.begin_next()
    assert end is not None
    office.manager.tiers.prefetcher.stop(prefetch)  # type: ignore[union-attr]
    end()
    office.manager.poll()
    assert prefetch.over
    assert (office.queue.waiting, office.host.allocators["full"].free) == (0, free)
    office.manager.tiers.prefetcher.release(prefetch)
    assert office.manager.check() == []


def test_a_prefetch_that_is_stopped_begins_no_read_that_it_had_still_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "_IN_LINE", 2)
    office = Office(batch=2)
    prefix = office.ask(range(40))
    office.work(3)
    for tier in (Tier.DEVICE, Tier.HOST):
        office.manager.tree.eviction.evict(tier, "full", 1 << 30)
    prefetch = office.manager.tiers.prefetcher.start(prefix, "a request")
    assert prefetch is not None
    office.queue.run_all()
    office.manager.poll()
    assert (office.queue.waiting, len(prefetch.unread)) == (2, 8)
    end = office.queue.begin_next()
    assert end is not None
    office.manager.tiers.prefetcher.stop(prefetch)  # type: ignore[union-attr]
    assert office.queue.waiting == 0, "nor one begun by being stopped"
    for _ in range(3):
        office.manager.poll()
        assert (office.queue.waiting, len(prefetch.batches), prefetch.over) == (0, 1, False)
    end()
    office.manager.poll()
    assert prefetch.over
    assert prefetch.gained == 2, "what has come by then is kept"
    office.manager.tiers.prefetcher.release(prefetch)
    assert office.manager.check() == []


def test_a_worker_that_closes_in_the_middle_of_a_prefetch_leaves_no_host_page_leased() -> None:
    """Some pages have come, some are being read, others wait."""
    office = Office(batch=2)
    prefix = office.ask(range(40))
    office.work(3)
    for tier in (Tier.DEVICE, Tier.HOST):
        office.manager.tree.eviction.evict(tier, "full", 1 << 30)
    prefetch = office.manager.tiers.prefetcher.start(prefix, "a request")
    assert prefetch is not None
    for _ in range(3):
        assert office.queue.run_next()
        office.manager.poll()
    assert [len(pages) for pages in prefetch.arrived.values()] == [4]
    assert office.host.allocators["full"].leases > 0
    office.manager.close()
    assert prefetch.over
    assert (office.host.allocators["full"].leases, len(office.manager.tree.locks)) == (0, 0)
    office.host.close()
