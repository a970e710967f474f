"""The stream watch, without I/O: loops of any period and rare tokens are flagged, ordinary streams aren't."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from twinpool.contracts.config.router_config import WatchConfig
from twinpool.contracts.ids import RequestId
from twinpool.router.verification.stream_watch import FlagReason, StreamFlag, StreamWatch, least_unlikely

VOCAB = 2048
REPEATS = WatchConfig(repetition_tokens=48)
RARE = WatchConfig(rare_factor=4.0, warm_up_tokens=20_000)


def usual(rng: random.Random, count: int) -> list[int]:
    """Tokens as languages have them: the n-th most frequent one n times as rare as the first."""
    weights = [1 / (n + 1) for n in range(VOCAB)]
    return rng.choices(range(VOCAB), weights, k=count)


def feed(watch: StreamWatch, name: str, tokens: Sequence[int], at_once: int = 1) -> list[StreamFlag]:
    rid = RequestId(name)
    flags = [f for i in range(0, len(tokens), at_once) for f in watch.feed(rid, tokens[i : i + at_once])]
    watch.end(rid)
    return flags


@pytest.mark.parametrize("period", [1, 2, 3, 5, 16, 63, 64])
def test_a_loop_of_any_period_is_flagged_once_and_soon(period: int) -> None:
    rng = random.Random(period)
    start, loop = usual(rng, 100), rng.sample(range(VOCAB), period)
    watch = StreamWatch(REPEATS, VOCAB)
    (flag,) = feed(watch, "a", [*start, *(loop * 200)[:600]])
    assert flag.why is FlagReason.REPETITION
    assert flag.detail["period"] == period
    # A run counts from its second time on: what came first was no repetition yet.
    latest = 100 + period + max(48, 3 * period)
    assert latest - 4 <= flag.position <= latest
    assert watch.flagged == {FlagReason.REPETITION: 1}


def test_a_loop_longer_than_the_longest_period_is_not_looked_for() -> None:
    loop = random.Random(1).sample(range(VOCAB), 65)
    assert feed(StreamWatch(REPEATS, VOCAB), "a", loop * 20) == []


def test_a_loop_that_breaks_off_too_soon_is_none() -> None:
    rng = random.Random(2)
    watch = StreamWatch(REPEATS, VOCAB)
    for n in range(20):
        tokens = []
        for _ in range(10):
            tokens += rng.sample(range(VOCAB), 20) + [7, 8, 9] * 14
        assert feed(watch, str(n), tokens) == []


def test_how_tokens_come_in_changes_nothing() -> None:
    rng = random.Random(3)
    tokens = [*usual(rng, 90), *([4, 5, 6] * 60), *usual(rng, 50)]
    found = [feed(StreamWatch(REPEATS, VOCAB), "a", tokens, at_once) for at_once in (1, 7, 1000)]
    assert found[0] == found[1] == found[2]


def test_streams_do_not_mix() -> None:
    rng = random.Random(4)
    watch, loop = StreamWatch(REPEATS, VOCAB), [3, 4] * 200
    other = usual(rng, 400)
    flags = []
    for a, b in zip(loop, other, strict=True):
        flags += watch.feed(RequestId("a"), [a]) + watch.feed(RequestId("b"), [b])
    assert [f.request_id for f in flags] == ["a"]


def test_ordinary_streams_are_not_flagged_and_garbage_is() -> None:
    rng = random.Random(5)
    watch = StreamWatch(RARE, VOCAB)
    assert not any(feed(watch, f"u{n}", usual(rng, 300)) for n in range(150)), "45,000 tokens"
    assert 0.02 < watch.rare_rate < 0.08
    found = [feed(watch, f"g{n}", [*usual(rng, 100), *(rng.randrange(VOCAB) for _ in range(200))]) for n in range(20)]
    assert all(len(flags) == 1 and flags[0].why is FlagReason.RARE for flags in found)
    assert all(100 < flags[0].position <= 100 + 100 for flags in found)
    assert watch.flagged[FlagReason.RARE] == 20


def test_nothing_is_rare_before_the_usual_is_known() -> None:
    rng = random.Random(6)
    watch = StreamWatch(RARE, VOCAB)
    assert not any(feed(watch, f"g{n}", [rng.randrange(VOCAB) for _ in range(300)]) for n in range(20))


def test_tokens_of_flagged_streams_do_not_become_the_usual() -> None:
    rng = random.Random(7)
    watch = StreamWatch(RARE, VOCAB)
    feed(watch, "u", usual(rng, 45_000))
    before = watch.rare_rate
    for n in range(40):
        assert feed(watch, f"g{n}", [rng.randrange(VOCAB) for _ in range(2000)])
    assert watch.rare_rate < 1.5 * before


def test_ids_beyond_the_vocabulary_are_rare_and_no_error() -> None:
    watch = StreamWatch(WatchConfig(rare_factor=2.0, warm_up_tokens=100), VOCAB)
    feed(watch, "u", usual(random.Random(8), 5000))
    assert feed(watch, "g", [VOCAB + 5] * 100)


def test_memory_is_bounded_by_the_streams_that_run() -> None:
    watch = StreamWatch(WatchConfig(repetition_tokens=48, rare_factor=8.0), VOCAB)
    rid = RequestId("long")
    watch.feed(rid, usual(random.Random(9), 20_000))
    stream = watch._streams[rid]
    assert len(stream.recent) <= 64 + 3
    assert len(stream.places) <= 64
    assert len(stream.pending) <= 64
    assert stream.rare < 1 << 64
    watch.end(rid)
    watch.end(rid)
    assert (len(watch), watch.ended) == (0, 1)


def test_what_is_remembered_of_a_model_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.router.verification.stream_watch.MEMORY_TOKENS", 10_000)
    watch = StreamWatch(RARE, VOCAB)
    feed(watch, "a", usual(random.Random(10), 30_000))
    assert sum(watch._counts) == watch._total < 10_000
    assert watch._seen == 30_000


def test_the_bound_on_chance_is_the_binomials() -> None:
    rng = random.Random(11)
    limit = least_unlikely(64, 0.05, 1e-3)
    windows = [sum(rng.random() < 0.05 for _ in range(64)) for _ in range(20_000)]
    assert sum(count >= limit for count in windows) < 20_000 * 2e-3
    assert sum(count >= limit - 2 for count in windows) > 20_000 * 1e-3
    assert least_unlikely(64, 0.0, 1e-6) == 1
    assert least_unlikely(64, 1.0, 1e-6) == 65


def test_what_is_off_costs_nothing_and_flags_nothing() -> None:
    watch = StreamWatch(WatchConfig(), VOCAB)
    assert not watch.on
    assert feed(watch, "a", [1] * 1000) == []
