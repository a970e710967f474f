"""A colocated worker stepped by hand. The `colocated` context checks it for leaks at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.ids import Role
from tests.checkpoints import Oracle
from tests.colocated import colocated
from tests.workers.test_pair import expect_equal, greedy, prompts


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_greedy_answers_are_the_oracles(model: Path, oracle: Oracle, page_tokens: int) -> None:
    sections: dict[str, Any] = {"cache": {"page_tokens": page_tokens}, "prefill": {"chunk_tokens": 96}}
    with colocated(model, tokens=4096, **sections) as both:
        asked = prompts(1, 1, 2, 15, 16, 17, 64, 65, 96, 97, 400)
        answers = both.run(*[both.submit(p, greedy(12)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
            assert answer.progress[Role.DECODE].transfer_bytes == 0
            assert answer.progress[Role.PREFILL].computed_tokens == len(prompt)
        assert both.worker.status().counters["mixed_steps"] > 0
