"""What the whole product must show for a family, through both real workers: its scenes, for `make test` and the soak.

All of it is written once over the registry: a new family, or a new buffer of one, is in every scene without a line.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import VOCAB, Oracle, compare
from tests.support.model_families import EVERY
from tests.support.worker_pair import Answer, Pair, counts_for, pair
from tests.support.worker_parts import manager_of, peers_of
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import BufferLayout, PoolKind, PoolSetSpec, due
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.tree_node import Tier, TokenPrefix
from twinpool.cluster.assembly.memory_plan import state_options
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.models.model_base import Model
from twinpool.engine.models.registry import read_model

PAGE = 16
CHUNK = 48
"""Prefill's token budget of a step: prompts take several."""


@dataclass
class Family:
    """One family's checkpoint, and what the oracle says of it."""

    name: str
    folder: Path
    cache: dict[str, Any] = field(default_factory=dict)
    """Keys of the cache's section that change what it computes: the oracle knows nothing of them."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Keys of the engine's section."""

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.folder)

    @cached_property
    def model(self) -> Model:
        return read_model(self.folder, config=EngineConfig(**self.engine))

    def expect(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The oracle's tokens, by the rule."""
        if self.cache:
            return
        verdict = compare(self.oracle, prompt, answer)
        assert verdict.equal, (self.name, len(prompt), verdict)
        if not verdict.exact:
            print(f"{self.name}, {len(prompt)} tokens: {verdict}")

    def pool_set(self, **cache: Any) -> PoolSetSpec:
        """What it keeps, with these keys of the cache's section."""
        config = config_from_dict({"cache": cache})
        return self.model.pool_set(state_options(self.model.spec, config, Role.PREFILL))

    @property
    def top_k(self) -> int:
        """Positions that sparse attention reads; 0: all."""
        return self.model.config.count("index_topk", 0)


def make_family(name: str, base: Path, **options: Any) -> Family:
    return Family(name, EVERY[name](base / name, **options))


def tokens_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def managers(both: Pair) -> tuple[KVCacheManager, KVCacheManager]:
    """Those of prefill and decode."""
    return manager_of(both.prefill), manager_of(both.decode)


def ask(both: Pair, prompts: Sequence[Sequence[int]], count: int, at_once: int = 8) -> list[Answer]:
    """All of them, the next one as soon as one is done; every answer must be whole."""
    waiting, asked = list(prompts), list[RequestId]()
    while waiting or any(both.answers[r].done is None for r in asked):
        while waiting and sum(both.answers[r].done is None for r in asked) < at_once:
            asked.append(both.submit(waiting.pop(0), greedy(count)))
        both.step()
    answers = [both.answers[r] for r in asked]
    for answer in answers:
        assert answer.done is not None
        assert answer.done.error is None, answer.done
    return answers


def rest(both: Pair) -> None:
    """Step until all that goes down the tiers is there, so that what is found next doesn't hang on threads."""
    deadline = time.monotonic() + 60
    while any(manager.busy for manager in managers(both)):
        assert time.monotonic() < deadline, "the tiers never came to rest"
        both.step()


# ------------------------------------------------------------ answers


def expect_answers(family: Family, plane: str, lengths: Sequence[int], count: int) -> None:
    """Greedy tokens are the oracle's; each prompt is handed over as what the next position reads, and no more."""
    prompts = [tokens_of(seed, length) for seed, length in enumerate(lengths)]
    trunk = max(prompts, key=len)
    spec = family.model.spec
    cache = _pages(**family.cache)
    with pair(
        family.folder, tokens=16384, transfer={"plane": plane}, prefill={"chunk_tokens": CHUNK}, cache=cache,
        engine=dict(family.engine),
    ) as both:  # fmt: skip
        pools = manager_of(both.prefill).spec
        answers = ask(both, prompts, count)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.progress[Role.DECODE].transfer_bytes == bytes_due(pools, len(prompt))
            assert answer.progress[Role.PREFILL].cached_tokens == answer.progress[Role.DECODE].computed_tokens == 0
        shared = [trunk[:cut] + tokens_of(100 + cut, 9) for cut in (len(trunk) // 2, len(trunk) - 3)] + [trunk]
        again = ask(both, shared, count)
        assert again[-1].progress[Role.PREFILL].cached_tokens > 0, "what was computed before is found again"
        expect_mechanisms(family, pools, len(trunk))
    assert spec.context >= len(trunk) + count
    distinct = [len(set(answer.list)) for answer in answers]
    assert sum(distinct) > len(distinct) * count / 2, "a checkpoint that repeats itself shows nothing"
    for prompt, answer in zip([*prompts, *shared], [*answers, *again], strict=True):
        family.expect(prompt, answer.list)


def _pages(**cache: Any) -> dict[str, Any]:
    return {"page_tokens": PAGE, **cache}


def bytes_due(spec: PoolSetSpec, prompt: int) -> int:
    """What a hand-over of so many positions is when decode holds nothing."""
    return sum(len(numbers) * spec.unit_bytes(pool) for pool, numbers in due(spec, prompt).items())


def expect_mechanisms(family: Family, spec: PoolSetSpec, longest: int) -> None:
    """Prompts are long enough for what is new in the family's state to be at work."""
    assert longest > 2 * CHUNK, "state is carried over chunks"
    for pool in spec.pools:
        if pool.kind is PoolKind.WINDOW:
            dropped = due(spec, longest)[pool.name].start * spec.page_tokens
            assert dropped > 0, "positions leave the window"
    if family.top_k:
        assert longest > 2 * family.top_k, "most keys are not selected"


# ------------------------------------------------------------ tiers


class Watch:
    """What went up and down the tiers of a KV cache manager, by component: pages and slots."""

    def __init__(self, manager: Any) -> None:
        self.evicted: Counter[tuple[Tier, str]] = Counter()
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        """Requests that found state of a component."""
        tree, load_back = manager.tree, manager.tiers.load_back
        allocate, preallocate = manager.allocations.allocate, manager.allocations.preallocate
        evict, insert, plan = tree.eviction.evict, tree.insert, load_back.plan

        def counted_evict(tier: Tier, pool: str, *rest: Any) -> int:
            before = dict(tree.accounts.sizes)
            freed: int = evict(tier, pool, *rest)
            self.evicted.update({key: size - tree.accounts.sizes[key] for key, size in before.items()})
            return freed

        def counted_insert(prefix: Any, offers: Any, tier: Tier = Tier.DEVICE, *rest: Any) -> Any:
            if tier is Tier.HOST:
                self.stored.update({pool: sum(len(o.digests) for o in mine) for pool, mine in offers.items()})
            return insert(prefix, offers, tier, *rest)

        def counted_plan(lock: Any, leases: Any) -> Any:
            self.loaded.update({pool: len(lease) for pool, lease in leases.items()})
            return plan(lock, leases)

        def counted_allocate(*args: Any, **options: Any) -> Any:
            found = allocate(*args, **options)
            if found is not None:
                self.hits.update(pool for pool in manager.spec.by_name if found.lock.of(pool))
            return found

        def counted_preallocate(*args: Any) -> Any:
            found = preallocate(*args)
            if found is not None:
                self.hits.update(pool for pool in manager.spec.by_name if found[0].lock.of(pool))
            return found

        tree.eviction.evict, tree.insert, load_back.plan = counted_evict, counted_insert, counted_plan
        manager.allocations.allocate, manager.allocations.preallocate = counted_allocate, counted_preallocate


def device_bytes(family: Family, tokens: int, **cache: Any) -> int:
    """What prefill's device pools of so many positions take."""
    spec = family.pool_set(**cache)
    counts = counts_for(
        family.folder, config_from_dict({"cache": cache, "engine": family.engine}), Role.PREFILL, tokens
    )
    return sum(spec.unit_bytes(pool) * (1 + count) for pool, count in counts.items())


def expect_tiers(family: Family, talks: int, turns: int, count: int = 9) -> None:
    """Conversations through pools so small that state of every kind is evicted, goes to host and storage and returns.

    The host holds as much as prefill's device, which is two requests. Every answer is the oracle's, and every component
    was evicted from both tiers, loaded from both, and hit.
    """
    rng = random.Random(7)
    said = [tokens_of(200 + n, rng.randint(40, 150)) for n in range(talks)]
    first = [len(words) for words in said]
    asked: list[tuple[list[int], list[int]]] = []
    small = _pages(device_requests=2, **family.cache)
    storage = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 28}
    host_bytes = device_bytes(family, 26 * PAGE, **small)
    cache = small | {"host_bytes": host_bytes, "load_back": "always", "storage": storage}
    with pair(
        family.folder, tokens={Role.PREFILL: 26 * PAGE, Role.DECODE: 12 * talks * PAGE}, transfer={"plane": "local"},
        prefill={"chunk_tokens": CHUNK}, cache=cache | {"prefetch": {"policy": "wait_complete"}},
        engine=dict(family.engine),
    ) as both:  # fmt: skip
        watches = [Watch(manager) for manager in managers(both)]
        for _ in range(turns):
            for words, answer in zip(said, ask(both, said, count, at_once=3), strict=True):
                asked.append((list(words), answer.list))
                words += [*answer.list, *tokens_of(len(asked), rng.randint(1, 30))]
            rest(both)
        # The end of an answer is where decode goes on with all that it has itself: pages, windows and states.
        last = max(asked, key=lambda pair: len(pair[0]))
        whole = [*last[0], *last[1]]
        again = whole[: (len(whole) - 1) // PAGE * PAGE]
        if len(again) > len(last[0]):
            asked.append((again, ask(both, [again], count)[0].list))
        for worker in (both.prefill, both.decode):
            counters = worker.status().counters
            assert counters["pages_damaged_on_host"] == counters["pages_damaged_in_storage"] == 0
        names = list(manager_of(both.prefill).spec.by_name)
    prefill = watches[0]
    for pool in names:
        assert prefill.evicted[Tier.DEVICE, pool], f"{pool} was never evicted from the device: {prefill.evicted}"
        assert prefill.evicted[Tier.HOST, pool], f"{pool} was never evicted from the host: {prefill.evicted}"
        assert prefill.loaded[pool], f"{pool} was never loaded from the host"
        assert prefill.stored[pool], f"{pool} never came from storage"
        # Requests of one turn compete for the small host, in the order of storage's threads: not every one can hit.
        assert prefill.hits[pool] > talks // 2, f"{pool} was hit {prefill.hits[pool]} times"
    assert watches[1].hits, "decode needn't be sent what it has"
    assert max(first) > CHUNK
    for prompt, answer_tokens in asked:
        family.expect(prompt, answer_tokens)


# ------------------------------------------------------------ damage


@dataclass(frozen=True)
class Buffer:
    """One registered buffer, by name."""

    pool: str
    name: str

    def layout(self, pools: PoolSet) -> BufferLayout:
        return next(b for b in pools.layout.buffers[self.pool] if b.spec.name == self.name)

    def flip(self, pools: PoolSet, indices: Sequence[int], seed: int) -> None:
        """One bit of one layer of each page or slot."""
        rng, layout = random.Random(seed), self.layout(pools)
        stack = layout.stack(pools.region, pools.layout.counts[self.pool], torch.uint8)
        for index in indices:
            layer, at = rng.randrange(stack.shape[0]), rng.randrange(stack.shape[2])
            stack[layer, index, at] ^= 1 << rng.randrange(8)
        _settle(pools)

    def scramble(self, pools: PoolSet, indices: Sequence[int], seed: int) -> None:
        """All of it: other numbers, some of them large."""
        generator, layout = torch.Generator().manual_seed(seed), self.layout(pools)
        for layer in range(layout.spec.layers):
            view = pools.layout.view(pools.region, self.pool, layout, layer)
            noise = 4 * torch.randn((len(indices), *view.shape[1:]), generator=generator)
            noise = noise if view.dtype.is_floating_point else noise * 50
            view[list(indices)] = noise.to(view.device, view.dtype)
        _settle(pools)

    def saved(self, pools: PoolSet, indices: Sequence[int]) -> torch.Tensor:
        stack = self.layout(pools).stack(pools.region, pools.layout.counts[self.pool], torch.uint8)
        content = stack[:, list(indices)].clone()
        _settle(pools)
        return content

    def restore(self, pools: PoolSet, indices: Sequence[int], content: torch.Tensor) -> None:
        stack = self.layout(pools).stack(pools.region, pools.layout.counts[self.pool], torch.uint8)
        stack[:, list(indices)] = content
        _settle(pools)


def _settle(pools: PoolSet) -> None:
    """Until what was done to a GPU's memory is done: the worker's streams don't wait for this thread's."""
    if pools.region.is_cuda:
        torch.cuda.synchronize(pools.region.device)


def buffers_of(spec: PoolSetSpec) -> list[Buffer]:
    """Every one that is registered."""
    return [Buffer(pool.name, buffer.name) for pool in spec.pools for buffer in pool.buffers]


@contextmanager
def damaged_on_the_way(both: Pair, buffer: Buffer, *, whole: bool) -> Iterator[list[int]]:
    """What prefill writes of `buffer` arrives damaged, while its own copy stays as it is; yields indices written."""
    sender, pools = both.prefill.setup.sender, manager_of(both.prefill).pools
    write = sender.write
    hurt: list[int] = []

    def damaging(room: Any, finished: Mapping[str, Any], after: Any, generation: int = 0) -> None:
        mine = finished[buffer.pool].indices if buffer.pool in finished else ()
        for completion in after:
            completion.wait()
        before = buffer.saved(pools, mine)
        (buffer.scramble if whole else buffer.flip)(pools, mine, len(hurt))
        write(room, finished, after, generation)
        for peer in peers_of(sender).values():
            peer.writes.settle()  # On some devices it is under way still.
        buffer.restore(pools, mine, before)
        hurt.extend(mine)

    sender.write = damaging  # type: ignore[method-assign]
    try:
        yield hurt
    finally:
        sender.write = write  # type: ignore[method-assign]


def damage_on_the_host(both: Pair, buffer: Buffer, *, whole: bool) -> int:
    """Damage all that prefill's host tier has of `buffer`, and take everything off its device; how many entries."""
    manager, _ = managers(both)
    host = manager.host
    used = [part.lease.indices for node in manager.tree.accounts.nodes() for part in _host_parts(node, buffer.pool)]
    indices = [index for mine in used for index in mine]
    assert host is not None
    (buffer.scramble if whole else buffer.flip)(host, indices, 1)
    for pool in manager.spec.by_name:
        manager.supply.evict(pool, 1 << 30)
    return len(indices)


def _host_parts(node: Any, pool: str) -> list[Any]:
    return [part for name, part in node.parts[Tier.HOST].items() if name == pool]


@contextmanager
def tagged(family: Family, *, verify: bool) -> Iterator[Pair]:
    """A pair with a host tier, whose decode worker keeps nothing of its own."""
    pages = {"page_tokens": DAMAGED_PAGE, **family.cache}
    cache = pages | {"load_back": "always", "verify": verify, "host_bytes": 4 * device_bytes(family, 1024, **pages)}
    with pair(
        family.folder, tokens=1024, transfer={"plane": "local"}, prefill={"chunk_tokens": 2 * CHUNK}, cache=cache,
        decode={"cache": {"prefix_reuse": False}}, engine=dict(family.engine),
    ) as both:  # fmt: skip
        yield both


DAMAGED_TOKENS = 7
DAMAGED_PAGE = 8
"""Half of what recurrent layers gather before they fold it into their state: both halves are there in the middle."""


def damage_prompts(spec: PoolSetSpec, family: Family) -> Iterator[tuple[Buffer, list[int]]]:
    """Each buffer with a prompt of its own, longer than windows, chunks and top-k."""
    length = max(6, family.top_k // 8) * 16 + DAMAGED_PAGE + 3
    for number, buffer in enumerate(buffers_of(spec)):
        yield buffer, tokens_of(300 + number, length)


def expect_damage_is_caught(family: Family) -> None:
    """In hand-over: the request fails as damaged, and comes out right when it is asked again. In a load: it is computed
    again. Both are counted, for every buffer."""
    with tagged(family, verify=True) as both:
        spec = manager_of(both.prefill).spec
        for buffer, prompt in damage_prompts(spec, family):
            before = both.decode.status().counters["pages_damaged"]
            with damaged_on_the_way(both, buffer, whole=False) as hurt:
                (answer,) = both.run(both.submit(prompt, greedy(DAMAGED_TOKENS)))
            assert hurt, f"nothing of {buffer} was handed over"
            assert answer.done is not None
            assert answer.done.error is ErrorKind.DAMAGED, (buffer, answer.done)
            assert both.decode.status().counters["pages_damaged"] > before
            both.settle()  # Prefill hears of it, and forgets what it sent.
            (good,) = ask(both, [prompt], DAMAGED_TOKENS)
            assert good.progress[Role.DECODE].cached_tokens == 0, "decode holds nothing of it"
            both.settle()  # Prefill holds it until its room is confirmed.
            before = both.prefill.status().counters["pages_damaged_on_host"]
            assert damage_on_the_host(both, buffer, whole=False), f"nothing of {buffer} is on the host"
            (again,) = ask(both, [prompt], DAMAGED_TOKENS)
            assert both.prefill.status().counters["pages_damaged_on_host"] > before, buffer
            assert again.list == good.list, buffer
        family.expect(prompt, good.list)


def expect_unnoticed_damage_shows(family: Family) -> None:
    """Without tags the same damage changes the answer, in hand-over and in a load: so the buffer is really read."""
    with tagged(family, verify=False) as both:
        spec = manager_of(both.prefill).spec
        for buffer, prompt in damage_prompts(spec, family):
            (good,) = ask(both, [prompt], DAMAGED_TOKENS)
            with damaged_on_the_way(both, buffer, whole=True) as hurt:
                (other,) = ask(both, [prompt], DAMAGED_TOKENS)
            assert hurt
            assert other.list[0] == good.list[0], "prefill's own token comes from its own state"
            assert other.list != good.list, f"{buffer} was damaged in hand-over and nothing changed"
            both.settle()
            assert damage_on_the_host(both, buffer, whole=True)
            (loaded,) = ask(both, [prompt], DAMAGED_TOKENS)
            assert loaded.progress[Role.PREFILL].cached_by_tier["host"] > 0
            assert loaded.list != good.list, f"{buffer} was damaged in a load and nothing changed"
            managers(both)[0].finished.invalidate(TokenPrefix.of(prompt, DAMAGED_PAGE))
