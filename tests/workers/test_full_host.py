"""A host tier that is full, and written back to: nobody waits for room that nobody gives up.

Pages of the device can't be evicted above pages that somebody keeps, as long as the host has no room for them. Bursts
of requests are drawn until they come to where every request once waited and nothing was under way. Messages between the
workers take their own time, so no seed leads there each time; of these draws about every second one does.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from cache.storage.inline_queue import InlineIoQueue
from cache.storage.storage_backend import StorageBackend
from contracts.clock import ManualClock
from contracts.ids import Role
from contracts.interfaces.worker_interface import Worker
from decode.retraction.memory_pressure import MemoryPressure
from tests.poolsets import pool_sets
from tests.random_pairs import Draw, serve
from tests.workers.test_any_state import PAGE, HashPair, hash_pair

ROUND_S = 0.0001


DRAWS = 240


class ByHand:
    """Storage that may do one operation after each round, and a clock that goes on with the rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.clock = ManualClock()
        self._queues: list[InlineIoQueue] = []
        self._rng = random.Random(seed)
        monkeypatch.setattr("tests.hash_workers.ThreadedIoQueue", self._queue)
        step = HashPair.step

        def stepped(both: HashPair, *roles: Role) -> None:
            step(both, *roles)
            self._after()

        monkeypatch.setattr(HashPair, "step", stepped)

    def _queue(self, backend: StorageBackend, **_: object) -> InlineIoQueue:
        self._queues.append(InlineIoQueue(backend))
        return self._queues[-1]

    def _after(self) -> None:
        self.clock.advance(ROUND_S)
        for queue in self._queues:
            if self._rng.random() < 0.5:
                queue.run_next(self._rng)


def counters_after(
    monkeypatch: pytest.MonkeyPatch, seed: int, name: str, counts: dict[Role, int], host_pages: int, **cache: Any
) -> dict[Role, dict[str, float]]:
    """The counters of both workers when all answers of the bursts are there, each exact."""
    spec = pool_sets(PAGE)[name]
    cache |= {
        "host_bytes": host_pages * sum(spec.unit_bytes(pool) for pool in spec.by_name),
        "write_policy": "back",
        "load_back": "always",
        "storage": {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 24},
    }
    by_hand = ByHand(monkeypatch, seed)
    with hash_pair(name, counts, clock=by_hand.clock, cache=cache) as both:
        serve(both, Draw(name, counts, {}, bursts=40, most=8), random.Random(seed))
        workers: dict[Role, Worker] = {Role.PREFILL: both.prefill, Role.DECODE: both.decode}
        return {role: dict(worker.status().counters) for role, worker in workers.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_c10_one_that_is_alone_and_lacks_a_page_leaves_what_stands_twice_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, seen = MemoryPressure._alone, list[bool]()

    def looked(pressure: MemoryPressure) -> bool:
        seen.append(alone(pressure))
        return seen[-1]

    monkeypatch.setattr(MemoryPressure, "_alone", looked)
    for seed in range(DRAWS):
        with monkeypatch.context() as patch:
            counters = counters_after(patch, seed, "full", {Role.PREFILL: 12, Role.DECODE: 8}, 8)
        if any(seen):
            assert counters[Role.DECODE]["retractions"] > 0
            return
    raise AssertionError("it never came to that")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["timeout", "wait_complete", "best_effort"])
def test_c11_what_was_prefetched_for_those_who_wait_is_given_up_where_it_keeps_all_of_them_out(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    for seed in range(DRAWS):
        with monkeypatch.context() as patch:
            counts = {Role.PREFILL: 8, Role.DECODE: 40}
            counters = counters_after(patch, seed, "full", counts, 5, prefetch={"policy": policy})
        if counters[Role.PREFILL]["prefetches_given_up"]:
            return
    raise AssertionError("it never came to that")
