"""Pools that are full of what nobody can give up: nobody waits for room that doesn't come.

Pages of the device can't be evicted above pages that somebody keeps, where the host has no room for them. One scene is
made by hand; to the other one bursts of requests are drawn until they come. Messages between the workers take their own
time, so no seed leads there each time; of its draws every third to every eighth one does.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from tests.support.hash_workers import recite
from tests.support.pool_sets import pool_sets
from tests.support.random_pairs import Draw, serve
from tests.workers.test_any_state import PAGE, HashPair, hash_pair
from twinpool.cache.storage.io_queue import InlineIoQueue
from twinpool.cache.storage.storage_backend import StorageBackend
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.sampling_params import SamplingParams

ROUND_S = 0.0001


DRAWS = 240
"""All of them in vain: one time in 10^13 where every eighth leads there."""


class ByHand:
    """Storage that may do one operation after each round, and a clock that goes on with the rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.clock = ManualClock()
        self._queues: list[InlineIoQueue] = []
        self._rng = random.Random(seed)
        monkeypatch.setattr("tests.support.hash_workers.ThreadedIoQueue", self._queue)
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


@pytest.mark.parametrize(("host_pages", "ends"), [(6, None), (0, ErrorKind.RETRACTED)])
def test_c10_one_that_is_alone_and_lacks_a_page_leaves_what_stands_twice_and_comes_back(
    host_pages: int, ends: ErrorKind | None
) -> None:
    """The second prompt is the first request's whole text and more, and gets pages while the first one runs. So it
    brings pages of its own for what the tree has by the time that it arrives; the tree keeps its copies of these, as
    pages of the second request stand below them. Of 7 pages that leaves 5 for a request that needs 7."""
    spec = pool_sets(PAGE)["full"]
    cache = {"host_bytes": host_pages * spec.unit_bytes("full"), "write_policy": "back"}
    counts = {Role.PREFILL: 20, Role.DECODE: 8}
    with hash_pair("full", counts, cache=cache, decode={"first_answer_tokens": 1}) as both:
        prompt = list(range(PAGE))
        first = both.submit(prompt, SamplingParams(max_tokens=9, temperature=0.0))
        while not both.decode.status().running:
            both.step()
        longer = [*prompt, *recite(spec, prompt, 9), 250, 251, 252]
        sampling = SamplingParams(max_tokens=12, temperature=0.0)
        second = both.submit(longer, sampling)
        while both.answers[first].done is None:
            both.step(Role.DECODE)
        (answer,) = both.run(second, rounds=2000)
        assert answer.done is not None
        assert answer.done.error is ends, answer.done
        assert both.decode.status().counters["retractions"] == 1
        said = answer.list
        if ends is not None:  # Without a copy of its state the next attempt goes on from its tokens.
            (rest,) = both.run(both.submit(longer, sampling, emitted=said))
            said += rest.list
        assert said == recite(spec, longer, 12)


@pytest.mark.slow
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
