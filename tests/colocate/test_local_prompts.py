"""Prompts that a colocated worker computes itself: their pages, in every pool, before and after the hand-over."""

from __future__ import annotations

import uuid

import pytest

from tests.support.hash_colocated import PAGE, HashColocated, hash_colocated
from tests.support.hash_workers import recite
from tests.support.pool_sets import NAMES, pool_sets
from tests.support.random_pairs import run_colocated_seed
from tests.support.worker_parts import manager_of, table_of
from twinpool.cache.allocation import Allocation
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId
from twinpool.contracts.sampling_params import SamplingParams


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def running(both: HashColocated, request: RequestId) -> Allocation:
    """Step until it has drawn two tokens; returns what it holds."""
    for _ in range(100):
        if len(both.answers[request].tokens) >= 2:
            break
        both.step()
    return next(r for r in table_of(both.worker) if r.submit.request_id == request).held


def finish_copies(both: HashColocated) -> None:
    """Step until nothing is copied between tiers: storage answers in its own time."""
    for _ in range(100_000):
        if not manager_of(both.worker).busy:
            break
        both.step()
    assert not manager_of(both.worker).busy


def left_to_storage(both: HashColocated) -> None:
    """Have the worker keep pages nowhere but in storage. What is being copied can't be evicted."""
    both.settle()
    finish_copies(both)
    for tier in (Tier.DEVICE, Tier.HOST):
        manager_of(both.worker).tree.eviction.evict(tier, "full", 1 << 20)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_state_is_handed_over_in_place_and_found_again(name: str) -> None:
    spec, prompt = pool_sets(PAGE)[name], list(range(1, 50))
    with hash_colocated(name, 200, prefill={"chunk_tokens": 8}, colocate={"prompt_tokens": 4}) as both:
        first = both.submit(prompt, greedy(40))
        running(both, first)
        again = both.submit([*prompt, 7], greedy(9))
        answers = both.run(first, again)
        assert [a.list for a in answers] == [recite(spec, prompt, 40), recite(spec, [*prompt, 7], 9)]
        assert [sum(p.cached_tokens for p in a.progress.values()) for a in answers] == [0, 48]


def test_tokens_of_earlier_attempts_count_where_the_first_of_this_one_is_the_last_of_all() -> None:
    spec, prompt = pool_sets(PAGE)["full"], list(range(1, 20))
    whole = recite(spec, prompt, 5)
    with hash_colocated("full", 200) as both:
        for known in (4, 3):
            (answer,) = both.run(both.submit(prompt, greedy(5), emitted=whole[:known]))
            assert whole[:known] + answer.list == whole
            assert answer.done is not None
            assert answer.done.reason == "length"


def test_c11_the_tree_gets_window_pages_only_where_others_take_their_place() -> None:
    prompt = list(range(1, 50))
    for short in (False, True):
        with hash_colocated("full+window", 200, prefill={"chunk_tokens": 8}) as both:
            manager = manager_of(both.worker)
            pool, hold = manager.pools.allocators["window"], manager.kinds.windows["window"]
            others = pool.lease(pool.free - hold if short else 0, "somebody else")
            allocation = running(both, both.submit(prompt, greedy(60)))
            assert allocation.own("window") == hold, "all that it needs to its end"
            given = manager.tree.accounts.sizes[Tier.DEVICE, "window"]
            assert (given > 0) == (not short)
            both.run()
            others.release()


def test_what_was_prefetched_for_a_prompt_is_let_go_with_its_hand_over_or_its_end() -> None:
    """Its own allocation has locked what it reads: a second lock would keep the host's pages for good."""
    spec, prompt = pool_sets(PAGE)["full"], list(range(1, 50))
    storage = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 28}
    cache = {"host_bytes": 1 << 20, "storage": storage, "prefetch": {"policy": "wait_complete"}}
    with hash_colocated("full", 200, cache=cache) as both:
        prefetcher = manager_of(both.worker).tiers.prefetcher
        (first,) = both.run(both.submit(prompt, greedy(4)))
        assert first.list == recite(spec, prompt, 4)
        left_to_storage(both)
        again = both.submit([*prompt, 7], greedy(40))
        for _ in range(100_000):  # Storage answers in its own time.
            if both.answers[again].tokens:
                break
            both.step()
        assert prefetcher.counters["pages_prefetched"] > 0
        assert (len(prefetcher), prefetcher.locks) == (0, 0)
        (answer,) = both.run(again)
        assert answer.list == recite(spec, [*prompt, 7], 40)
        left_to_storage(both)
        given_up = both.submit([*prompt, 8], greedy(40))
        assert len(prefetcher) == 1, "it is being read again"
        both.cancel(given_up)
        finish_copies(both)
        assert (len(prefetcher), prefetcher.locks) == (0, 0)


def test_damage_that_the_commit_of_prompts_hears_of_reaches_the_answer_whose_page_it_is() -> None:
    """That commit polls for loads as well, and takes care of prompts alone: the worker goes by the allocations'
    marks."""
    with hash_colocated("full", 200, prefill={"chunk_tokens": 8}) as both:
        request = both.submit(list(range(1, 50)), greedy(60))
        running(both, request).invalid = True
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.DAMAGED


def test_a_prompt_of_a_tenant_that_has_none_here_takes_the_place_of_one_of_who_has_several() -> None:
    spec = pool_sets(PAGE)["full"]
    prompts = [[100 * n + k for k in range(40)] for n in range(1, 6)]
    with hash_colocated("full", 200, prefill={"chunk_tokens": 8, "max_running": 2}) as both:
        flood = [both.submit(prompt, greedy(4), tenant="flood") for prompt in prompts[:4]]
        both.step()
        both.step()
        quiet = both.submit(prompts[4], greedy(4), tenant="quiet")
        both.run(quiet)
        assert sum(both.answers[request].done is not None for request in flood) <= 2, "it has half of each step"
        answers = both.run(quiet, *flood)
        assert both.worker.status().counters["preemptions"] == 1
        for prompt, answer in zip([prompts[4], *prompts[:4]], answers, strict=True):
            assert answer.list == recite(spec, prompt, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_drawn_every_answer_is_exact_and_nothing_is_left(seed: int) -> None:
    run_colocated_seed(seed)
