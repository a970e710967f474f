"""Tiers that are slow, fail or lie, and requests that leave while they are at work.

Storage answers here when the test says so, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import make_talks
from tests.support.tier_conversations import GREEDY, PAGE, by_turn, converse, counters, in_folder, tiers
from tests.support.worker_pair import Answer, Pair, pair
from tests.support.worker_parts import table_of
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.cache.storage.io_queue import InlineIoQueue, StorageOp
from twinpool.cache.storage.storage_backend import ObjectName, StorageBackend
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role

HOST_PAGES = 80
Queues = list[InlineIoQueue]
MakeQueues = Callable[..., Queues]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> MakeQueues:
    """Workers built from now on have storage queues that the test runs, prefill's first."""

    def make(fault: Callable[[StorageOp, ObjectName], str | None] | None = None) -> Queues:
        queues: Queues = []

        def queue(backend: StorageBackend, **_: object) -> InlineIoQueue:
            queues.append(InlineIoQueue(backend, fault=fault))
            return queues[-1]

        monkeypatch.setattr("twinpool.cluster.assembly.build_parts.ThreadedIoQueue", queue)
        return queues

    return make


def manager_of(both: Pair, role: Role = Role.PREFILL) -> KVCacheManager:
    manager = (both.prefill if role is Role.PREFILL else both.decode).setup.manager
    assert isinstance(manager, KVCacheManager)
    return manager


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 300) for _ in range(count)]


def settle(both: Pair, queues: Queues) -> None:
    for _ in range(50):
        for queue in queues:
            queue.run_all()
        both.step()
    both.settle()


def ask(both: Pair, prompt: list[int], queues: Queues) -> Answer:
    """One request, with storage that answers."""
    request = both.submit(prompt, GREEDY)
    for _ in range(2000):
        if both.answers[request].done is not None:
            break
        for queue in queues:
            queue.run_all()
        both.step()
    settle(both, queues)
    return both.answers[request]


def fill(model: Path, folder: Path, prompt: list[int], by_hand: MakeQueues) -> list[int]:
    """Leave a prompt's pages in storage; returns its answer."""
    queues = by_hand()
    with pair(model, cache=tiers(HOST_PAGES, **in_folder(folder))) as both:
        return ask(both, prompt, queues).list


