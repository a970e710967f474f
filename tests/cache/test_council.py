"""Prefetches of a seat with several ranks: whatever each of them finds, all end with the same prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from cache.components import Window
from cache.consensus import Ballot, LocalGroup
from cache.council import Council
from cache.pools import PoolSet
from cache.prefetch import Prefetch, Prefetcher
from cache.prefix import Prefix
from cache.registry import Order, PoolSetSpec
from cache.shelf import RankShelf
from cache.storage import InlineQueue, Item, ObjectName
from cache.storage.memory import MemoryBackend
from cache.tags import Digester
from cache.tree import PrefixTree
from contracts.clock import ManualClock
from contracts.config import PrefetchConfig
from contracts.errors import PeerDead
from tests.poolsets import pool_sets

PAGES = 12
CONFIG = PrefetchConfig(policy="wait_complete", batch_pages=3)


@dataclass
class Rank:
    """One rank: storage of its own with holes of its own, and its end of the ballot."""

    tree: PrefixTree
    host: PoolSet
    queue: InlineQueue
    has: dict[str, set[int]]
    prefetcher: Prefetcher
    ballot: Ballot
    council: Council
    prefetches: list[Prefetch]


def fill(backend: MemoryBackend, spec: PoolSetSpec, prefix: Prefix, has: dict[str, set[int]]) -> None:
    """Put pages `has` of each pool into storage, sealed as a saver would."""
    pools = PoolSet(spec, spec.even(3), order=Order.PAGE_FIRST)
    size = spec.page_tokens
    for pool, pages in has.items():
        for page in pages:
            pools.region.random_(generator=torch.Generator().manual_seed(page))
            firsts, ends = ([page * size], [(page + 1) * size])
            (digest,) = Digester(pools.layout).digest(pools.region, pool, [1], firsts, ends)
            payload = pools.layout.page(pools.region, pool, 1).numpy().tobytes()
            (outcome,) = backend.write([Item(ObjectName("model", pool, prefix.key(page)), digest, payload)])
            assert outcome.ok


def make_ranks(size: int, prefix: Prefix, seed: int) -> tuple[list[Rank], ManualClock]:
    rng, clock, group = random.Random(seed), ManualClock(), LocalGroup(size)
    spec = pool_sets(2)["full+window"]
    ranks = []
    for member in group.members:
        has = {p: {n for n in range(PAGES) if rng.random() < 0.93} for p in spec.by_name}
        backend = MemoryBackend(f"rank {id(group)} {member.rank}", 1 << 20)
        fill(backend, spec, prefix, has)
        tree, host, queue = PrefixTree(spec), PoolSet(spec, spec.even(30), order=Order.PAGE_FIRST), InlineQueue(backend)
        ballot = Ballot(member, clock, deadline_s=5.0)
        council = Council(ballot)
        prefetcher = Prefetcher(
            tree, host, RankShelf(queue, host, "model"), CONFIG, clock.now, council.agree, council.begin
        )
        ranks.append(Rank(tree, host, queue, has, prefetcher, ballot, council, []))
    return ranks, clock


def common(ranks: Sequence[Rank]) -> int:
    """The longest prefix that every rank has all of."""
    window = next(c for c in ranks[0].tree.components if isinstance(c, Window))

    def accepts(rank: Rank, length: int) -> bool:
        recent = range(max(0, length - window.reach), length)
        return rank.has["full"].issuperset(range(length)) and rank.has["window"].issuperset(recent)

    return max(n for n in range(PAGES + 1) if all(accepts(rank, n) for rank in ranks))


def step(ranks: Sequence[Rank], prefix: Prefix, start: bool, busy: Sequence[int], rng: random.Random) -> None:
    """One step of the seat: the leader's plan, which every rank applies; then each does what it can."""
    settled = ranks[0].ballot.completed
    for number, rank in enumerate(ranks):
        assert rank.council.settle(settled)
        if start:
            started = rank.prefetcher.start(prefix)
            assert started is not None
            rank.prefetches.append(started)
        if number not in busy:
            rank.queue.run_next(rng)
        rank.prefetcher.poll()
        rank.ballot.exchange()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_c3_ranks_end_with_the_longest_prefix_that_all_of_them_have(size: int, seed: int) -> None:
    rng = random.Random(seed)
    prefix = Prefix.of([rng.randrange(9) for _ in range(2 * PAGES)], 2)
    ranks, _ = make_ranks(size, prefix, seed)
    expected = common(ranks)
    for number in range(400):
        # One rank's storage is slow: it answers every fifth step.
        step(ranks, prefix, number == 0, [size - 1] if number % 5 and size > 1 else [], rng)
        over = [rank.prefetches[0].over for rank in ranks]
        if all(over):
            break
        assert not any(over) or number, "nobody goes by what it alone has found"
    assert [rank.tree.match(prefix).depth for rank in ranks] == [expected] * size
    for rank in ranks:
        assert len(rank.prefetcher) == 0
        assert rank.tree.check() == rank.host.check() == []
        assert rank.ballot.keys == ()
        held = sum(a.total - a.free for a in rank.host.allocators.values())
        assert held == sum(rank.tree.sizes.values())


def test_c3_a_rank_that_dies_ends_the_others_prefetches_with_its_error_and_nothing_leaks() -> None:
    rng = random.Random(1)
    prefix = Prefix.of([rng.randrange(9) for _ in range(2 * PAGES)], 2)
    ranks, clock = make_ranks(4, prefix, 1)
    step(ranks, prefix, True, [3], rng)
    for _ in range(5):
        step(ranks[:3], prefix, False, [], rng)
    clock.advance(5.1)
    for rank in ranks[:3]:
        with pytest.raises(PeerDead):
            rank.ballot.exchange()
        rank.queue.close()
        rank.prefetcher.close()
        assert all(a.free == a.total for a in rank.host.allocators.values())
