"""The rule by which decode and prompts share the tokens of a step, alone."""

from __future__ import annotations

import pytest

from twinpool.colocate.worker import prompt_tokens


@pytest.mark.parametrize(
    ("budget", "rows", "least", "page_tokens", "expected"),
    [
        (512, 0, 64, 64, 512),
        (512, 40, 64, 64, 472),
        (512, 500, 64, 64, 64),
        (512, 600, 64, 64, 64),
        (512, 500, 1, 64, 64),
        (32, 20, 64, 64, 32),
        (1, 64, 1, 1, 1),
    ],
)
def test_rows_come_first_and_prompts_keep_their_part(
    budget: int, rows: int, least: int, page_tokens: int, expected: int
) -> None:
    assert prompt_tokens(budget, rows, least, page_tokens) == expected


def test_a_step_has_no_more_tokens_than_its_budget_or_its_rows_and_the_least_part() -> None:
    for budget in (1, 8, 64, 100):
        for rows in range(130):
            tokens = prompt_tokens(budget, rows, 16, 8)
            assert 0 < tokens <= budget
            assert rows + tokens <= max(budget, rows + 16)
