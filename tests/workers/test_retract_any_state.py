"""Retracting and resuming state of every kind, where each token is a hash of all state that was read."""

from __future__ import annotations

import random

import pytest

from tests.support.hash_workers import recite
from tests.support.pool_sets import NAMES, pool_sets
from tests.support.worker_pair import turns
from tests.support.worker_parts import lengths_of, manager_of, retract_on, retracted, scheduler_of
from tests.workers.test_any_state import PAGE, HashPair, hash_pair, talk
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker


def host_of(name: str, pages: int) -> int:
    spec = pool_sets(PAGE)[name]
    return pages * sum(spec.unit_bytes(pool) for pool in spec.by_name)


def decode_of(both: HashPair) -> DecodeWorker:
    return both.decode


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in NAMES), ("all", 3)])
def test_every_kind_of_state_survives_being_retracted_again_and_again(name: str, every: int) -> None:
    decode = {"retract": "copy", "cache": {"host_bytes": host_of(name, 200)}}
    counts = {Role.PREFILL: 200, Role.DECODE: 40}
    with hash_pair(name, counts, decode=decode, faults={"retract_every": every}) as both:
        talk(both, name, 3, 4, 3)
        counters = both.decode.status().counters
        assert counters["retractions"] == counters["resumptions"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_state_survives_a_pool_that_holds_a_tenth(name: str) -> None:
    """Long answers that nobody expected: requests are admitted for one token and grow."""
    rng, spec = random.Random(5), pool_sets(PAGE)[name]
    decode = {"retract": "copy", "cache": {"host_bytes": host_of(name, 400)}}
    with hash_pair(name, {Role.PREFILL: 300, Role.DECODE: 26}, decode=decode) as both:
        for _ in range(32):
            lengths_of(decode_of(both)).ended(1)
        asked = [
            ([rng.randrange(300) for _ in range(rng.randint(1, 30))], rng.randint(20, 60)) for _ in range(12)
        ]  # fmt: skip
        requests = [both.submit(prompt, SamplingParams(max_tokens=n, temperature=0.0)) for prompt, n in asked]
        for (prompt, n), answer in zip(asked, both.run(*requests), strict=True):
            assert answer.done is not None
            assert answer.done.error is None, answer.done
            assert answer.list == recite(spec, prompt, n)
        assert both.decode.status().counters["retractions"] > 1


def test_a_shared_prefix_is_swapped_out_once_and_comes_back_once() -> None:
    """Requests that share a prefix which the host's tree has keep it there, all of them together."""
    name, count = "all", 3
    spec = pool_sets(PAGE)[name]
    trunk = list(range(60))
    decode = {"retract": "copy", "cache": {"host_bytes": host_of(name, 300)}}
    with hash_pair(name, dict.fromkeys(Role, 200), decode=decode) as both:
        worker = decode_of(both)
        both.run(both.submit(trunk, SamplingParams(max_tokens=3, temperature=0.0)))
        prompts = [[*trunk, 100 + n] for n in range(count)]
        requests = [both.submit(prompt, SamplingParams(max_tokens=30, temperature=0.0)) for prompt in prompts]
        for _ in turns(1000):
            both.step()
            if sum(r.generated > 2 for r in scheduler_of(worker).running) == count:
                break
        for request in list(scheduler_of(worker).running):
            scheduler_of(worker).retract(request)
        retract_on(worker)
        away = retracted(worker)
        assert [r.swapped.kept for r in away if r.swapped is not None] == [60 // PAGE] * count
        own = [r.swapped.leased("full") for r in away if r.swapped is not None]
        assert max(own) <= 3, "what they share isn't copied"
        assert worker.check().violations == ()
        manager_of(worker).supply.evict("full", 1000)
        free = manager_of(worker).pools.allocators["full"].free
        both.step(Role.DECODE)
        held = free - manager_of(worker).pools.allocators["full"].free
        assert held <= 60 // PAGE + count * 4, "and comes back once for all of them"
        for prompt, answer in zip(prompts, both.run(*requests), strict=True):
            assert answer.list == recite(spec, prompt, 30)
