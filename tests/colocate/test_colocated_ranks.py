"""A colocated worker of several tensor-parallel ranks: rows of both kinds in the steps of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.colocated_worker import colocated
from tests.workers.test_pair import expect_equal, greedy, prompts


@pytest.mark.slow
@pytest.mark.parametrize("retract_every", [0, 3])
def test_greedy_answers_of_two_ranks_are_the_oracles(model: Path, oracle: Oracle, retract_every: int) -> None:
    sections: dict[str, Any] = {"transfer": {"plane": "shm"}, "cache": {"page_tokens": 16, "host_bytes": 1 << 22}}
    with colocated(
        model, tokens=2048, prefill={"chunk_tokens": 32}, colocate={"tp": 2, "prompt_tokens": 16},
        faults={"retract_every": retract_every}, decode={"retract": "copy"}, **sections,
    ) as both:  # fmt: skip
        asked = prompts(1, 1, 16, 17, 97, 200)
        asked.append(asked[-1][:150] + asked[1])
        answers = both.run(*[both.submit(p, greedy(12)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
        counters = both.worker.status().counters
        assert counters["mixed_steps"] > 0
        assert (counters["resumptions"] > 0) == bool(retract_every)
