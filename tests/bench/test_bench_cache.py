"""The cache's benches do what they say: both sides hold the same, and hit rates are those of a plain model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.cache import trace_replay as trace_cache
from bench.cache import tree_speed as cache
from bench.cache.plain_trie import Trie
from bench.cache.trace_replay import Sizes, replay
from bench.cache.tree_workload import PAGE_TOKENS, Clients, TreeSide, fill
from tests.support.plain_trace_cache import Ask, Trace, load, plain_lru, unlimited
from twinpool.cache.prefix_cache.tree_node import TokenPrefix

SLICE = Path(__file__).parents[2] / "bench" / "traces" / "conversation_200.jsonl"
BLOCK = 512


def trace_of(seed: int, folder: Path, requests: int = 80) -> Trace:
    """Conversations that go on, branch off and are asked again, as a trace file would have them."""
    rng, lines = random.Random(seed), []
    talks: list[list[int]] = [[rng.randrange(3)] for _ in range(8)]
    for number in range(requests):
        talk = rng.choice(talks)
        ids = [*talk[: rng.randrange(1, len(talk) + 1)], *(1000 * number + i for i in range(rng.randrange(1, 5)))]
        if rng.random() < 0.5:
            ids = [*talk, 1000 * number]
        length = BLOCK * (len(ids) - 1) + rng.choice([1, BLOCK // 2, BLOCK])
        talks[rng.randrange(len(talks))] = ids[: rng.randrange(4, 10)]
        lines.append({"timestamp": number, "input_length": length, "output_length": 1, "hash_ids": ids})
    path = folder / f"{seed}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return load(path, BLOCK)


def asks(*prompts: tuple[int, ...]) -> Trace:
    """Prompts of whole pages of one token and one token more, by the names of their pages."""
    return Trace(1, tuple(Ask(len(names) + 1, names, names, len(names)) for names in prompts))


def test_the_bounds_of_a_trace_are_those_worked_out_by_hand() -> None:
    trace = asks((1, 2, 3), (1, 2, 4), (5, 6), (1, 2, 3))
    assert unlimited(trace) == 2 + 3
    assert plain_lru(trace, 100) == 5
    # Each needs a page more than it has names. Room for five: the third prompt drops 3 and 4, the fourth finds 1 and 2.
    assert plain_lru(trace, 5) == 2 + 2
    # Room for four: the third prompt drops 2 as well, the deeper of what is as old.
    assert plain_lru(trace, 4) == 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_tree_under_lru_finds_exactly_what_a_plain_lru_of_pages_finds(seed: int, tmp_path: Path) -> None:
    trace = trace_of(seed, tmp_path)
    found, first_in = [], []
    for pages in range(trace.pages(trace.longest), trace.distinct, 11):
        hits = replay(trace, Sizes(pages * BLOCK)).cached.total
        assert hits == plain_lru(trace, pages)
        found.append(hits)
        first_in.append(replay(trace, Sizes(pages * BLOCK), "fifo").cached.total)
    assert len(set(found)) > 2, "no size forgot anything: the comparison says nothing"
    assert found != first_in, "another policy finds the same: the comparison says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority", "slru"])
def test_every_policy_finds_all_when_everything_fits_and_less_when_not(policy: str, tmp_path: Path) -> None:
    trace = trace_of(11, tmp_path)
    bound = unlimited(trace)
    everything = (trace.distinct + trace.pages(trace.longest)) * BLOCK
    assert replay(trace, Sizes(everything), policy).cached.total == bound
    assert replay(trace, Sizes(trace.pages(trace.longest) * BLOCK), policy).cached.total < bound


@pytest.mark.slow
def test_tiers_below_find_what_the_device_forgot(tmp_path: Path) -> None:
    trace = trace_of(12, tmp_path)
    bound, everything = unlimited(trace), (trace.distinct + trace.pages(trace.longest)) * BLOCK
    small = trace.pages(trace.longest) * BLOCK
    alone = replay(trace, Sizes(small)).cached
    hosted = replay(trace, Sizes(small, everything)).cached
    stored = replay(trace, Sizes(small, small, everything)).cached
    assert alone.total < bound
    assert hosted.total == stored.total == bound
    assert hosted.device == alone.device
    assert hosted.host > 0 == hosted.storage
    assert stored.storage > 0


@pytest.mark.slow
def test_pages_smaller_than_blocks_find_no_less(tmp_path: Path) -> None:
    whole = load(SLICE, 512, limit=40)
    fine = load(SLICE, 64, limit=40)
    assert unlimited(whole) <= unlimited(fine)
    size = 180 * BLOCK
    assert replay(fine, Sizes(size)).cached.total == plain_lru(fine, size // 64)


@pytest.mark.slow
def test_the_replay_command_runs_on_the_slice_in_the_repository(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "curve.svg"
    flags = ["--requests", "30", "--sizes", "120k", "2M", "--policies", "lru", "--storage", "2M"]
    assert trace_cache.main([str(SLICE), *flags, "--json", str(out), "--plot", str(plot)]) == 0
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert [run["host"] for run in figures["runs"]] == [0, 0, 120_000, 2_000_000, 120_000]
    assert max(run["cached"]["device"] for run in figures["runs"]) <= figures["unlimited"]
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_a_device_too_small_for_the_longest_prompt_is_refused_with_its_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        trace_cache.main([str(SLICE), "--requests", "5", "--sizes", "1k"])
    assert "longest prompt" in capsys.readouterr().err


@pytest.mark.slow
def test_tree_and_trie_hold_the_same_prefixes() -> None:
    side, trie, clients = TreeSide(1500), Trie(), Clients(3)
    numbers = list(range(3000))
    new: list[tuple[int, int]] = []

    def insert(prefix: TokenPrefix) -> int:
        new.append((side.insert(prefix), trie.insert(prefix, numbers)))
        return new[-1][0]

    samples = fill(clients, 1500, insert)
    assert all(ours == theirs for ours, theirs in new)
    assert trie.pages == sum(side.nodes())
    for talk in samples.conversations[:20]:
        other = TokenPrefix(talk.raw[: len(talk.raw) // 2] + clients.tokens(8), PAGE_TOKENS)
        for prefix in (talk.whole, other):
            assert side.tree.match(prefix).depth == len(trie.match(prefix))
    assert side.tree.check() == []


@pytest.mark.slow
def test_the_trie_frees_no_page_that_is_in_use_or_has_pages_below() -> None:
    trie, clients = Trie(), Clients(4)
    talk = clients.conversation(turns=2, pages=3)
    first, second = talk.prefixes()
    trie.insert(first, list(range(100)))
    trie.insert(second, list(range(100)))
    path = trie.match(first)
    trie.lock(path)
    assert trie.evict(1000) == list(range(len(second) - 1, len(first) - 1, -1))
    trie.unlock(path)
    assert len(trie.evict(1000)) == len(first)
    assert trie.pages == 0


@pytest.mark.slow
def test_the_quick_bench_measures_tree_and_trie(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert cache.main(["--pages", "1500", "--repeats", "1", "--quick", "--json", str(out)]) == 0
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert figures["tree"][0]["timings"].keys() == figures["trie"][0]["timings"].keys()
    assert figures["tree"][0]["pages"] == figures["trie"][0]["pages"] >= 1500
    timings = [timing for side in ("tree", "trie") for timing in figures[side][0]["timings"].values()]
    assert all(timing["p50_us"] > 0 for timing in timings)
