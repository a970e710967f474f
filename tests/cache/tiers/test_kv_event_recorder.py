"""The truth of the KV events is told a bounded part a round, while the tree changes, and comes out right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.executed_lines import steps
from tests.support.pool_sets import pool_sets
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import IN_TREE, PageOffer, Tier, TokenPrefix, token_ids
from twinpool.cache.tiers import kv_event_publisher as event_publisher
from twinpool.cache.tiers.kv_event_publisher import KVEventRecorder
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cache_config import EventsConfig
from twinpool.contracts.messages.kv_events import EventMedium as Medium
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber

PAGE_TOKENS = 4
ANY = "tcp://127.0.0.1:0"


class Told:
    """A tree that is told about, and what reads it."""

    def __init__(self, buffer_batches: int = 8, buffer_bytes: int = 1 << 28) -> None:
        self.tree = RadixTree(pool_sets(PAGE_TOKENS)["full"])
        self.pages = {tier: PageAllocator(f"{tier.name} pages", 30_000, first=1) for tier in IN_TREE}
        config = EventsConfig(
            endpoint=ANY, replay_endpoint=ANY, buffer_batches=buffer_batches, buffer_bytes=buffer_bytes
        )
        self.event_recorder = KVEventRecorder(self.tree, config, time.time, 0)
        self.reader: KVEventSubscriber | None = None

    def insert(self, tokens: list[int], tier: Tier = Tier.DEVICE, salt: str = "") -> None:
        prefix = TokenPrefix.of(tokens, PAGE_TOKENS, salt)
        lease = self.pages[tier].lease(len(prefix), "a request")
        digests = [hash(key) & 0xFFFF for key in block_hashes(tokens, PAGE_TOKENS, salt)]
        self.tree.insert(prefix, {"full": [PageOffer(0, lease, digests)]}, tier)
        lease.release()

    def read(self) -> KVEventSubscriber:
        publisher = self.event_recorder.publisher
        self.reader = KVEventSubscriber(publisher.endpoint, SystemClock(), publisher.replay_endpoint)
        return self.reader

    def round(self) -> None:
        self.event_recorder.round()
        if self.reader is not None:
            self.reader.poll(0.002)

    def held(self) -> dict[Medium, set[bytes]]:
        """What the tree has, found by going down from its roots and hashing the tokens."""
        out: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        for salt, root in self.tree.accounts.roots.items():
            stack = [(child, list[int]()) for child in root.children.values()]
            while stack:
                node, above = stack.pop()
                tokens = above + token_ids(node.raw)
                keys = block_hashes(tokens, PAGE_TOKENS, salt)[len(above) // PAGE_TOKENS :]
                for tier, medium in ((Tier.DEVICE, Medium.DEVICE), (Tier.HOST, Medium.HOST)):
                    out[medium] |= set(keys) if node.parts[tier] else set()
                stack += [(child, tokens) for child in node.children.values()]
        return out

    def known(self) -> dict[Medium, set[bytes]]:
        assert self.reader is not None
        return {medium: set(pages) for medium, pages in self.reader.index.pages.items()}


@contextmanager
def told(**bounds: int) -> Iterator[Told]:
    one = Told(**bounds)
    try:
        yield one
    finally:
        if one.reader is not None:
            one.reader.close()
        one.event_recorder.close()


def answering(one: Told) -> bool:
    """Whether somebody who asked hasn't been told all yet."""
    return bool(one.event_recorder.publisher._open)


