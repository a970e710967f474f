"""Both real workers on state of every kind: the tokens are a hash of the state that was read, through all tiers."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.hash_workers import hash_worker, recite
from tests.support.pool_sets import NAMES, pool_sets
from tests.support.worker_pair import Answer, Pair, UnhurriedClock
from tests.support.worker_parts import manager_of
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.worker import PrefillWorker

PAGE = 4
TOKENS = 9


class HashPair(Pair):
    """A pair whose engines hash what they read; the rest is what a cluster runs."""

    def __init__(
        self,
        spec: PoolSetSpec,
        config: Config,
        counts: dict[Role, int],
        clock: Clock | None = None,
        device: Callable[[], Device] = CpuDevice,
    ) -> None:
        self.clock = clock or UnhurriedClock()
        self.answers: dict[RequestId, Answer] = {}
        self._numbers = itertools.count(1)
        prefill, decode = (hash_worker(role, spec, config, counts[role], self.clock, device()) for role in PAIR)
        assert isinstance(prefill, PrefillWorker)
        assert isinstance(decode, DecodeWorker)
        self.prefill, self.decode = prefill, decode


@contextmanager
def hash_pair(
    name: str,
    counts: dict[Role, int],
    *,
    clock: Clock | None = None,
    device: Callable[[], Device] = CpuDevice,
    **sections: dict[str, Any],
) -> Iterator[HashPair]:
    config = {"cache": {"page_tokens": PAGE, **sections.pop("cache", {})}, "transfer": {"plane": "local"}, **sections}
    config["decode"] = {"prefix_offer_bytes": 0, **sections.get("decode", {})}
    both = HashPair(pool_sets(PAGE)[name], config_from_dict(config), counts, clock, device)
    try:
        yield both
        both.settle()
    finally:
        both.prefill.close()
        both.decode.close()


def talk(both: HashPair, name: str, seed: int, conversations: int, turns: int) -> list[Answer]:
    """Conversations side by side, each turn all that was said so far and some more; every answer is checked."""
    rng, spec = random.Random(seed), pool_sets(PAGE)[name]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    system = [rng.randrange(300) for _ in range(10)]
    said = [list(system if n % 2 else []) for n in range(conversations)]
    answers: list[Answer] = []
    for _ in range(turns):
        for words in said:
            words += [rng.randrange(300) for _ in range(rng.randint(1, 9))]
        asked = [both.submit(words, params) for words in said]
        for number, answer in enumerate(both.run(*asked)):
            assert answer.done is not None
            assert answer.done.error is None, answer.done
            assert answer.list == recite(spec, said[number], TOKENS)
            said[number] += answer.list
            answers.append(answer)
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_state_arrives_and_is_found_again(name: str) -> None:
    with hash_pair(name, dict.fromkeys(PAIR, 200), prefill={"chunk_tokens": 8}) as both:
        answers = talk(both, name, 1, 3, 3)
        later = answers[3:]
        assert sum(a.progress[Role.PREFILL].cached_tokens > 0 for a in later) >= 4, "the turn before is found"
        assert all(a.progress[Role.DECODE].cached_tokens for a in later), "and needn't be sent again"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["through", "selective", "back"])
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_state_survives_pools_that_are_too_small_for_it(name: str, policy: str) -> None:
    unit = sum(pool_sets(PAGE)[name].unit_bytes(pool) for pool in pool_sets(PAGE)[name].by_name)
    storage = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 24}
    cache = {"host_bytes": 60 * unit, "write_policy": policy, "load_back": "always", "storage": storage}
    cache |= {"prefetch": {"policy": "wait_complete"}}
    with hash_pair(name, {Role.PREFILL: 34, Role.DECODE: 50}, cache=cache, prefill={"chunk_tokens": 8}) as both:
        answers = talk(both, name, 2, 5, 4)
        tiers = [a.progress[Role.PREFILL].cached_by_tier for a in answers]
        assert sum(t["host"] for t in tiers) > 0, tiers
        if policy == "through":
            assert sum(t["storage"] for t in tiers) > 0, tiers
        counters = both.prefill.status().counters
        assert counters["pages_evicted"] > 0
        assert counters["pages_damaged_on_host"] == counters["pages_damaged_in_storage"] == 0


def test_windows_go_back_to_the_pool_as_the_answer_goes_on() -> None:
    with hash_pair("full+window", dict.fromkeys(PAIR, 200)) as both:
        prompt = list(range(60))
        request = both.submit(prompt, SamplingParams(max_tokens=60, temperature=0.0))
        while len(both.answers[request].tokens) < 50:
            both.step()
        (allocation,) = manager_of(both.decode).allocations
        seen = manager_of(both.decode).spec.window_pages("window")
        assert sum(page != 0 for page in allocation.tables["window"].pages[: (60 + 48) // PAGE]) <= seen + 1
        assert manager_of(both.decode).tree.accounts.sizes[Tier.DEVICE, "window"] == 0
        (answer,) = both.run(request)
        assert answer.list == recite(pool_sets(PAGE)["full+window"], prompt, 60)
