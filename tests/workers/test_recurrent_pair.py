"""Both real workers over models with recurrent layers: hand-over, snapshots, and the next turn of a conversation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import VOCAB, Oracle, compare
from tests.support.model_families import FAMILIES
from tests.support.worker_pair import pair
from twinpool.cache.allocation import Allocation
from twinpool.cache.manager.allocations import Allocations
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
PAGE = 16
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.soak)])
def test_the_next_turn_of_a_conversation_goes_on_from_a_snapshot(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots: dict[int, int] = {}
    allocate_of = Allocations.allocate

    def noted(self: Allocations, *args: object, **options: object) -> Allocation | None:
        allocation = allocate_of(self, *args, **options)  # type: ignore[arg-type]
        if allocation is not None:
            snapshots[allocation.cached.total] = len(allocation.lock.of("state"))
        return allocation

    monkeypatch.setattr(Allocations, "allocate", noted)
    folder = FAMILIES[name](tmp_path / "model")
    oracle = Oracle(folder)
    with pair(folder, prefill={"chunk_tokens": 40}, cache={"page_tokens": PAGE}) as both:
        asked = prompts(1, 1, 17, 48, 100)
        first = [both.submit(prompt, GREEDY) for prompt in asked]
        answers = [answer.list for answer in both.run(*first)]
        turns = [a + b + c for a, b, c in zip(asked, answers, prompts(2, 5, 20, 3, 30), strict=True)]
        snapshots.clear()
        second = [both.submit(prompt, GREEDY) for prompt in turns]
        for prompt, answer in zip([*asked, *turns], [*both.run(*first), *both.run(*second)], strict=True):
            assert answer.done is not None
            assert answer.done.error is None
            verdict = compare(oracle, prompt, answer.list)
            assert verdict.equal, verdict
        cached = [both.answers[request].progress[Role.PREFILL].cached_tokens for request in second]
    # Prefill kept the state at the last page boundary of each first prompt.
    assert cached == [len(prompt) // PAGE * PAGE for prompt in asked]
    # All of it came with a snapshot: nothing is computed from pages alone.
    assert snapshots == {tokens: int(tokens > 0) for tokens in cached}
