"""What each setting of the tiers does, under both workers; tokens are the same under all of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import Seen, Turn, make_talks
from tests.support.tier_conversations import GREEDY, PAGE, by_turn, converse, counters, expect_hand_overs, tiers
from tests.support.worker_pair import Pair, pair
from tests.support.worker_parts import manager_of
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.ids import Role

TALKS = make_talks(12, 10, turns=(3, 4))
SMALL = {Role.PREFILL: 26 * PAGE, Role.DECODE: 40 * PAGE}
HOST_PAGES = 60


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Turn]:
    with pair(model, tokens=32768, cache={"page_tokens": PAGE}) as both:
        return converse(both, TALKS)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 300) for _ in range(count)]


def cached(both: Pair, prompt: list[int]) -> dict[str, int]:
    """Where prefill finds what of a prompt."""
    (answer,) = both.run(both.submit(prompt, GREEDY))
    assert answer.done is not None
    assert answer.done.error is None, answer.done
    return answer.progress[Role.PREFILL].cached_by_tier


def push_out(both: Pair) -> None:
    """Other requests need prefill's device: what its tree has there goes."""
    both.settle()
    while manager_of(both.prefill).supply.evict("full", 1 << 20):
        both.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache",
    [
        tiers(HOST_PAGES),
        tiers(HOST_PAGES, write_policy="selective", eviction="lfu"),
        tiers(HOST_PAGES, write_policy="back", eviction="slru"),
        tiers(HOST_PAGES, load_back="never", eviction="fifo"),
        tiers(HOST_PAGES, load_back="auto", eviction="priority"),
        tiers(6, write_policy="back"),
        tiers(HOST_PAGES, load_bytes=1, prefetch={"batch_pages": 1}),
    ],
    ids=["through", "selective-lfu", "back-slru", "never-fifo", "auto-priority", "tiny-host-back", "one-load-at-once"],
)
@pytest.mark.parametrize("policy", ["", "best_effort", "wait_complete", "timeout"])
def test_no_setting_changes_a_token(
    model: Path, undisturbed: list[Turn], tmp_path: Path, cache: dict[str, Any], policy: str
) -> None:
    stored = {"storage": {"backend": "file", "path": str(tmp_path)}} if policy else {}
    wait = {"prefetch": {**cache.get("prefetch", {}), "policy": policy or "timeout"}}
    known = Seen(PAGE)
    for turn in undisturbed:
        known.add([*turn.prompt, *turn.answer])
    sizes = SMALL
    if cache["host_bytes"] < tiers(HOST_PAGES)["host_bytes"]:
        # Who has more pages than the host can't leave decode for a while: there is room for all three.
        longest = max(len(turn.prompt) + len(turn.answer) for turn in undisturbed)
        sizes = SMALL | {Role.DECODE: 3 * (longest + 2 * PAGE)}
    with pair(model, tokens=sizes, cache={**cache, **stored, **wait}) as both:
        turns = converse(both, TALKS)
        assert by_turn(turns) == by_turn(undisturbed)
        expect_hand_overs(turns)
        for turn in turns:
            assert turn.cached <= known.longest(turn.prompt)
            assert turn.again >= 0
        if cache["load_back"] == "never":
            assert not any(turn.tiers["host"] or turn.tiers["storage"] for turn in turns)


@pytest.mark.slow
def test_write_through_selective_copies_what_was_hit_twice(model: Path) -> None:
    prompt = tokens(1, 5 * PAGE + 3)
    with pair(model, cache=tiers(HOST_PAGES, write_policy="selective", write_hits=2)) as both:
        saved = []
        for _ in range(4):
            cached(both, prompt)
            saved.append(counters(both)["pages_saved"])
        assert saved == [0, 0, 5, 5], "not when it was computed, nor when it was hit once"


def test_write_back_copies_what_must_go_and_nothing_before(model: Path) -> None:
    prompt = tokens(2, 5 * PAGE + 3)
    with pair(model, cache=tiers(HOST_PAGES, write_policy="back")) as both:
        cached(both, prompt)
        cached(both, prompt)
        assert counters(both)["pages_saved"] == 0
        push_out(both)
        assert counters(both)["pages_saved"] == 5
        assert cached(both, prompt) == {"device": 0, "host": 5 * PAGE, "storage": 0}


@pytest.mark.slow
def test_what_the_host_has_is_loaded_or_computed_again_as_load_back_says(model: Path) -> None:
    prompt = tokens(3, 5 * PAGE + 3)
    for load_back, loaded in (("always", 5), ("never", 0)):
        with pair(model, cache=tiers(HOST_PAGES, load_back=load_back)) as both:
            cached(both, prompt)
            push_out(both)
            assert cached(both, prompt)["host"] == loaded * PAGE
            assert counters(both)["pages_loaded"] == loaded


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_priority_keeps_in_the_caches_what_matters_more(model: Path, eviction: str) -> None:
    """The first prompt is the oldest, and under priority the last to go."""
    first, others = tokens(4, 4 * PAGE + 1), [tokens(5 + n, 4 * PAGE + 1) for n in range(3)]
    sizes = {Role.PREFILL: 13 * PAGE, Role.DECODE: 100 * PAGE}
    with pair(model, tokens=sizes, cache={"page_tokens": PAGE, "eviction": eviction}) as both:
        both.run(both.submit(first, GREEDY, priority=3))
        for other in others:
            both.run(both.submit(other, GREEDY, priority=1))
        assert counters(both)["pages_evicted"] > 0
        assert cached(both, first)["device"] == (4 * PAGE if eviction == "priority" else 0)


def test_with_prefixes_of_a_reasoning_span_decode_frees_exactly_the_rest(model: Path) -> None:
    prompt = tokens(9, 3 * PAGE + 5)
    with pair(model) as both:
        answer = both.run(both.submit(prompt, GREEDY))[0].list
    opens = answer[6]
    before = len(prompt) + answer.index(opens)
    strip = {"page_tokens": PAGE, "strip_reasoning": True, "reasoning_tokens": f"{opens},299", "host_bytes": 1 << 20}
    with pair(model, cache=strip) as both:
        both.run(both.submit(prompt, GREEDY))
        both.settle()
        manager = manager_of(both.decode)
        kept = before // PAGE
        assert (
            manager.tree.accounts.sizes[Tier.DEVICE, "full"] == manager.tree.accounts.sizes[Tier.HOST, "full"] == kept
        )
        allocator = manager.pools.allocators["full"]
        assert allocator.free == allocator.total - kept
