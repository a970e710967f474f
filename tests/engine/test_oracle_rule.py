"""The rule by which answers are judged: what it lets pass, and what not."""

from __future__ import annotations

import pytest

from tests.engine.harness import MakeCheckpoint, MakeOracle
from tests.engine.judged import prompts
from tests.support.checkpoints import VOCAB, compare


@pytest.mark.slow
def test_one_pass_says_what_generate_says_and_no_other_token_passes(
    checkpoint: MakeCheckpoint, oracle_of: MakeOracle
) -> None:
    oracle = oracle_of(checkpoint("llama"))
    for prompt in prompts(6, 1, 40, 90):
        answer = oracle.generate(prompt, 8)
        assert oracle.surely_says(prompt, answer)
        assert compare(oracle, prompt, answer).exact
        for at in range(8):
            wrong = [*answer[:at], (answer[at] + 1) % VOCAB, *answer[at + 1 :]]
            assert not oracle.surely_says(prompt, wrong)
        assert not compare(oracle, prompt, wrong).equal


def test_what_is_too_close_to_tell_is_left_to_generate(checkpoint: MakeCheckpoint, oracle_of: MakeOracle) -> None:
    oracle = oracle_of(checkpoint("llama"))
    (prompt,) = prompts(6, 40)
    answer, difference = oracle.generate(prompt, 8), oracle.difference
    assert difference < 1e-3
    try:
        oracle.difference = 1e6
        assert not oracle.surely_says(prompt, answer)
        assert compare(oracle, prompt, answer).exact, "generate says so"
    finally:
        oracle.difference = difference