def _disturb(one: Told, rng: random.Random, prompts: list[list[int]]) -> None:
    old = rng.choice(prompts)
    match rng.randrange(6):
        case 0 | 1:
            cut = PAGE_TOKENS * rng.randrange(len(old) // PAGE_TOKENS)
            prompts.append(old[:cut] + [rng.randrange(10**6) for _ in range(PAGE_TOKENS * rng.randrange(1, 60))])
            one.insert(prompts[-1])
        case 2:
            one.insert(old, Tier.HOST)
        case 3:
            one.tree.eviction.evict(Tier.DEVICE, "full", rng.randrange(1, 100))
        case 4:
            one.tree.eviction.evict(Tier.HOST, "full", rng.randrange(1, 100))
        case 5:
            one.tree.invalidate(TokenPrefix.of(old, PAGE_TOKENS), rng.randrange(len(old) // PAGE_TOKENS))


@pytest.mark.parametrize("seed", range(6))
def test_the_truth_is_right_whatever_changes_while_it_is_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "TRUTH_PAGES", 96)
    rng = random.Random(seed)
    with told() as one:
        prompts = [[rng.randrange(10**6) for _ in range(PAGE_TOKENS * 300)]]
        one.insert(prompts[0])
        for _ in range(60):
            _disturb(one, rng, prompts)
            one.round()
        reader = one.read()
        changed = 0
        deadline = time.monotonic() + 60
        while not (changed > 40 and reader.complete and one.known() == one.held()):
            assert time.monotonic() < deadline, "the index never became what the tree holds"
            # It asks, and is told while this goes on.
            if answering(one) or changed == 0 or reader.lost:
                changed += 1
                if changed < 60:
                    _disturb(one, rng, prompts)
            one.round()
        # Once as it joined, and once more where its subscription arrived behind the answer.
        assert 1 <= reader.lost <= 2, "it had to ask for the truth, and that was enough"
        assert one.tree.check() == []
        assert not one.tree.accounts.list.cursors, "the way through the tree is given back"


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["long nodes", "many nodes"])
def test_a_round_of_telling_costs_the_same_however_much_there_is(shape: str) -> None:
    def worst(pages: int) -> tuple[int, int]:
        with told() as one:
            run = 2000 if shape == "long nodes" else 5
            for first in range(0, pages, run):
                one.insert([1 + (first + i) % 50_000 for i in range(PAGE_TOKENS * run)], salt=f"{first}")
                if first % 1000 == 0:
                    one.event_recorder.round()
            for _ in range(10):
                one.insert([1] * PAGE_TOKENS, salt=f"{random.random()}")
                one.event_recorder.round()
            one.read()
            costs = []
            deadline = time.monotonic() + 60
            while one.reader is not None and not one.reader.complete:
                assert time.monotonic() < deadline, "the index never became complete"
                costs.append(steps(one.event_recorder.round))
                one.reader.poll(0.001)
            assert one.known() == one.held()
            return max(costs), sum(cost > 50 for cost in costs)

    few, many = worst(2000), worst(12_000)
    assert many[1] > few[1], "it is told in more rounds"
    assert many[0] < 1.5 * few[0], (few, many)


def test_who_waits_for_its_turn_is_told_that_it_is_not_forgotten() -> None:
    with told() as one:
        for first in range(30):
            one.insert([first] * PAGE_TOKENS * 100)
            one.event_recorder.round()
        publisher = one.event_recorder.publisher
        readers = [KVEventSubscriber(publisher.endpoint, SystemClock(), publisher.replay_endpoint) for _ in range(4)]
        deadline = time.monotonic() + 60
        while not all(reader.complete for reader in readers):
            assert time.monotonic() < deadline
            one.event_recorder.round()
            for reader in readers:
                reader.poll(0.001)
        for reader in readers:
            assert {m: set(p) for m, p in reader.index.pages.items()} == one.held()
            reader.close()


def test_an_asker_that_leaves_in_the_middle_leaves_nothing_behind() -> None:
    with told() as one:
        one.insert(list(range(PAGE_TOKENS * 20_000)))
        for first in range(12):
            one.insert([first] * PAGE_TOKENS)
            one.event_recorder.round()
        reader, deadline = one.read(), time.monotonic() + 60
        while not answering(one) or not one.tree.accounts.list.cursors:
            assert time.monotonic() < deadline
            one.round()
        reader.close()
        one.reader = None
        while answering(one):
            assert time.monotonic() < deadline
            one.event_recorder.round()
        assert not one.tree.accounts.list.cursors


def test_what_is_kept_for_those_who_ask_is_bounded_in_bytes_however_long_prompts_are() -> None:
    with told(buffer_batches=10_000, buffer_bytes=100_000) as one:
        publisher = one.event_recorder.publisher
        for first in range(40):
            one.insert([first] * PAGE_TOKENS * 500)
            one.event_recorder.round()
            assert sum(len(payload) for _, payload in publisher._buffer) == publisher._buffered <= 100_000
        assert publisher._buffer[-1][0] == 39
        one.read()
        deadline = time.monotonic() + 60
        assert one.reader is not None
        while not one.reader.complete:
            assert time.monotonic() < deadline
            one.round()
        assert one.known() == one.held(), "whoever asks for more gets the truth"
