"""Requests that may have the rest of the context, as all do that name no limit: decode lets them in by what answers
come to, and takes pages as they go on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import CONTEXT, make_checkpoint
from tests.support.worker_pair import pair
from tests.support.worker_parts import scheduler_of
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("limit") / "m", "qwen3", layers=1, eos=None)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


def test_many_run_at_once_in_a_pool_that_holds_one_context(small: Path) -> None:
    """Six from the first moment on; none is refused, and each holds pages for what it has, not for what it may have."""
    prompts = [words(n, 50) for n in range(6)]
    with pair(
        small, tokens={Role.PREFILL: 8192, Role.DECODE: CONTEXT + 64}, decode={"first_answer_tokens": 128}
    ) as both:
        asked = [both.submit(p, SamplingParams(max_tokens=CONTEXT - 50, temperature=1.0, seed=3)) for p in prompts]
        steps = 0
        while steps < 40 or (len(scheduler_of(both.decode).running) < 6 and steps < 400):  # Hand-overs take their time.
            both.step()
            steps += 1
        status = both.decode.status()
        assert len(scheduler_of(both.decode).running) == 6
        assert status.pages_total - status.pages_free <= 6 * (-(-50 // 16) + -(-steps // 16))
        assert not any(both.answers[rid].done for rid in asked)
        for rid in asked:
            both.cancel(rid)


def test_one_that_takes_all_of_the_context_gets_it(small: Path) -> None:
    with pair(small, tokens=1024, decode={"first_answer_tokens": 16}) as both:
        prompt = words(9, 40)
        both.submit(words(10, 40), SamplingParams(max_tokens=700, temperature=1.0, seed=1))
        (answer,) = both.run(both.submit(prompt, SamplingParams(max_tokens=900, temperature=1.0, seed=2)))
        if answer.done is not None and answer.done.error is None:
            assert len(answer.list) == 900
        both.run()
