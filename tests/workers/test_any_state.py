"""Both real workers on state of every kind: the tokens are a hash of the state that was read, through all tiers."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from cache.device.device_backends import CpuDevice
from cache.device.device_port import Device
from cache.manager.kv_cache_manager import KVCacheManager
from cache.memory.kv_cache_spec import PoolSetSpec
from cache.memory.memory_layout import PoolSetLayout
from cache.pool.pool_set import PoolSet, host_layout
from cache.prefix_cache.nodes.tree_node import Tier
from cache.storage.backends.backend_factory import make_backend
from cache.storage.io_queue import ThreadedIoQueue
from cluster.assembly.memory_plan import stride
from contracts.clock import Clock, SystemClock
from contracts.config.cluster_config import Config
from contracts.config.load_config import config_from_dict
from contracts.ids import Incarnation, RequestId, Role, WorkerName
from contracts.sampling_params import SamplingParams
from decode.worker import DecodeWorker
from engine.runner.model_runner import ModelRunner
from prefill.worker import PrefillWorker
from tests.hash_engine import HashEngine, recite
from tests.pair import Answer, Pair
from tests.poolsets import NAMES, pool_sets
from transfer.net.waiter import Waiter
from transfer.net.zmq_channel import ZmqControlTransport
from transfer.planes.make_plane import make_plane
from transfer.rooms.compatibility import fingerprint
from transfer.rooms.receiver.kv_receiver import KVReceiver
from transfer.rooms.sender.kv_sender import KVSender

PAGE = 4
TOKENS = 9
CONTEXT = 400


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
        self.clock = clock or SystemClock()
        self._device = device
        self.answers: dict[RequestId, Answer] = {}
        self._numbers = itertools.count(1)
        prefill, decode = (self._worker(role, spec, config, counts[role]) for role in (Role.PREFILL, Role.DECODE))
        assert isinstance(prefill, PrefillWorker)
        assert isinstance(decode, DecodeWorker)
        self.prefill, self.decode = prefill, decode

    def _worker(self, role: Role, spec: PoolSetSpec, config: Config, count: int) -> PrefillWorker | DecodeWorker:
        device, waiter, cache = self._device(), Waiter(), config.cache_for(role)
        plane = make_plane(config, "127.0.0.1", None, waiter.wake)
        steps = stride(config, role)
        # Room for a few windows, not for one of each page: they are used again and again.
        windows = {p.name: min(count, 4 * spec.window_hold(p.name, steps)) for p in spec.pools if p.window_tokens}
        layout = PoolSetLayout(spec, spec.even(count) | windows)
        pools = PoolSet(spec, layout.counts, plane.allocate("pages", layout.nbytes))
        backend = make_backend(cache.storage)
        queue = ThreadedIoQueue(backend, wake=waiter.wake) if backend is not None else None
        host = None
        if cache.host_bytes:
            below = host_layout(spec, cache.host_bytes, layout.counts)
            host = PoolSet(spec, below.counts, device.allocate_host(below.nbytes), below.order, "host")
        manager = KVCacheManager(
            pools, device, cache, self.clock.now, host=host, storage=queue, fingerprint="hash", stride=steps
        )
        engine = cast(ModelRunner, HashEngine(pools, device))
        transport = ZmqControlTransport("127.0.0.1", waiter, None)
        name, first = WorkerName(f"{role}-0"), Incarnation(1)
        common: dict[str, Any] = {"context": CONTEXT, "clock": self.clock, "pause": lambda s: None}
        common_to_all = fingerprint("hash", spec, "invariant:by hand")
        sender = KVSender(
            name, first, common_to_all, plane, pools, device, config.transfer,
            transport=transport, clock=self.clock,
        )  # fmt: skip
        if role is Role.PREFILL:
            return PrefillWorker(name, first, config, engine, manager, sender, waiter, **common)
        receiver = KVReceiver(
            name, first, common_to_all, plane, pools, device, 16, config.transfer,
            verify=cache.verify, transport=transport, clock=self.clock,
        )  # fmt: skip
        return DecodeWorker(name, first, config, engine, manager, receiver, waiter, sender=sender, **common)


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
    with hash_pair(name, dict.fromkeys(Role, 200), prefill={"chunk_tokens": 8}) as both:
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
    with hash_pair("full+window", dict.fromkeys(Role, 200)) as both:
        prompt = list(range(60))
        request = both.submit(prompt, SamplingParams(max_tokens=60, temperature=0.0))
        while len(both.answers[request].tokens) < 50:
            both.step()
        (allocation,) = both.decode._manager.table
        seen = both.decode._manager.spec.window_pages("window")
        assert sum(page != 0 for page in allocation.tables["window"].pages[: (60 + 48) // PAGE]) <= seen + 1
        assert both.decode._manager.tree.accounts.sizes[Tier.DEVICE, "window"] == 0
        (answer,) = both.run(request)
        assert answer.list == recite(pool_sets(PAGE)["full+window"], prompt, 60)
