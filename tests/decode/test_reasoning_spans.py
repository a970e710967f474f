"""Which state of an answer the next turn can use, where it leaves the spans out that the model thought in."""

from __future__ import annotations

import pytest

from twinpool.decode.request import ReasoningSpans

OPENS, CLOSES = 8, 9


@pytest.mark.parametrize(
    ("prompt", "answer", "kept"),
    [
        ([1, 2], [3, 4, OPENS, 5], 2),
        ([1, 2], [3, 4], 2),
        ([1, 2], [OPENS, 5, CLOSES, 6], 0),
        ([1, OPENS, 2, CLOSES], [3, 4], 2),
        ([1, OPENS, 2, CLOSES], [3, OPENS, 4], 1),
        ([1, OPENS, 2, CLOSES, OPENS], [3, CLOSES, 4], 0),
        ([1, CLOSES, OPENS], [3, 4], 0),
        ([], [3, OPENS], 1),
    ],
)
def test_of_an_answer_what_comes_before_its_first_span_is_kept(prompt: list[int], answer: list[int], kept: int) -> None:
    """A span of the prompt that is closed says nothing of the answer; within an open one all of it was thought."""
    assert ReasoningSpans(OPENS, CLOSES).keeps([*prompt, *answer], len(prompt)) == len(prompt) + kept
