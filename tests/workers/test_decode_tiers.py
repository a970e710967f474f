"""Decode's own tiers: what a turn left there is held for the next one, and loaded where it must be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle, compare
from tests.support.worker_pair import Pair, pair
from tests.support.worker_parts import manager_of, scheduler_of, steps_of
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PAGE = 16


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


def turn(both: Pair, oracle: Oracle, prompt: list[int]) -> tuple[list[int], int]:
    """One turn: the whole conversation so far, and the prompt positions that decode already held."""
    (answer,) = both.run(both.submit(prompt, GREEDY))
    assert compare(oracle, prompt, answer.list).equal
    return [*prompt, *answer.list], answer.progress[Role.DECODE].cached_tokens


def to_the_host(worker: DecodeWorker) -> None:
    """Other requests need the device: what the tree has there goes."""
    while manager_of(worker).supply.evict("full", 1 << 20):
        pass


def test_a12_the_next_turn_is_sent_only_what_decode_lacks(model: Path, oracle: Oracle) -> None:
    with pair(model) as both:
        said, held = turn(both, oracle, tokens(1, 70))
        assert held == 0
        known = (len(said) - 1) // PAGE * PAGE
        both.answers.clear()
        said, held = turn(both, oracle, [*said, *tokens(2, 30)])
        assert held == known, "prompt and answer of the turn before, but for the last token's state"


def test_what_went_to_decodes_host_comes_back_before_the_request_joins_a_batch(model: Path, oracle: Oracle) -> None:
    with pair(model, decode={"cache": {"host_bytes": 1 << 22}}) as both:
        said, _ = turn(both, oracle, tokens(3, 90))
        to_the_host(both.decode)
        assert not manager_of(both.decode).tree.accounts.sizes[Tier.DEVICE, "full"]
        known = (len(said) - 1) // PAGE * PAGE
        _, held = turn(both, oracle, [*said, *tokens(4, 20)])
        assert held == known
        assert both.decode.status().counters["pages_loaded"] == known // PAGE


def test_while_all_that_runs_is_being_loaded_the_worker_sleeps_between_two_looks(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = AdversarialDevice(1, stray=0.0, polled=0.5)
    cache = {"host_bytes": 1 << 22, "verify": False}  # Nobody waits for a check of what arrived.
    with pair(model, decode={"cache": cache}, devices={Role.DECODE: device}) as both:
        naps: list[float] = []
        monkeypatch.setattr(both.decode.setup.waiter, "wait", naps.append)
        said, _ = turn(both, oracle, tokens(9, 90))
        while not manager_of(both.decode).tree.accounts.sizes[Tier.HOST, "full"] or manager_of(both.decode).busy:
            both.step()
        to_the_host(both.decode)
        device._polled = 0.0  # From now on nothing comes by itself.
        prompt = [*said, *tokens(10, 20)]
        request = both.submit(prompt, GREEDY)
        while not scheduler_of(both.decode).running:
            both.step()
        for _ in range(3):
            both.step()
            both.decode.wait(0.1)
        assert naps == [pytest.approx(0.002)] * 3
        device._polled = 0.5
        (answer,) = both.run(request)
        assert compare(oracle, prompt, answer.list).equal
        naps.clear()
        both.submit(tokens(11, 20), GREEDY)
        while not steps_of(both.decode):
            both.step()
        both.decode.wait(0.1)
        assert not naps, "and not at all while there is something to compute"
        both.run()
    device.settle()


def test_a9_a_page_that_rotted_on_decodes_host_costs_an_attempt_and_no_token(model: Path, oracle: Oracle) -> None:
    with pair(model, decode={"cache": {"host_bytes": 1 << 22}}) as both:
        said, _ = turn(both, oracle, tokens(5, 90))
        to_the_host(both.decode)
        host = manager_of(both.decode).host
        assert host is not None
        part = next(manager_of(both.decode).tree.accounts.nodes()).parts[Tier.HOST]["full"]
        host.layout.page(host.region, "full", part.lease.indices[2])[7] ^= 64
        prompt = [*said, *tokens(6, 20)]
        (failed,) = both.run(both.submit(prompt, GREEDY))
        assert failed.done is not None
        assert failed.done.error is ErrorKind.DAMAGED
        assert failed.done.error.retryable
        _, held = turn(both, oracle, prompt)
        assert held == 0, "what hung on the damaged page is not believed either"
        assert both.decode.status().counters["pages_damaged_on_host"] > 0


def test_without_reuse_decode_keeps_and_holds_nothing(model: Path, oracle: Oracle) -> None:
    with pair(model, decode={"cache": {"prefix_reuse": False}}) as both:
        said, _ = turn(both, oracle, tokens(7, 50))
        assert manager_of(both.decode).tree.accounts.sizes[Tier.DEVICE, "full"] == 0
        assert turn(both, oracle, said)[1] == 0


def test_a_reasoning_span_and_what_follows_it_is_not_kept(model: Path, oracle: Oracle) -> None:
    prompt = tokens(8, 40)
    with pair(model) as both:
        said, _ = turn(both, oracle, prompt)
    opens = said[len(prompt) + 10]
    first = len(prompt) + said[len(prompt) :].index(opens)
    strip = {"strip_reasoning": True, "reasoning_tokens": f"{opens},299"}
    with pair(model, cache=strip) as both:
        again, _ = turn(both, oracle, prompt)
        assert again == said
        manager = manager_of(both.decode)
        assert manager.tree.accounts.sizes[Tier.DEVICE, "full"] == first // PAGE
        assert manager.pools.allocators["full"].free == manager.pools.allocators["full"].total - first // PAGE
