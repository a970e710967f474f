"""A conversation goes on after both of its workers died, from what their host memory still has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.family_scenes import greedy
from tests.support.model_families import FAMILIES
from tests.support.tier_conversations import PAGE, busy, counters
from tests.support.worker_pair import Pair, pair
from twinpool.contracts.ids import PAIR, Role

COUNT = 6


class KeptMemory:
    """`ArenaProvider` whose memory is this object's: it stays when the worker has gone."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int, str], memoryview] = {}

    def take(self, rank: int, nbytes: int, fingerprint: str) -> memoryview | None:
        return self.kept.setdefault((rank, nbytes, fingerprint), memoryview(bytearray(nbytes)))


@pytest.fixture(params=["qwen3", "gemma3", "qwen3_next", "deepseek_v32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("arena") / request.param, seed=3)


@contextmanager
def workers(folder: Path, arenas: dict[Role, KeptMemory], *, settle: bool = True, **sections: Any) -> Iterator[Pair]:
    sizes = {"page_tokens": PAGE, "host_bytes": 32 << 20, "load_back": "always"}
    with pair(folder, tokens=4096, arenas=arenas, cache=sizes, settle=settle, **sections) as both:
        yield both


def turn(both: Pair, prompt: list[int]) -> tuple[list[int], dict[str, int], int]:
    """The answer, what prefill found by tier, and how much it computed."""
    (answer,) = both.run(both.submit(prompt, greedy(COUNT)))
    assert answer.done is not None
    assert answer.done.error is None, answer.done
    while busy(both):
        both.step()
    progress = answer.progress[Role.PREFILL]
    return answer.list, dict(progress.cached_by_tier), progress.computed_tokens


def say(answer: list[int], prompt: list[int], seed: int) -> list[int]:
    return [*prompt, *answer, *[(seed * 31 + 7 * i) % 250 + 1 for i in range(20)]]


@pytest.mark.slow
def test_the_next_turn_after_a_death_computes_as_little_as_without_it(folder: Path) -> None:
    prompt = [(5 * i * i + i) % 250 + 1 for i in range(150)]
    arenas = {role: KeptMemory() for role in PAIR}
    with workers(folder, {}) as both:
        first, _, _ = turn(both, prompt)
        longer = say(first, prompt, 2)
        undisturbed, found, _ = turn(both, longer)
        assert sum(found.values()) >= 128
    with workers(folder, arenas) as both:
        assert turn(both, prompt)[0] == first
    with workers(folder, arenas) as both:
        assert counters(both)["arena_pages_adopted"] >= 150 // PAGE
        answer, again, computed = turn(both, longer)
        assert answer == undisturbed
        assert again["host"] == sum(found.values()), "all that was found without a death is found on the host"
        assert computed == len(longer) - again["host"]
        assert counters(both, Role.DECODE)["hit_tokens_host"] > 0, "decode adopts as well"
    with workers(folder, {}) as both:
        _, none, computed = turn(both, longer)
        assert sum(none.values()) == 0
        assert computed == len(longer), "without an arena all of it is computed again"


@pytest.mark.slow
def test_a_long_prompt_whose_worker_dies_in_the_middle_goes_on_where_it_was(folder: Path) -> None:
    prompt = [(7 * i * i + i) % 250 + 1 for i in range(400)]
    arenas = {role: KeptMemory() for role in PAIR}
    chunks: dict[str, object] = {"chunk_tokens": 32, "share_tokens": 64}
    with workers(folder, {}, prefill=chunks) as both:
        undisturbed, _, _ = turn(both, prompt)
    with workers(folder, arenas, settle=False, prefill=chunks) as both:
        both.submit(prompt, greedy(COUNT))
        while counters(both)["prompt_tokens_computed"] < 300:
            both.step()
    with workers(folder, arenas, prefill=chunks) as both:
        answer, found, computed = turn(both, prompt)
        assert answer == undisturbed
        assert found["host"] >= 300 - 64 - 32
        assert computed == len(prompt) - found["host"]
