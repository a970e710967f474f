"""What is due at the end of a prompt, against the definition position by position."""

from __future__ import annotations

import random

import pytest
import torch

from twinpool.cache.memory.kv_cache_spec import (
    BufferSpec,
    IndexSpace,
    PoolKind,
    PoolSetSpec,
    PoolSpec,
    due,
    extents,
    missing,
)


def spec(page_tokens: int, window_tokens: int) -> PoolSetSpec:
    k = BufferSpec("k", 1, (1, 2), torch.float32)
    slot = BufferSpec("s", 1, (2,), torch.float32, index=IndexSpace.SLOT)
    return PoolSetSpec(
        page_tokens,
        (
            PoolSpec("pages", (k,)),
            PoolSpec("near", (k,), PoolKind.WINDOW, window_tokens),
            PoolSpec("sum", (slot,), PoolKind.STATE),
        ),
    )


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_due_is_every_page_the_window_of_the_next_position_and_the_last_state(page_tokens: int) -> None:
    for window_tokens in (1, 2, 4, 5, 9, 16, 17, 40):
        for positions in range(70):
            found = due(spec(page_tokens, window_tokens), positions)
            seen = range(max(0, positions - window_tokens + 1), positions)
            assert set(found["pages"]) == {p // page_tokens for p in range(positions)}
            assert set(found["near"]) == {p // page_tokens for p in seen}, (window_tokens, positions)
            assert list(found["sum"]) == ([(positions - 1) // page_tokens] if positions else [])


def test_the_example_of_the_diagram_is_what_is_computed() -> None:
    assert due(spec(4, 9), 27) == {"pages": range(7), "near": range(4, 7), "sum": range(6, 7)}


def test_a12_what_is_held_is_subtracted_pool_by_pool() -> None:
    wanted = due(spec(4, 9), 27)
    held = {"pages": range(5), "near": {4}}
    assert missing(wanted, held) == {"pages": range(5, 7), "near": range(5, 7), "sum": range(6, 7)}
    assert missing(wanted, {"sum": [6], "near": {6, 3}}) == {
        "pages": range(7),
        "near": range(4, 6),
        "sum": range(7, 7),
    }


def test_what_is_missing_covers_every_number_that_is_not_held_and_ends_in_ones_that_are_not() -> None:
    dice = random.Random(5)
    for _ in range(300):
        numbers = range(start := dice.randrange(9), start + dice.randrange(9))
        held = {n for n in range(20) if dice.random() < 0.6}
        lacks = missing({"x": numbers}, {"x": held})["x"]
        assert set(numbers) - held <= set(lacks) <= set(numbers)
        assert not lacks or not {lacks[0], lacks[-1]} & held


def test_what_is_held_as_a_range_is_subtracted_as_the_set_of_its_numbers_is() -> None:
    dice = random.Random(6)
    for _ in range(300):
        numbers, held = (range(start := dice.randrange(9), start + dice.randrange(9)) for _ in range(2))
        for there in (held, held[:: 1 + dice.randrange(3)]):
            assert missing({"x": numbers}, {"x": there}) == missing({"x": numbers}, {"x": set(there)}), (numbers, there)


def test_a_page_is_digested_up_to_the_prompts_end_and_a_state_after_it() -> None:
    assert extents(spec(4, 9), "near", range(5, 7), 27) == ([20, 24], [24, 27])
    assert extents(spec(4, 9), "sum", range(6, 7), 27) == ([27], [28])