def policy(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return tiers(HOST_PAGES, **in_folder(folder)) | {"prefetch": {"policy": name, **more}}


@pytest.mark.slow
def test_best_effort_waits_for_no_storage(model: Path, tmp_path: Path, by_hand: MakeQueues) -> None:
    prompt = tokens(1, 5 * PAGE + 3)
    want = fill(model, tmp_path, prompt, by_hand)
    queues = by_hand()
    with pair(model, cache=policy(tmp_path, "best_effort")) as both:
        (answer,) = both.run(both.submit(prompt, GREEDY))
        assert answer.list == want
        assert answer.progress[Role.PREFILL].cached_tokens == 0
        settle(both, queues)


def test_with_a_timeout_a_request_waits_so_long_and_no_longer(model: Path, tmp_path: Path, by_hand: MakeQueues) -> None:
    prompt = tokens(2, 5 * PAGE + 3)
    want = fill(model, tmp_path, prompt, by_hand)
    queues, clock = by_hand(), ManualClock()
    with pair(model, clock=clock, cache=policy(tmp_path, "timeout", base_s=1.0)) as both:
        request = both.submit(prompt, GREEDY)
        clock.advance(0.99)
        for _ in range(20):
            both.step()
        assert not both.answers[request].tokens
        clock.advance(0.02)
        (answer,) = both.run(request)
        assert answer.list == want
        assert answer.progress[Role.PREFILL].cached_tokens == 0
        settle(both, queues)


def test_a_request_that_waits_for_pages_is_not_woken_again_and_again_as_storage_is_late(
    model: Path, tmp_path: Path, by_hand: MakeQueues
) -> None:
    prompt, sizes = tokens(2, 5 * PAGE + 3), {Role.PREFILL: 8 * PAGE, Role.DECODE: 32 * PAGE}
    want = fill(model, tmp_path, prompt, by_hand)
    queues, clock = by_hand(), ManualClock()
    with pair(model, tokens=sizes, clock=clock, cache=policy(tmp_path, "timeout", base_s=1.0)) as both:
        manager = manager_of(both)
        holder = both.submit(tokens(3, 5 * PAGE + 3), GREEDY)
        both.step(Role.PREFILL)
        clock.advance(2.0)
        for _ in range(20):
            both.step(Role.PREFILL)
        assert both.answers[holder].tokens, "it is computed, and decode has no pages for it yet"
        first, second = both.submit(tokens(4, 5 * PAGE + 3), GREEDY), both.submit(prompt, GREEDY)
        *_, prefetch = [r.prefetch for r in table_of(both.prefill) if r.allocation is None]
        assert prefetch is not None
        both.step(Role.PREFILL)
        due = manager.tiers.prefetcher.deadline(prefetch)
        assert due is not None
        assert due > clock.now(), "it is woken as its patience with storage ends"
        clock.advance(2.0)
        both.step(Role.PREFILL)
        assert len(manager.allocations) == 1
        assert not prefetch.over, "nobody has asked: who came before it lacks pages"
        assert manager.tiers.prefetcher.deadline(prefetch) is None, "and then sleeps on"
        *_, answer = both.run(holder, first, second)
        assert answer.list == want
        settle(both, queues)


def test_c5_a_request_that_waits_for_storage_ends_by_its_deadline(
    model: Path, tmp_path: Path, by_hand: MakeQueues
) -> None:
    prompt = tokens(3, 5 * PAGE + 3)
    fill(model, tmp_path, prompt, by_hand)
    queues, clock = by_hand(), ManualClock()
    with pair(model, clock=clock, cache=policy(tmp_path, "wait_complete")) as both:
        request = both.submit(prompt, GREEDY, deadline_s=30.0)
        for _ in range(20):
            both.step()
        assert both.answers[request].done is None
        clock.advance(31.0)
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.DEADLINE
        settle(both, queues)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_storage_that_fails_at_random_costs_hits_and_no_token(
    model: Path, tmp_path: Path, by_hand: MakeQueues, seed: int
) -> None:
    talks = make_talks(seed, 8, turns=(2, 4))
    with pair(model, tokens=32768, cache={"page_tokens": PAGE}) as both:
        want = by_turn(converse(both, talks))
    rng, writes = random.Random(seed), 0

    def fault(op: StorageOp, name: ObjectName) -> str | None:
        nonlocal writes
        if op is StorageOp.WRITE:
            # Nothing behind a page that wasn't taken is written: with as many there would be hardly anything to find.
            writes += 1
            return "planted" if writes % 20 == 5 + seed else None
        return "planted" if rng.random() < 0.3 else None

    queues = by_hand(fault)
    sizes, stored = {Role.PREFILL: 26 * PAGE, Role.DECODE: 40 * PAGE}, in_folder(tmp_path)
    stored["storage"]["retry_s"] = 0.001
    with pair(model, tokens=sizes, cache=tiers(30, **stored)) as both:

        def storage_answers() -> None:
            for queue in queues:
                if rng.random() < 0.5:
                    queue.run_next(rng)

        turns = converse(both, talks, between=storage_answers)
        assert by_turn(turns) == want
        settle(both, queues)
        said = counters(both)
        assert said["stores_failed"] > 0
        assert said["pages_prefetched"] > 0


def test_a9_a_page_that_rotted_on_the_host_is_found_and_computed_again(model: Path) -> None:
    prompt = tokens(5, 6 * PAGE + 3)
    with pair(model, cache=tiers(HOST_PAGES)) as both:
        want = both.run(both.submit(prompt, GREEDY))[0].list
        both.settle()
        manager = manager_of(both)
        part = next(manager.tree.accounts.nodes()).parts[Tier.HOST]["full"]
        assert manager.host is not None
        manager.supply.evict("full", 1 << 20)
        manager.host.layout.page(manager.host.region, "full", part.lease.indices[3])[11] ^= 4
        (answer,) = both.run(both.submit(prompt, GREEDY))
        assert answer.list == want
        assert counters(both)["pages_damaged_on_host"] > 0
        assert answer.progress[Role.PREFILL].cached_tokens == 0
        assert answer.progress[Role.PREFILL].computed_tokens >= len(prompt)
        again = both.run(both.submit(prompt, GREEDY))[0]
        assert again.list == want
        assert again.progress[Role.PREFILL].cached_tokens == 6 * PAGE, "computed again, it is good to use"


@pytest.mark.slow
@pytest.mark.parametrize("answering", [False, True], ids=["storage asleep", "storage awake"])
def test_b2_a_cancel_at_any_point_leaves_nothing_behind(
    model: Path, tmp_path: Path, by_hand: MakeQueues, answering: bool
) -> None:
    prompt = tokens(6, 7 * PAGE + 3)
    want = fill(model, tmp_path, prompt, by_hand)
    queues = by_hand()
    sizes = {Role.PREFILL: 10 * PAGE, Role.DECODE: 20 * PAGE}
    with pair(model, tokens=sizes, cache=tiers(HOST_PAGES, **in_folder(tmp_path))) as both:
        for steps in range(18):
            manager_of(both).supply.evict("full", 1 << 20)
            other: RequestId = both.submit(tokens(100 + steps, 3 * PAGE), GREEDY)
            request = both.submit(prompt, GREEDY)
            for at in range(steps):
                if answering and at % 2:
                    queues[0].run_next()
                both.step()
            both.cancel(request)
            both.cancel(other)
            settle(both, queues)
            assert len(manager_of(both).tree.locks) == len(manager_of(both, Role.DECODE).tree.locks) == 0
        assert ask(both, prompt, queues).list == want


def test_d2_a_worker_has_drained_when_what_it_saves_is_saved(model: Path, tmp_path: Path, by_hand: MakeQueues) -> None:
    prompt = tokens(7, 5 * PAGE + 3)
    queues = by_hand()
    with pair(model, cache=policy(tmp_path, "best_effort"), settle=False) as both:
        (answer,) = both.run(both.submit(prompt, GREEDY))
        both.step()
        assert manager_of(both).busy
        assert queues[0].waiting
        for worker in (both.prefill, both.decode):
            worker.drain()
        both.step()
        assert not both.prefill.drained, "its pages are on their way to storage"
        for queue in queues:
            queue.run_all()
        both.step()
        for worker in (both.prefill, both.decode):
            assert worker.drained
        assert both.prefill.check().violations == both.decode.check().violations == ()
    queues = by_hand()
    with pair(model, cache=tiers(HOST_PAGES, **in_folder(tmp_path))) as both:
        assert ask(both, prompt, queues).list == answer.list
