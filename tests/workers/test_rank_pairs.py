"""Workers of several tensor-parallel ranks: the same answers, whatever the numbers of ranks on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.ids import Role
from tests.checkpoints import Oracle
from tests.pair import pair
from tests.workers.test_pair import expect_equal, greedy, prompts


@pytest.mark.slow
@pytest.mark.parametrize(("plane", "prefill", "decode"), [("shm", 2, 1), ("zmq", 1, 2)])
def test_greedy_answers_are_the_oracles_with_ranks_on_one_side(
    model: Path, oracle: Oracle, plane: str, prefill: int, decode: int
) -> None:
    sections: dict[str, Any] = {"transfer": {"plane": plane}, "cache": {"page_tokens": 16}}
    with pair(
        model, tokens=2048, prefill={"chunk_tokens": 96, "tp": prefill}, decode={"tp": decode}, **sections
    ) as both:
        asked = prompts(1, 1, 16, 17, 97, 200)
        asked.append(asked[-1][:150] + asked[1])
        answers = both.run(*[both.submit(p, greedy(8)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
            received = answer.progress[Role.DECODE].transfer_bytes
            assert received == -(-len(prompt) // 16) * 512 * 16 or answer is answers[-1]
